#pragma once

#include <cstdint>

namespace paritree {

// out[t,n] = sum_k x[t,k] * w[k,n]; rows of x and out are x_stride and out_stride floats apart, w is contiguous.
void matmul(const float* x, int64_t x_stride, const float* w, float* out, int64_t out_stride, int64_t rows, int64_t inner, int64_t columns);

// The same with int4 weights in groups of 32: word [k / 8, n] of packed holds rows 8w .. 8w + 7, lowest nibble first, two's complement;
// scales [k / 32, n]. inner is a multiple of 32. A group's sum meets its scale once, then the sums are added as in matmul.
void int4_matmul(const float* x, const int32_t* packed, const float* scales, float* out, int64_t rows, int64_t inner, int64_t columns);

// out[t,h,:] = x[t,h,:] @ w[h]: q_absorb and o_heads.
void matmul_per_head(const float* x, int64_t x_stride, int64_t x_head_stride, const float* w, float* out, int64_t rows, int64_t heads,
                     int64_t inner, int64_t columns);

}  // namespace paritree
