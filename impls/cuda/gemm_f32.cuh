// Matrix products in float32: answers spec/ops/{matmul,q_absorb,scores,o_heads}.py.
//
//   c[z] [rows, cols] = scale * a[z] [rows, inner] @ b[z] [inner, cols], or b[z] [cols, inner] in the _nt forms (keys of a cache, a tied head)
//
// Row strides and batch strides in elements: a head is a batch of q_absorb and o_heads, and its operands are slices of wider rows.
// Accumulates in float32 by FMA in order of `inner`. Forms:
//   matmul_plain_f32   one thread an output: read this one first
//   matmul_tiled_f32   64 x 64 outputs a block, 4 x 4 a thread
//   matmul_rows_f32    few rows (decode): one column a thread, the rows' operands broadcast, `inner` split over the warps of a block
#pragma once
#include "common.cuh"

namespace paritree {
namespace gemm_f32 {
constexpr int TILE = 64, DEPTH = 16, THREADS = 256, PAD = 4;
constexpr int FEW_ROWS = 8, WARPS = 8;
}  // namespace gemm_f32

template <bool TRANSPOSED>
PARITREE_INLINE float operand_b(const float* b, long long b_row, int k, int n) {
    return TRANSPOSED ? b[n * b_row + k] : b[k * b_row + n];
}

template <bool TRANSPOSED>
PARITREE_INLINE void matmul_plain(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c, int c_row,
                                  long long c_batch, int rows, int cols, int inner, float scale) {
    const int m = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    a += blockIdx.z * a_batch + static_cast<long long>(m) * a_row;
    b += blockIdx.z * b_batch;
    if (m >= rows || n >= cols) return;
    float sum = 0.0f;
    for (int k = 0; k < inner; ++k) sum = fmaf(a[k], operand_b<TRANSPOSED>(b, b_row, k, n), sum);
    c[blockIdx.z * c_batch + static_cast<long long>(m) * c_row + n] = sum * scale;
}

// grid (ceil(cols / 64), ceil(rows / 64), batches), block 256. Elements past the edges are zeros in both operands.
template <bool TRANSPOSED>
PARITREE_INLINE void matmul_tiled(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c, int c_row,
                                  long long c_batch, int rows, int cols, int inner, float scale) {
    using namespace gemm_f32;
    __shared__ __align__(16) float a_tile[DEPTH][TILE + PAD];
    __shared__ __align__(16) float b_tile[DEPTH][TILE + PAD];
    a += blockIdx.z * a_batch;
    b += blockIdx.z * b_batch;
    c += blockIdx.z * c_batch;
    const int thread = threadIdx.x, first_row = blockIdx.y * TILE, first_col = blockIdx.x * TILE;
    const int tile_row = thread / 16 * 4, tile_col = thread % 16 * 4;
    float sums[4][4];
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;
    for (int start = 0; start < inner; start += DEPTH) {
#pragma unroll
        for (int i = 0; i < TILE * DEPTH / THREADS; ++i) {
            const int at = thread + i * THREADS;
            const int m = first_row + at / DEPTH, k = start + at % DEPTH;
            a_tile[at % DEPTH][at / DEPTH] = m < rows && k < inner ? a[static_cast<long long>(m) * a_row + k] : 0.0f;
            const int b_k = TRANSPOSED ? at % DEPTH : at / TILE, b_n = TRANSPOSED ? at / DEPTH : at % TILE;
            b_tile[b_k][b_n] =
                start + b_k < inner && first_col + b_n < cols ? operand_b<TRANSPOSED>(b, b_row, start + b_k, first_col + b_n) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const float4 x = *reinterpret_cast<const float4*>(&a_tile[k][tile_row]), y = *reinterpret_cast<const float4*>(&b_tile[k][tile_col]);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(xs[i], ys[j], sums[i][j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            if (first_row + tile_row + i < rows && first_col + tile_col + j < cols)
                c[static_cast<long long>(first_row + tile_row + i) * c_row + first_col + tile_col + j] = sums[i][j] * scale;
}

// grid (ceil(cols / 32), ceil(rows / 8), batches), block 256: warp w sums every eighth k, then the warps are joined in order.
PARITREE_INLINE void matmul_rows(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c, int c_row,
                                 long long c_batch, int rows, int cols, int inner, float scale) {
    using namespace gemm_f32;
    __shared__ float partial[WARPS][FEW_ROWS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n = blockIdx.x * 32 + lane, first_row = blockIdx.y * FEW_ROWS, here = min(FEW_ROWS, rows - first_row);
    a += blockIdx.z * a_batch + static_cast<long long>(first_row) * a_row;
    b += blockIdx.z * b_batch + n;
    float sums[FEW_ROWS];
    for (int m = 0; m < FEW_ROWS; ++m) sums[m] = 0.0f;
    if (n < cols) {
        for (int k = warp; k < inner; k += WARPS) {
            const float y = b[static_cast<long long>(k) * b_row];
#pragma unroll
            for (int m = 0; m < FEW_ROWS; ++m)
                if (m < here) sums[m] = fmaf(a[static_cast<long long>(m) * a_row + k], y, sums[m]);
        }
    }
    for (int m = 0; m < FEW_ROWS; ++m) partial[warp][m][lane] = sums[m];
    __syncthreads();
    const int m = warp;
    if (m < here && n < cols) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) sum += partial[w][m][lane];
        c[blockIdx.z * c_batch + static_cast<long long>(first_row + m) * c_row + n] = sum * scale;
    }
}
}  // namespace paritree

// grid (ceil(cols / 128), rows, batches), block 128
extern "C" __global__ void matmul_plain_f32(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c,
                                            int c_row, long long c_batch, int rows, int cols, int inner, float scale) {
    paritree::matmul_plain<false>(a, a_row, a_batch, b, b_row, b_batch, c, c_row, c_batch, rows, cols, inner, scale);
}
extern "C" __global__ void matmul_plain_nt_f32(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c,
                                               int c_row, long long c_batch, int rows, int cols, int inner, float scale) {
    paritree::matmul_plain<true>(a, a_row, a_batch, b, b_row, b_batch, c, c_row, c_batch, rows, cols, inner, scale);
}
extern "C" __global__ void __launch_bounds__(256)
matmul_tiled_f32(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c, int c_row, long long c_batch,
                 int rows, int cols, int inner, float scale) {
    paritree::matmul_tiled<false>(a, a_row, a_batch, b, b_row, b_batch, c, c_row, c_batch, rows, cols, inner, scale);
}
extern "C" __global__ void __launch_bounds__(256)
matmul_tiled_nt_f32(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c, int c_row, long long c_batch,
                    int rows, int cols, int inner, float scale) {
    paritree::matmul_tiled<true>(a, a_row, a_batch, b, b_row, b_batch, c, c_row, c_batch, rows, cols, inner, scale);
}
extern "C" __global__ void __launch_bounds__(256)
matmul_rows_f32(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c, int c_row, long long c_batch,
                int rows, int cols, int inner, float scale) {
    paritree::matmul_rows(a, a_row, a_batch, b, b_row, b_batch, c, c_row, c_batch, rows, cols, inner, scale);
}
