// Answers router_scores, route, moe and combine: noaux_tc routing (V3, K2) and plain softmax routing (V2), with experts grouped
// so that each expert's weights are read once per batch. float32 throughout; decisions are exact on the engine's own scores.
#include "moe.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "gemm.hpp"
#include "lanes.hpp"
#include "pointwise.hpp"

namespace paritree {
namespace {

// Indices of the `keep` largest values, best first; the lower index wins among equals. Any order is total, also with NaN last.
void largest(const float* values, int64_t count, int64_t keep, std::vector<int32_t>& indices) {
  indices.resize(static_cast<std::size_t>(count));
  std::iota(indices.begin(), indices.end(), 0);
  const auto better = [values](int32_t a, int32_t b) {
    if (std::isnan(values[a]) || std::isnan(values[b])) return std::isnan(values[a]) == std::isnan(values[b]) ? a < b : std::isnan(values[b]);
#ifdef PARITREE_PLANT_TOP_K_LAST
    return values[a] > values[b] || (values[a] == values[b] && a > b);
#else
    return values[a] > values[b] || (values[a] == values[b] && a < b);
#endif
  };
  std::partial_sort(indices.begin(), indices.begin() + keep, indices.end(), better);
}

float group_score(const RouteConfig& config, const float* choices) {
  const int64_t size = config.experts / config.groups;
  float best = -std::numeric_limits<float>::infinity(), second = best;
  for (int64_t i = 0; i < size; ++i) {
    if (choices[i] > best) {
      second = best;
      best = choices[i];
    } else if (choices[i] > second) {
      second = choices[i];
    }
  }
  return config.group_score_max ? best : best + second;
}

}  // namespace

void check_route(const RouteConfig& config) {
  if (config.top_k < 1 || config.top_k > config.experts) {
    invalid("top_k is ", config.top_k, ", but must be between 1 and experts (", config.experts, ")");
  }
  if (config.groups < 1 || config.experts % config.groups != 0) {
    invalid("groups is ", config.groups, ", but must divide experts (", config.experts, ")");
  }
  if (config.top_groups < 1 || config.top_groups > config.groups) {
    invalid("top_groups is ", config.top_groups, ", but must be between 1 and groups (", config.groups, ")");
  }
  const int64_t group_size = config.experts / config.groups;
  if (config.top_k > config.top_groups * group_size) {
    invalid("top_k is ", config.top_k, ", but the kept groups hold only ", config.top_groups * group_size, " experts");
  }
  if (config.groups > 1 && !config.group_score_max && group_size < 2) {
    invalid("a group holds one expert, but its score is the sum of its two best: use group_score_max or fewer groups");
  }
}

void router_scores(const float* logits, float* scores, int64_t rows, int64_t experts, bool softmax) {
  for (int64_t row = 0; row < rows; ++row, logits += experts, scores += experts) {
    if (!softmax) {
      for (int64_t i = 0; i < experts; ++i) scores[i] = sigmoid(logits[i]);
      continue;
    }
    const float maximum = *std::max_element(logits, logits + experts);
    for (int64_t i = 0; i < experts; ++i) scores[i] = std::exp(logits[i] - maximum);
    const float sum = lane_sum(
        experts, [&](int64_t i) { return load4(scores + i); }, [&](int64_t i) { return scores[i]; });
    for (int64_t i = 0; i < experts; ++i) scores[i] /= sum;
  }
}

void route(const RouteConfig& config, const float* scores, const float* bias, int32_t* ids, float* weights, int64_t rows) {
  const int64_t group_size = config.experts / config.groups;
  std::vector<float> choices(static_cast<std::size_t>(config.experts)), group_scores(static_cast<std::size_t>(config.groups));
  std::vector<int32_t> order;
#ifdef PARITREE_PLANT_GROUP_MASK_ZERO
  const float dropped = 0.0f;
#else
  const float dropped = config.group_fill;
#endif
  for (int64_t row = 0; row < rows; ++row, scores += config.experts, ids += config.top_k, weights += config.top_k) {
    for (int64_t i = 0; i < config.experts; ++i) choices[static_cast<std::size_t>(i)] = scores[i] + bias[i];
    if (config.top_groups < config.groups) {
      for (int64_t g = 0; g < config.groups; ++g) group_scores[static_cast<std::size_t>(g)] = group_score(config, &choices[static_cast<std::size_t>(g * group_size)]);
      largest(group_scores.data(), config.groups, config.top_groups, order);
      std::vector<bool> kept(static_cast<std::size_t>(config.groups), false);
      for (int64_t i = 0; i < config.top_groups; ++i) kept[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] = true;
      for (int64_t i = 0; i < config.experts; ++i) {
        if (!kept[static_cast<std::size_t>(i / group_size)]) choices[static_cast<std::size_t>(i)] = dropped;
      }
    }
    largest(choices.data(), config.experts, config.top_k, order);
    float sum = 0.0f;
    for (int64_t k = 0; k < config.top_k; ++k) {
      ids[k] = order[static_cast<std::size_t>(k)];
      weights[k] = scores[ids[k]];
#ifdef PARITREE_PLANT_BIASED_WEIGHTS
      weights[k] += bias[ids[k]];
#endif
      sum += weights[k];
    }
    const float denominator = config.norm_top_k ? std::max(sum + config.denominator_eps, config.denominator_clamp) : 1.0f;
    for (int64_t k = 0; k < config.top_k; ++k) weights[k] = weights[k] / denominator * config.routed_scale;
  }
}

int64_t experts_workspace(int64_t rows, int64_t top_k, int64_t hidden, int64_t width) { return rows * top_k * (2 * hidden + 3 * width); }

ExpertSource experts_of_stacks(const float* gate, const float* up, const float* down, int64_t hidden, int64_t width) {
  return [=](int64_t expert) {
    const int64_t offset = expert * hidden * width;
    return ExpertMatrices{gate + offset, up + offset, down + offset};
  };
}

void experts(const float* x, const int32_t* ids, const ExpertSource& source, float* out, float* workspace, int64_t rows, int64_t top_k,
             int64_t expert_count, int64_t hidden, int64_t width, const ExpertTaps& taps) {
  std::vector<std::vector<int64_t>> chosen(static_cast<std::size_t>(expert_count));  // places (row * top_k + k) of each expert
  for (int64_t place = 0; place < rows * top_k; ++place) chosen[static_cast<std::size_t>(ids[place])].push_back(place);
  const auto scatter = [](const std::vector<int64_t>& places, const float* from, float* to, int64_t columns) {
    if (to == nullptr) return;
    for (std::size_t i = 0; i < places.size(); ++i) std::copy_n(from + static_cast<int64_t>(i) * columns, columns, to + places[i] * columns);
  };
  float* gathered = workspace;
  float* downed = gathered + rows * top_k * hidden;
  float* gated = downed + rows * top_k * hidden;
  float* upped = gated + rows * top_k * width;
  float* active = upped + rows * top_k * width;
  for (int64_t expert = 0; expert < expert_count; ++expert) {
    const std::vector<int64_t>& places = chosen[static_cast<std::size_t>(expert)];
    const int64_t count = static_cast<int64_t>(places.size());
    if (count == 0) continue;
    const ExpertMatrices of = source(expert);
    for (int64_t i = 0; i < count; ++i) std::copy_n(x + places[static_cast<std::size_t>(i)] / top_k * hidden, hidden, gathered + i * hidden);
    matmul(gathered, hidden, of.gate, gated, width, count, hidden, width);
    matmul(gathered, hidden, of.up, upped, width, count, hidden, width);
    swiglu(gated, upped, active, count * width);
    matmul(active, width, of.down, downed, hidden, count, width, hidden);
#ifdef PARITREE_PLANT_EXPERT_FIRST_ROW
    if (count > 1) std::fill(downed + hidden, downed + count * hidden, 0.0f);
#endif
    scatter(places, gated, taps.gate, width);
    scatter(places, upped, taps.up, width);
    scatter(places, active, taps.act, width);
    scatter(places, downed, out, hidden);
  }
}

void combine(const float* weights, const float* experts, const float* shared, float* out, int64_t rows, int64_t top_k, int64_t hidden) {
  for (int64_t row = 0; row < rows; ++row, weights += top_k, experts += top_k * hidden, shared += hidden, out += hidden) {
    for (int64_t i = 0; i < hidden; ++i) {
      float sum = shared[i];
#ifdef PARITREE_PLANT_SHARED_FIRST_ROW
      if (row > 0) sum = 0.0f;
#endif
      for (int64_t k = 0; k < top_k; ++k) sum += weights[k] * experts[k * hidden + i];
      out[i] = sum;
    }
  }
}

}  // namespace paritree
