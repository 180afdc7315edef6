// Answers rms_norm. float32 throughout; the square sum runs over four lanes (lanes.hpp).
#include "norm.hpp"

#include <cmath>

#include "lanes.hpp"

namespace paritree {
namespace {

// 0x1p-64f where a square or the sum of them could overflow float32, else 1: a power of two, so that scaling is exact.
float overflow_guard(const float* x, int64_t columns) {
  float largest = 0.0f;
  for (int64_t i = 0; i < columns; ++i) largest = std::fmax(largest, std::fabs(x[i]));
  return largest > 0x1p40f ? 0x1p-64f : 1.0f;
}

}  // namespace

void rms_norm(const float* x, int64_t x_stride, const float* gain, float eps, float* out, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, x += x_stride, out += columns) {
    const float guard = overflow_guard(x, columns);
    const f32x4 guards = broadcast4(guard);
    const float squares = lane_sum(
        columns,
        [&](int64_t i) {
          const f32x4 value = load4(x + i) * guards;
          return value * value;
        },
        [&](int64_t i) { return (x[i] * guard) * (x[i] * guard); });
    const float mean = squares / static_cast<float>(columns);
    const float inverse = 1.0f / std::sqrt(mean + (eps * guard) * guard);
    for (int64_t i = 0; i < columns; ++i) out[i] = gain[i] * ((x[i] * guard) * inverse);
  }
}

}  // namespace paritree
