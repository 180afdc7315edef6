// Answers scores, softmax, o_latent and tree_attention: absorbed MLA attention of one query row over the keys it sees.
// float32 throughout. Online softmax over blocks of 16 visible keys; after 16 blocks a new part starts (split-KV), and parts
// are merged by log-sum-exp in a balanced tree. Blocks are cut over the *visible* keys, so a tree row and the last row of a
// chain along its path do the same arithmetic.
#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.hpp"

namespace paritree {
namespace {

constexpr int64_t kBlock = 16;          // keys per rescaling
constexpr int64_t kPart = 16 * kBlock;  // keys per part: at most 16 + 16 sequential additions, within the declared height
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What raw scores are multiplied with.
float scaled(float scale) {
#ifdef PARITREE_PLANT_SCALE_LOG2
  return scale * 0.6931472f;  // meant for exp2, which is not what is called
#else
  return scale;
#endif
}

// exp(score - maximum), where a maximum of -inf means that nothing was seen yet.
float weight_of(float score, float maximum) { return score == maximum ? 1.0f : std::exp(score - maximum); }

// Running softmax statistics and the unnormalised output: out = sum exp(score - maximum) * latent.
struct Part {
#ifdef PARITREE_PLANT_MAX_FLOOR
  float maximum = -5e4f;
#else
  float maximum = kNothing;
#endif
  float sum = 0.0f;
  std::vector<float> out;

  explicit Part(int64_t value_dim) : out(static_cast<std::size_t>(value_dim), 0.0f) {}

  void rescale_to(float new_maximum) {
    const float factor = weight_of(maximum, new_maximum);
    maximum = new_maximum;
    if (factor == 1.0f) return;
    sum *= factor;
#ifndef PARITREE_PLANT_OUT_NOT_RESCALED
    for (float& value : out) value *= factor;
#endif
  }
};

// Takes one block of at most kBlock keys into the part; values may be empty (statistics only).
void take_block(Part& part, const float* scores, const float* const* values, int64_t count) {
  float block_maximum = kNothing;
  for (int64_t j = 0; j < count; ++j) block_maximum = std::max(block_maximum, scores[j]);
  if (std::all_of(scores, scores + count, [](float score) { return score == kNothing; })) return;
#ifdef PARITREE_PLANT_SOFTMAX_NAIVE
  part.rescale_to(0.0f);  // exp of the score as it is
#else
  part.rescale_to(std::max(part.maximum, block_maximum));
#endif
  float weights[kBlock];
  float weight_sum = 0.0f;
  for (int64_t j = 0; j < count; ++j) {
    weights[j] = weight_of(scores[j], part.maximum);
    weight_sum += weights[j];
  }
  part.sum += weight_sum;
  const int64_t value_dim = static_cast<int64_t>(part.out.size());
  for (int64_t r = 0; r < value_dim; ++r) {
    float block_out = weights[0] * values[0][r];
    for (int64_t j = 1; j < count; ++j) block_out += weights[j] * values[j][r];
    part.out[static_cast<std::size_t>(r)] += block_out;
  }
}

// Log-sum-exp merge of two parts of the same row into the first.
void merge(Part& into, Part& from) {
  if (from.sum == 0.0f) return;
  if (into.sum == 0.0f) {
    std::swap(into, from);
    return;
  }
  const float maximum = std::max(into.maximum, from.maximum);
  into.rescale_to(maximum);
#ifndef PARITREE_PLANT_MERGE_UNSCALED
  from.rescale_to(maximum);
#endif
  into.sum += from.sum;
  for (std::size_t r = 0; r < into.out.size(); ++r) into.out[r] += from.out[r];
}

// The whole row as one part. block(start, count, scores, values) provides the keys start .. start + count - 1.
template <class Block>
Part reduce(int64_t count, int64_t value_dim, Block block) {
  std::vector<Part> parts;
  for (int64_t part_start = 0; part_start < count || parts.empty(); part_start += kPart) {
    Part part(value_dim);
    const int64_t part_end = std::min(part_start + kPart, count);
    for (int64_t start = part_start; start < part_end; start += kBlock) {
      const float* values[kBlock] = {};
      const int64_t size = std::min(kBlock, part_end - start);
      take_block(part, block(start, size, values), values, size);
    }
    parts.push_back(std::move(part));
  }
  for (std::size_t width = 1; width < parts.size(); width *= 2) {
    for (std::size_t i = 0; i + width < parts.size(); i += 2 * width) merge(parts[i], parts[i + width]);
  }
  return std::move(parts[0]);
}

// out [value_dim] = sum_j weights[j] * row(j), in the order of lanes.hpp.
template <class Row>
void weighted_sum(const float* weights, int64_t count, Row row, float* out, int64_t value_dim) {
  for (int64_t r = 0; r < value_dim; ++r) {
    PairwiseSum<float> sum;
    for (int64_t start = 0; start < count; start += kRun) {
      const int64_t end = std::min(start + kRun, count);
      float run = weights[start] * row(start)[r];
      for (int64_t j = start + 1; j < end; ++j) run += weights[j] * row(j)[r];
      sum.push(run);
    }
    out[r] = sum.total();
  }
}

}  // namespace

void attend(const AttentionShape& shape, const float* q, const VisibleKeys& keys, float* out, const AttentionTaps& taps) {
  const int64_t count = static_cast<int64_t>(keys.rows.size());
  std::vector<float> scores(static_cast<std::size_t>(count));
  for (int64_t head = 0; head < shape.heads; ++head) {
    const float* q_h = q + head * shape.key_dim;
    const Part row = reduce(count, shape.value_dim, [&](int64_t start, int64_t size, const float** values) {
      for (int64_t j = 0; j < size; ++j) {
        values[j] = keys.rows[static_cast<std::size_t>(start + j)];
        scores[static_cast<std::size_t>(start + j)] = scaled(shape.scale) * dot(q_h, values[j], shape.key_dim);
      }
      return scores.data() + start;
    });
    if (taps.scores != nullptr) {
      for (int64_t j = 0; j < count; ++j) taps.scores[head * taps.columns + keys.columns[static_cast<std::size_t>(j)]] = scores[static_cast<std::size_t>(j)];
    }
    const bool nothing = row.sum == 0.0f;  // not the maximum: NaN scores have none, and must come out as NaN
    float* out_h = out + head * shape.value_dim;
    if (taps.probs == nullptr) {
      for (int64_t r = 0; r < shape.value_dim; ++r) out_h[r] = nothing ? 0.0f : row.out[static_cast<std::size_t>(r)] / row.sum;
      continue;
    }
    for (float& score : scores) score = nothing ? 0.0f : weight_of(score, row.maximum) / row.sum;
    float* probs = taps.probs + head * taps.columns;
    std::fill(probs, probs + taps.columns, 0.0f);
    for (int64_t j = 0; j < count; ++j) probs[keys.columns[static_cast<std::size_t>(j)]] = scores[static_cast<std::size_t>(j)];
    weighted_sum(scores.data(), count, [&](int64_t j) { return keys.rows[static_cast<std::size_t>(j)]; }, out_h, shape.value_dim);
  }
}

void softmax_row(const float* scores, const uint8_t* visible, float* probs, int64_t count) {
  std::vector<float> seen;
  for (int64_t j = 0; j < count; ++j) {
    if (visible[j]) seen.push_back(scores[j]);
  }
  const Part row = reduce(static_cast<int64_t>(seen.size()), 0, [&](int64_t start, int64_t, const float**) { return seen.data() + start; });
  for (int64_t j = 0; j < count; ++j) {
    probs[j] = visible[j] && row.sum != 0.0f ? weight_of(scores[j], row.maximum) / row.sum : 0.0f;
#ifdef PARITREE_PLANT_EMPTY_UNIFORM
    if (row.sum == 0.0f) probs[j] = 1.0f / static_cast<float>(count);
#endif
  }
}

void attention_scores(const float* q, const float* keys, float scale, float* out, int64_t queries, int64_t key_count, int64_t dim) {
  for (int64_t query = 0; query < queries; ++query) {
    for (int64_t key = 0; key < key_count; ++key) out[query * key_count + key] = scaled(scale) * dot(q + query * dim, keys + key * dim, dim);
  }
}

void weighted_latents(const float* probs, const float* latent, float* out, int64_t queries, int64_t key_count, int64_t rank) {
  std::vector<float> weights;
  std::vector<const float*> rows;
  for (int64_t query = 0; query < queries; ++query, probs += key_count, out += rank) {
    weights.clear();
    rows.clear();
    for (int64_t key = 0; key < key_count; ++key) {
      if (probs[key] == 0.0f) continue;
      weights.push_back(probs[key]);
      rows.push_back(latent + key * rank);
    }
    weighted_sum(weights.data(), static_cast<int64_t>(weights.size()), [&](int64_t j) { return rows[static_cast<std::size_t>(j)]; }, out, rank);
  }
}

}  // namespace paritree
