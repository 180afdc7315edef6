// Matrix product of operands that are rounded to TF32 or bfloat16 on the way in, summed in float32: what the native engine's TF32 and bfloat16 modes compute
// where there is no cuBLAS. Plain form only: it shows the arithmetic, not the speed.
#pragma once
#include "common.cuh"

namespace paritree {
// To nearest even, without the last `dropped` bits of the fraction: 13 for TF32, 16 for bfloat16.
PARITREE_INLINE float without_bits(float x, int dropped) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return x;
    return __uint_as_float((bits + ((1u << (dropped - 1)) - 1u) + ((bits >> dropped) & 1u)) & ~((1u << dropped) - 1u));
}
}  // namespace paritree

// grid (ceil(cols / 128), rows, batches), block 128; strides as in gemm_f32.cuh; `transposed`: b is [cols, inner]
extern "C" __global__ void matmul_rounded_f32(const float* a, int a_row, long long a_batch, const float* b, int b_row, long long b_batch, float* c, int c_row,
                                              long long c_batch, int cols, int inner, int transposed, int dropped) {
    using namespace paritree;
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= cols) return;
    const float* left = a + blockIdx.z * a_batch + static_cast<long long>(blockIdx.y) * a_row;
    const float* right = b + blockIdx.z * b_batch + (transposed ? static_cast<long long>(n) * b_row : n);
    const long long step = transposed ? 1 : b_row;
    float sum = 0.0f;
    for (int k = 0; k < inner; ++k) sum = fmaf(without_bits(left[k], dropped), without_bits(right[k * step], dropped), sum);
    c[blockIdx.z * c_batch + static_cast<long long>(blockIdx.y) * c_row + n] = sum;
}
