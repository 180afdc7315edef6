// Grouped matrix products over the chosen experts in float32: answers spec/ops/moe.py together with swiglu_f32.
//
//   moe_group          ids [pairs] (pair = row * chosen + slot) -> starts [experts + 1], order [pairs]: the pairs of each expert, ascending
//   matmul_grouped_f32 out [pairs, cols]: out[p] = a[p / divisor] @ b[ids[p]], b [experts, inner, cols]; for many rows an expert
//   matmul_grouped_rows2_f32, rows8, rows16  the same for few rows an expert, where the time is that of reading the weights: up to two products
//                      of the same rows in one launch (gate and up). A row's sum does not depend on how many rows a tile has
//
// gate and up read the row of a pair (divisor = chosen), down reads the pair's own activation (divisor = 1). Accumulates in float32
// by FMA in order of `inner`. Experts without rows cost nothing but a look at their count.
#pragma once
#include "common.cuh"

namespace paritree {
namespace grouped {
constexpr int ROWS = 32, COLS = 64, DEPTH = 16, THREADS = 256;
constexpr int FEW_COLS = 32, WARPS = 8, CHUNK = 256, FLIGHT = 16;  // FLIGHT: weights of a lane on their way at a time

// The expert of a tile of `size` rows, and the place of the tile among its own; expert == experts: there are fewer tiles. By whole warps.
PARITREE_INLINE void find_tile(const int* starts, int experts, int size, int& tile, int& expert) {
    const int lane = threadIdx.x & 31;
    for (int first = 0; first < experts; first += 32) {
        const int e = first + lane;
        const int own = e < experts ? (starts[e + 1] - starts[e] + size - 1) / size : 0;
        int before = own;  // tiles up to this lane's expert
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, before, step);
            if (lane >= step) before += other;
        }
        const unsigned past = __ballot_sync(FULL_WARP, before > tile);
        if (past) {
            const int hit = __ffs(static_cast<int>(past)) - 1;
            tile -= __shfl_sync(FULL_WARP, before - own, hit);
            expert = first + hit;
            return;
        }
        tile -= __shfl_sync(FULL_WARP, before, 31);
    }
    expert = experts;
}
}  // namespace grouped
}  // namespace paritree

// one block of whole warps, a warp an expert at a time; dynamic shared memory: experts + 1 words
extern "C" __global__ void moe_group(const int* ids, int* starts, int* order, int pairs, int experts) {
    PARITREE_SHARED(int, counts);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int e = warp; e < experts; e += warps) {
        int count = 0;
        for (int first = 0; first < pairs; first += 32) count += __popc(__ballot_sync(paritree::FULL_WARP, first + lane < pairs && ids[first + lane] == e));
        if (lane == 0) counts[e] = count;
    }
    __syncthreads();
    if (warp == 0) {
        int total = 0;
        for (int first = 0; first < experts; first += 32) {
            const int e = first + lane, own = e < experts ? counts[e] : 0;
            int upto = own;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(paritree::FULL_WARP, upto, step);
                if (lane >= step) upto += other;
            }
            if (e < experts) starts[e] = counts[e] = total + upto - own;
            total += __shfl_sync(paritree::FULL_WARP, upto, 31);
        }
        if (lane == 0) starts[experts] = total;
    }
    __syncthreads();
    for (int e = warp; e < experts; e += warps) {
        int at = counts[e];
        for (int first = 0; first < pairs; first += 32) {
            const bool own = first + lane < pairs && ids[first + lane] == e;
            const unsigned owners = __ballot_sync(paritree::FULL_WARP, own);
            if (own) order[at + __popc(owners & ((1u << lane) - 1u))] = first + lane;
            at += __popc(owners);
        }
    }
}

// grid (ceil(cols / 64), number of row tiles: at most pairs / 32 + experts), block 256
extern "C" __global__ void __launch_bounds__(256)
matmul_grouped_f32(const float* a, int divisor, const float* b, const int* starts, const int* order, float* out, int experts, int cols, int inner) {
    using namespace paritree::grouped;
    __shared__ __align__(16) float a_tile[DEPTH][ROWS + 4];
    __shared__ __align__(16) float b_tile[DEPTH][COLS + 4];
    int tile = blockIdx.y, expert;
    find_tile(starts, experts, ROWS, tile, expert);
    if (expert == experts) return;
    const int count = starts[expert + 1] - starts[expert];
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

namespace paritree {
// grid (ceil(cols / 32), number of row tiles: at most pairs / FEW_ROWS + experts, 1 or 2), block 256. A lane owns a column; the warps share the depth,
// every warp 32 of CHUNK, and are joined in order at the end.
template <int FEW_ROWS>
PARITREE_INLINE void matmul_grouped_rows(const float* a, int divisor, const float* b, const float* second_b, const int* starts, const int* order, float* out,
                                         float* second_out, int experts, int cols, int inner) {
    using namespace paritree::grouped;
    __shared__ __align__(16) float a_tile[FEW_ROWS][CHUNK];
    __shared__ float partial[WARPS][FEW_ROWS][FEW_COLS];
    int tile = blockIdx.y, expert;
    find_tile(starts, experts, FEW_ROWS, tile, expert);
    if (expert == experts) return;
    const int* own = order + starts[expert] + tile * FEW_ROWS;
    const int rows = min(FEW_ROWS, starts[expert + 1] - starts[expert] - tile * FEW_ROWS);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, column = blockIdx.x * FEW_COLS + lane;
    const float* weights = (blockIdx.z ? second_b : b) + static_cast<long long>(expert) * inner * cols + min(column, cols - 1);
    float sums[FEW_ROWS];
#pragma unroll
    for (int m = 0; m < FEW_ROWS; ++m) sums[m] = 0.0f;
    for (int start = 0; start < inner; start += CHUNK) {
        __syncthreads();  // the chunk before has been used
#pragma unroll
        for (int m = 0; m < FEW_ROWS; ++m)
            a_tile[m][thread] = m < rows && start + thread < inner ? a[static_cast<long long>(own[m] / divisor) * inner + start + thread] : 0.0f;
        __syncthreads();
        const int base = warp * (CHUNK / WARPS);
#pragma unroll
        for (int part = 0; part < CHUNK / WARPS; part += FLIGHT) {
            float y[FLIGHT];
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) {
                const int k = start + base + part + i;
                y[i] = k < inner ? weights[static_cast<long long>(k) * cols] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < FLIGHT; i += 4)
#pragma unroll
                for (int m = 0; m < FEW_ROWS; ++m) {
                    const float4 x = *reinterpret_cast<const float4*>(&a_tile[m][base + part + i]);
                    sums[m] = fmaf(x.x, y[i], sums[m]);
                    sums[m] = fmaf(x.y, y[i + 1], sums[m]);
                    sums[m] = fmaf(x.z, y[i + 2], sums[m]);
                    sums[m] = fmaf(x.w, y[i + 3], sums[m]);
                }
        }
    }
#pragma unroll
    for (int m = 0; m < FEW_ROWS; ++m) partial[warp][m][lane] = sums[m];
    __syncthreads();
    for (int m = warp; m < rows && column < cols; m += WARPS) {  // warp w joins rows w, w + 8
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += partial[w][m][lane];
        (blockIdx.z ? second_out : out)[static_cast<long long>(own[m]) * cols + column] = sum;
    }
}
}  // namespace paritree

extern "C" __global__ void __launch_bounds__(256)
matmul_grouped_rows2_f32(const float* a, int divisor, const float* b, const float* second_b, const int* starts, const int* order, float* out,
                         float* second_out, int experts, int cols, int inner) {
    paritree::matmul_grouped_rows<2>(a, divisor, b, second_b, starts, order, out, second_out, experts, cols, inner);
}
namespace paritree {
// The same for more rows: a lane holds ROWS / 4 rows of 8 columns, so that the sums, not the reading of `a` from shared memory, take the time. Each warp
// still sums 32 of CHUNK in order and the warps are joined in order: the bits are those of matmul_grouped_rows.
// grid (ceil(cols / 64), number of row tiles: at most pairs / ROWS + experts, 1 or 2), block 256.
template <int ROWS>
PARITREE_INLINE void matmul_grouped_tile(const float* a, int divisor, const float* b, const float* second_b, const int* starts, const int* order, float* out,
                                         float* second_out, int experts, int cols, int inner) {
    using namespace paritree::grouped;
    constexpr int OWN = ROWS / 4, TILE_COLS = 64, AHEAD = 4, STRIDE = ROWS + 4;
    __shared__ __align__(16) float memory[WARPS * ROWS * TILE_COLS];  // a chunk of `a`, [CHUNK][STRIDE], then the sums of the warps, [WARPS][ROWS][TILE_COLS]
    static_assert(CHUNK * STRIDE <= WARPS * ROWS * TILE_COLS, "the chunk of a fits");
    static_assert(OWN == 2 || OWN == 4, "the rows of a lane are one load");
    int tile = blockIdx.y, expert;
    find_tile(starts, experts, ROWS, tile, expert);
    if (expert == experts) return;
    const int* own = order + starts[expert] + tile * ROWS;
    const int rows = min(ROWS, starts[expert + 1] - starts[expert] - tile * ROWS);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row0 = lane / 8 * OWN, col0 = lane % 8 * 8;
    const int column = blockIdx.x * TILE_COLS + col0;
    const float* weights = (blockIdx.z ? second_b : b) + static_cast<long long>(expert) * inner * cols + column;
    const bool wide = cols % 4 == 0;
    float sums[OWN][8];
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) sums[m][n] = 0.0f;
    for (int start = 0; start < inner; start += CHUNK) {
        __syncthreads();  // the chunk before has been used
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
            memory[thread * STRIDE + m] = m < rows && start + thread < inner ? a[static_cast<long long>(own[m] / divisor) * inner + start + thread] : 0.0f;
        __syncthreads();
        const int base = warp * (CHUNK / WARPS);
        for (int part = 0; part < CHUNK / WARPS && start + base + part < inner; part += AHEAD) {
            float y[AHEAD][8];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int k = start + base + part + i;
                const float* from = weights + static_cast<long long>(k) * cols;
#pragma unroll
                for (int half = 0; half < 8; half += 4) {
                    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (wide) {
                        if (k < inner && column + half < cols) four = *reinterpret_cast<const float4*>(from + half);
                    } else if (k < inner) {
                        if (column + half < cols) four.x = from[half];
                        if (column + half + 1 < cols) four.y = from[half + 1];
                        if (column + half + 2 < cols) four.z = from[half + 2];
                        if (column + half + 3 < cols) four.w = from[half + 3];
                    }
                    y[i][half] = four.x;
                    y[i][half + 1] = four.y;
                    y[i][half + 2] = four.z;
                    y[i][half + 3] = four.w;
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                float x[OWN];
                const float* from = memory + (base + part + i) * STRIDE + row0;
                if constexpr (OWN == 4) {
                    const float4 four = *reinterpret_cast<const float4*>(from);
                    x[0] = four.x;
                    x[1] = four.y;
                    x[2] = four.z;
                    x[3] = four.w;
                } else {
                    const float2 two = *reinterpret_cast<const float2*>(from);
                    x[0] = two.x;
                    x[1] = two.y;
                }
#pragma unroll
                for (int m = 0; m < OWN; ++m)
#pragma unroll
                    for (int n = 0; n < 8; ++n) sums[m][n] = fmaf(x[m], y[i][n], sums[m][n]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) memory[(warp * ROWS + row0 + m) * TILE_COLS + col0 + n] = sums[m][n];
    __syncthreads();
    float* target = blockIdx.z ? second_out : out;
    for (int at = thread; at < rows * TILE_COLS; at += THREADS) {
        const int m = at / TILE_COLS, n = at % TILE_COLS;
        if (blockIdx.x * TILE_COLS + n >= cols) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += memory[(w * ROWS + m) * TILE_COLS + n];
        target[static_cast<long long>(own[m]) * cols + blockIdx.x * TILE_COLS + n] = sum;
    }
}
}  // namespace paritree

extern "C" __global__ void __launch_bounds__(256)
matmul_grouped_rows8_f32(const float* a, int divisor, const float* b, const float* second_b, const int* starts, const int* order, float* out,
                         float* second_out, int experts, int cols, int inner) {
    paritree::matmul_grouped_tile<8>(a, divisor, b, second_b, starts, order, out, second_out, experts, cols, inner);
}
extern "C" __global__ void __launch_bounds__(256)
matmul_grouped_rows16_f32(const float* a, int divisor, const float* b, const float* second_b, const int* starts, const int* order, float* out,
                          float* second_out, int experts, int cols, int inner) {
    paritree::matmul_grouped_tile<16>(a, divisor, b, second_b, starts, order, out, second_out, experts, cols, inner);
}
