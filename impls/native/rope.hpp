#pragma once

#include <cstdint>
#include <functional>
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

// cos and sin of a position, dim/2 floats each; used once per row of a batch.
using RopeTable = std::function<void(int64_t position, float* cos, float* sin)>;

// Of exact angles: frequencies with the YaRN ramp.
RopeTable computed_table(const RopeConfig& config);
// Rows of tables [length, pairs] that came with the weights; a position that they lack is an error of the caller.
RopeTable carried_table(std::vector<float> cos, std::vector<float> sin, int64_t length);

// Rotates [rows, heads, dim] by one table row per row; x rows and heads are x_stride and x_head_stride floats apart.
void rotate(const float* x, int64_t x_stride, int64_t x_head_stride, const float* cos, const float* sin, float* out, int64_t rows,
            int64_t heads, int64_t dim, bool half_layout);

}  // namespace paritree
