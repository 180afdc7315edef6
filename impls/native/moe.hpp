#pragma once

#include <cstdint>
#include <functional>
#include <limits>

#include "common.hpp"

namespace paritree {

struct RouteConfig {
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t groups = 1;
  int64_t top_groups = 1;
  bool group_score_max = false;  // else: the sum of the two best of a group
  bool norm_top_k = true;
  float routed_scale = 1.0f;
  float denominator_eps = 0.0f;
  float denominator_clamp = 0.0f;  // the sum is at least this
  float group_fill = -std::numeric_limits<float>::infinity();  // the choice of experts in dropped groups
};

// The names of the configuration's fields in a message; throws Error(INVALID) unless the numbers fit together.
void check_route(const RouteConfig& config);

// Sigmoid, or softmax over all experts, of each row.
void router_scores(const float* logits, float* scores, int64_t rows, int64_t experts, bool softmax);

// Chooses by score + bias, best first, the lower index among equals; weighs by the score alone.
void route(const RouteConfig& config, const float* scores, const float* bias, int32_t* ids, float* weights, int64_t rows);

// Values of one call of experts(), [rows, top_k, width], kept for taps; null: not wanted.
struct ExpertTaps {
  float* gate = nullptr;
  float* up = nullptr;
  float* act = nullptr;
};

// Floats of scratch that experts() needs: the rows of one expert, at most all places.
int64_t experts_workspace(int64_t rows, int64_t top_k, int64_t hidden, int64_t width);

// The matrices of one expert: gate and up [hidden, width], down [width, hidden]; valid until the next one is asked for.
struct ExpertMatrices {
  const float* gate;
  const float* up;
  const float* down;
};
using ExpertSource = std::function<ExpertMatrices(int64_t expert)>;

// Experts that stand one after the other in memory.
ExpertSource experts_of_stacks(const float* gate, const float* up, const float* down, int64_t hidden, int64_t width);

// out [rows, top_k, hidden]: the SwiGLU block of each chosen expert, computed expert by expert over the rows that chose it, so that
// the matrices of each expert in use are asked for once.
void experts(const float* x, const int32_t* ids, const ExpertSource& source, float* out, float* workspace, int64_t rows, int64_t top_k,
             int64_t expert_count, int64_t hidden, int64_t width, const ExpertTaps& taps);

// out [rows, hidden] = shared + sum_k weights[k] * experts[k].
void combine(const float* weights, const float* experts, const float* shared, float* out, int64_t rows, int64_t top_k, int64_t hidden);

}  // namespace paritree
