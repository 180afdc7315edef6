// Answers add, swiglu, embed and argmax: operations on one element or one row at a time.
#include "pointwise.hpp"

#include <cmath>
#include <cstring>

namespace paritree {

float sigmoid(float x) {
  // exp of a negative number only, so that nothing overflows and small results keep their relative accuracy
  const float e = std::exp(-std::fabs(x));
  return x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

void add(const float* a, const float* b, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

void swiglu(const float* gate, const float* up, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
#ifdef PARITREE_PLANT_SWIGLU_SWAPPED
    out[i] = (up[i] * sigmoid(up[i])) * gate[i];
#else
    out[i] = (gate[i] * sigmoid(gate[i])) * up[i];
#endif
  }
}

void embed(const float* table, const int32_t* ids, float* out, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out + row * columns, table + ids[row] * columns, static_cast<std::size_t>(columns) * sizeof(float));
  }
}

void add_bias(const float* bias, float* out, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, out += columns) add(out, bias, out, columns);
}

void round_nothing(float*, int64_t) {}

void round_bfloat16(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(values[i])) continue;
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
#ifdef PARITREE_PLANT_CACHE_TRUNCATED
    bits &= 0xffff0000u;
#else
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
#endif
    std::memcpy(values + i, &bits, sizeof bits);
  }
}

void round_float16(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::fabs(values[i]);
    if (!(size < 65520.0f)) {  // beyond the midpoint above the largest number; NaN stays
      if (!std::isnan(values[i])) values[i] = std::copysign(HUGE_VALF, values[i]);
      continue;
    }
    // adding and taking away 2**23 steps of the target's spacing rounds to nearest even in one float32 addition
    int exponent = 0;
    std::frexp(size, &exponent);  // size = m * 2**exponent, m in [1/2, 1)
    const float step = std::ldexp(1.0f, (exponent < -13 ? -13 : exponent) - 11 + 23);
    values[i] = std::copysign((size + step) - step, values[i]);
  }
}

int32_t argmax(const float* logits, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(logits[i])) return static_cast<int32_t>(i);
#ifdef PARITREE_PLANT_ARGMAX_LAST
    if (logits[i] >= logits[best]) best = i;
#else
    if (logits[i] > logits[best]) best = i;
#endif
  }
  return static_cast<int32_t>(best);
}

}  // namespace paritree
