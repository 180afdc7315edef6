// Matrix product with int4 weights in groups of 32: answers spec/ops/int4_matmul.py.
//
//   x [rows, inner] float32    packed [inner / 8, cols] words: nibble i of a word is row 8 * block + i, two's complement, -8..7
//   scales [inner / 32, cols] float32 that are 16-bit numbers    out [rows, cols] float32
//
// A weight is nibble * scale, exact in float32 (4 bits times at most 11 bits); products and sums in float32 by FMA in order of `inner`.
// inner is a multiple of 32. Forms: plain (one thread an output), and few rows a block with the words of a column read once.
#pragma once
#include "common.cuh"

namespace paritree {
PARITREE_INLINE float int4_at(unsigned word, int i) { return static_cast<float>(static_cast<int>(word << (28 - 4 * i)) >> 28); }
}  // namespace paritree

// grid (ceil(cols / 128), rows), block 128
extern "C" __global__ void matmul_int4_plain(const float* x, const unsigned* packed, const float* scales, float* out, int rows, int cols,
                                             int inner) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= cols) return;
    const float* row = x + static_cast<long long>(blockIdx.y) * inner;
    float sum = 0.0f;
    for (int k = 0; k < inner; ++k) {
        const float weight = paritree::int4_at(packed[static_cast<long long>(k / 8) * cols + n], k % 8) *
                             scales[static_cast<long long>(k / 32) * cols + n];
        sum = fmaf(row[k], weight, sum);
    }
    out[static_cast<long long>(blockIdx.y) * cols + n] = sum;
}

// grid (ceil(cols / 64), ceil(rows / 8)), block 256: 64 columns, four warps' worth of groups each; groups are joined in order
extern "C" __global__ void __launch_bounds__(256)
matmul_int4_rows(const float* x, const unsigned* packed, const float* scales, float* out, int rows, int cols, int inner) {
    constexpr int ROWS = 8, COLS = 64, PARTS = 4;
    __shared__ float partial[PARTS][ROWS][COLS];
    const int column = threadIdx.x % COLS, part = threadIdx.x / COLS;
    const int n = blockIdx.x * COLS + column, first_row = blockIdx.y * ROWS, here = min(ROWS, rows - first_row);
    const float* first = x + static_cast<long long>(first_row) * inner;
    float sums[ROWS];
    for (int m = 0; m < ROWS; ++m) sums[m] = 0.0f;
    if (n < cols) {
        for (int group = part; group < inner / 32; group += PARTS) {
            const float scale = scales[static_cast<long long>(group) * cols + n];
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                const unsigned word = packed[static_cast<long long>(group * 4 + block) * cols + n];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float weight = paritree::int4_at(word, i) * scale;
                    const int k = group * 32 + block * 8 + i;
#pragma unroll
                    for (int m = 0; m < ROWS; ++m)
                        if (m < here) sums[m] = fmaf(first[static_cast<long long>(m) * inner + k], weight, sums[m]);
                }
            }
        }
    }
    for (int m = 0; m < ROWS; ++m) partial[part][m][column] = sums[m];
    __syncthreads();
    for (int m = part; m < here; m += PARTS)
        if (n < cols) {
            float sum = 0.0f;
            for (int p = 0; p < PARTS; ++p) sum += partial[p][m][column];
            out[static_cast<long long>(first_row + m) * cols + n] = sum;
        }
}
