#pragma once

#include <cstdint>

namespace paritree {

// out = gain * (x / sqrt(mean(x^2) + eps)), row by row; rows of x are x_stride floats apart, out is contiguous.
void rms_norm(const float* x, int64_t x_stride, const float* gain, float eps, float* out, int64_t rows, int64_t columns);

}  // namespace paritree
