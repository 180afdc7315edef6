// Answers rms_norm. float32 throughout; the square sum runs over four lanes (lanes.hpp).
#include "norm.hpp"

#include <cmath>

#include "lanes.hpp"

namespace paritree {
namespace {

// sum of (x * scale)^2.
float square_sum(const float* x, int64_t columns, float scale) {
  const f32x4 scales = broadcast4(scale);
  return lane_sum(
      columns,
      [&](int64_t i) {
        const f32x4 value = load4(x + i) * scales;
        return value * value;
      },
      [&](int64_t i) { return (x[i] * scale) * (x[i] * scale); });
}

}  // namespace

void rms_norm(const float* x, int64_t x_stride, const float* gain, float eps, float* out, int64_t rows, int64_t columns) {
#ifdef PARITREE_PLANT_NORM_STRIDE
  x_stride = columns;  // the view of a wider row is taken as contiguous
#endif
#ifdef PARITREE_PLANT_NORM_EPS
  eps = 1e-5f;
#endif
#ifdef PARITREE_PLANT_NORM_ODD_WIDTH
  float inverse_above = 0.0f;
#endif
  for (int64_t row = 0; row < rows; ++row, x += x_stride, out += columns) {
    float guard = 1.0f;
    float squares = square_sum(x, columns, guard);
    if (std::isinf(squares)) {  // overflow of a finite row: a power of two as scale is exact, and eps is nothing to such squares
      guard = 0x1p-64f;
      squares = square_sum(x, columns, guard);
    }
    const float mean = squares / static_cast<float>(columns);
    const float inverse = 1.0f / std::sqrt(mean + (eps * guard) * guard);
    for (int64_t i = 0; i < columns; ++i) out[i] = gain[i] * ((x[i] * guard) * inverse);
#ifdef PARITREE_PLANT_NORM_ODD_WIDTH
    if (row > 0 && columns % 2 == 1) out[0] = gain[0] * ((x[0] * guard) * inverse_above);  // the last pair of the row above
    inverse_above = inverse;
#endif
  }
}

}  // namespace paritree
