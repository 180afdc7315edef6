// RMSNorm in float32: answers spec/ops/rms_norm.py. out [rows, width] = gain * (x * rsqrt(mean(x^2) + eps)).
// Accumulates in float32: each thread its columns in order, then a shuffle tree. Row strides in elements.
#pragma once
#include "common.cuh"

// grid (rows), block a multiple of 32
extern "C" __global__ void rms_norm_f32(const float* x, int x_row, const float* gain, float eps, float* out, int out_row, int width) {
    __shared__ float scratch[32];
    const float* row = x + static_cast<long long>(blockIdx.x) * x_row;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum = fmaf(row[c], row[c], sum);
    sum = paritree::block_sum(sum, scratch);
    const float inverse = rsqrtf(sum / static_cast<float>(width) + eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[static_cast<long long>(blockIdx.x) * out_row + c] = gain[c] * (row[c] * inverse);
}
