// Answers rope, and makes its tables: frequencies, YaRN ramp and angles in long double, rounded to float32 once (rule M6).
// Building angles in float32 costs 5e-4 at position 32768, so the table is never recomputed in float32.
#include "rope.hpp"

#include "common.hpp"

#include <algorithm>
#include <cmath>

namespace paritree {
namespace {

constexpr long double kTwoPi = 6.283185307179586476925286766559005768L;

long double yarn_mscale(long double factor, long double mscale) {
  return factor <= 1 ? 1.0L : 0.1L * mscale * std::log(factor) + 1.0L;
}

// The rotary dimension at which `rotations` full turns fit into the original context.
long double correction_dim(const RopeConfig& config, long double rotations) {
  return static_cast<long double>(config.dim) * std::log(config.original_len / (rotations * kTwoPi)) / (2 * std::log(static_cast<long double>(config.theta)));
}

}  // namespace

RopeTable computed_table(const RopeConfig& config) {
  std::vector<long double> frequencies;
  long double magnitude = 1.0L;
  const int64_t pairs = config.dim / 2;
  const bool stretched = config.yarn && config.factor > 1;
  long double low = 0, high = 0;
  if (stretched) {
    low = std::max(std::floor(correction_dim(config, config.beta_fast)), 0.0L);
    high = std::min(std::ceil(correction_dim(config, config.beta_slow)), static_cast<long double>(config.dim - 1));
    if (low == high) high += 0.001L;
    const bool both_given = config.mscale != 0 && config.mscale_all_dim != 0;
    magnitude = both_given ? yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
                            : yarn_mscale(config.factor, 1);
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    long double frequency = std::pow(static_cast<long double>(config.theta), static_cast<long double>(-2 * pair) / config.dim);
    if (stretched) {
      const long double ramp = std::clamp((pair - low) / (high - low), 0.0L, 1.0L);
      frequency = frequency * (1 - ramp) + frequency / config.factor * ramp;
    }
    frequencies.push_back(frequency);
  }
  return [frequencies, magnitude](int64_t position, float* cos, float* sin) {
    for (std::size_t pair = 0; pair < frequencies.size(); ++pair) {
      const long double angle = frequencies[pair] * static_cast<long double>(position);
      cos[pair] = static_cast<float>(std::cos(angle) * magnitude);
      sin[pair] = static_cast<float>(std::sin(angle) * magnitude);
    }
  };
}

RopeTable carried_table(std::vector<float> cos_rows, std::vector<float> sin_rows, int64_t length) {
  const std::size_t pairs = cos_rows.size() / static_cast<std::size_t>(length);
  return [cos_rows, sin_rows, length, pairs](int64_t position, float* cos, float* sin) {
    if (position >= length) invalid("position is ", position, ", but the carried rotary tables end at ", length - 1);
    std::copy_n(cos_rows.data() + static_cast<std::size_t>(position) * pairs, pairs, cos);
    std::copy_n(sin_rows.data() + static_cast<std::size_t>(position) * pairs, pairs, sin);
  };
}

void rotate(const float* x, int64_t x_stride, int64_t x_head_stride, const float* cos, const float* sin, float* out, int64_t rows,
            int64_t heads, int64_t dim, bool half_layout) {
  const int64_t pairs = dim / 2;
  const int64_t step = half_layout ? 1 : 2;         // from one pair to the next
  const int64_t partner = half_layout ? pairs : 1;  // from the first element of a pair to the second
  for (int64_t row = 0; row < rows; ++row, cos += pairs, sin += pairs) {
    for (int64_t head = 0; head < heads; ++head, out += dim) {
      const float* from = x + row * x_stride + head * x_head_stride;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const float first = from[pair * step], second = from[pair * step + partner];
        out[pair * step] = first * cos[pair] - second * sin[pair];
        out[pair * step + partner] = first * sin[pair] + second * cos[pair];
      }
    }
  }
}

}  // namespace paritree
