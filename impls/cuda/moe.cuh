// Grouped matrix products over the chosen experts in float32: answers spec/ops/moe.py together with swiglu_f32.
//
//   moe_group          ids [pairs] (pair = row * chosen + slot) -> starts [experts + 1], order [pairs]: the pairs of each expert, ascending
//   matmul_grouped_f32 out [pairs, cols]: out[p] = a[p / divisor] @ b[ids[p]], b [experts, inner, cols]
//
// gate and up read the row of a pair (divisor = chosen), down reads the pair's own activation (divisor = 1). Accumulates in float32
// by FMA in order of `inner`. Experts without rows cost nothing but a look at their count.
#pragma once
#include "common.cuh"

namespace paritree {
namespace grouped {
constexpr int ROWS = 32, COLS = 64, DEPTH = 16, THREADS = 256;
}
}  // namespace paritree

// one block, at least `experts` threads unless experts > 1024; dynamic shared memory: experts + 1 words
extern "C" __global__ void moe_group(const int* ids, int* starts, int* order, int pairs, int experts) {
    PARITREE_SHARED(int, counts);
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int count = 0;
        for (int p = 0; p < pairs; ++p) count += ids[p] == e;
        counts[e] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int total = 0;
        for (int e = 0; e < experts; ++e) {
            const int count = counts[e];
            starts[e] = counts[e] = total;
            total += count;
        }
        starts[experts] = total;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int at = counts[e];
        for (int p = 0; p < pairs; ++p)
            if (ids[p] == e) order[at++] = p;
    }
}

// grid (ceil(cols / 64), number of row tiles: at most pairs / 32 + experts), block 256
extern "C" __global__ void __launch_bounds__(256)
matmul_grouped_f32(const float* a, int divisor, const float* b, const int* starts, const int* order, float* out, int experts, int cols, int inner) {
    using namespace paritree::grouped;
    __shared__ __align__(16) float a_tile[DEPTH][ROWS + 4];
    __shared__ __align__(16) float b_tile[DEPTH][COLS + 4];
    int tile = blockIdx.y, expert = 0, count = 0;
    for (; expert < experts; ++expert) {
        count = starts[expert + 1] - starts[expert];
        const int tiles = (count + ROWS - 1) / ROWS;
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (expert == experts) return;
    const int* own = order + starts[expert] + tile * ROWS;
    const int rows = min(ROWS, count - tile * ROWS);
    const float* weights = b + static_cast<long long>(expert) * inner * cols;
    const int thread = threadIdx.x, first_col = blockIdx.x * COLS;
    const int tile_row = thread / 16 * 2, tile_col = thread % 16 * 4;
    float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    for (int start = 0; start < inner; start += DEPTH) {
        for (int at = thread; at < ROWS * DEPTH; at += THREADS) {
            const int m = at / DEPTH, k = start + at % DEPTH;
            a_tile[at % DEPTH][m] = m < rows && k < inner ? a[static_cast<long long>(own[m] / divisor) * inner + k] : 0.0f;
        }
        for (int at = thread; at < COLS * DEPTH; at += THREADS) {
            const int k = start + at / COLS, n = first_col + at % COLS;
            b_tile[at / COLS][at % COLS] = k < inner && n < cols ? weights[static_cast<long long>(k) * cols + n] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const float x[2] = {a_tile[k][tile_row], a_tile[k][tile_row + 1]};
            const float4 y = *reinterpret_cast<const float4*>(&b_tile[k][tile_col]);
            const float ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(x[i], ys[j], sums[i][j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j)
            if (tile_row + i < rows && first_col + tile_col + j < cols)
                out[static_cast<long long>(own[tile_row + i]) * cols + first_col + tile_col + j] = sums[i][j];
}
