// Float32 rows to bfloat16 rows, to nearest even: what attention on bfloat16 operands reads (tree_attention_bf16.cuh).
#pragma once
#include "common.cuh"
#include "ptx.cuh"

// grid (rows), any block. x rows are x_row floats apart, out rows out_row elements; columns from `width` to out_row become zero.
extern "C" __global__ void cast_rows_bf16(const float* x, int x_row, unsigned short* out, int out_row, int width) {
    const float* from = x + static_cast<long long>(blockIdx.x) * x_row;
    unsigned short* to = out + static_cast<long long>(blockIdx.x) * out_row;
    for (int c = threadIdx.x; c < out_row; c += blockDim.x) to[c] = c < width ? paritree::to_bf16(from[c]) : static_cast<unsigned short>(0);
}
