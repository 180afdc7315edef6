#pragma once

#include <cstdint>
#include <vector>

namespace paritree {

struct RopeConfig {
  int64_t dim = 0;  // elements rotated, even
  double theta = 10000.0;
  bool half_layout = false;  // pairs (i, i + dim/2); else (2i, 2i + 1)
  bool yarn = false;
  double factor = 1.0;
  double original_len = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 1.0;
  double mscale_all_dim = 1.0;
};

// Frequencies with the YaRN ramp, and the cos and sin of positions, computed once per row of a batch.
class Rope {
 public:
  explicit Rope(const RopeConfig& config);
  // cos and sin hold dim/2 floats each.
  void table(int64_t position, float* cos, float* sin) const;

 private:
  std::vector<long double> frequencies_;
  long double magnitude_ = 1.0L;
};

// Rotates [rows, heads, dim] by one table row per row; x rows and heads are x_stride and x_head_stride floats apart.
void rotate(const float* x, int64_t x_stride, int64_t x_head_stride, const float* cos, const float* sin, float* out, int64_t rows,
            int64_t heads, int64_t dim, bool half_layout);

}  // namespace paritree
