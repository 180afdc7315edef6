#pragma once

#include <cstdint>
#include <vector>

namespace paritree {

// The keys that one query row sees: cache rows [latent | k_rope] in logical order, and the logical column of each.
struct VisibleKeys {
  std::vector<const float*> rows;
  std::vector<int64_t> columns;

  void clear() {
    rows.clear();
    columns.clear();
  }
  void push(const float* row, int64_t column) {
    rows.push_back(row);
    columns.push_back(column);
  }
};

struct AttentionShape {
  int64_t heads = 0;
  int64_t key_dim = 0;    // R + D, the width of q and of a key
  int64_t value_dim = 0;  // R: the value of a key is its first value_dim elements
  float scale = 1.0f;
};

// Where one query row leaves its scores and probabilities, [heads, columns]; null: not wanted. The fused path has no normalised
// probabilities; where they are wanted, a second pass makes them and sums the latents with exactly those, so that the tap is
// what the next operation consumed.
struct AttentionTaps {
  float* scores = nullptr;
  float* probs = nullptr;
  int64_t columns = 0;
};

// out [heads, value_dim] = softmax(scale * q . keys) @ latents, over the visible keys; a row that sees nothing is all 0.
// Probabilities of invisible columns are set to 0, their scores are left alone.
void attend(const AttentionShape& shape, const float* q, const VisibleKeys& keys, float* out, const AttentionTaps& taps);

// probs [count] of scores [count] where visible[i], by online softmax; the others and a row that sees nothing are 0.
void softmax_row(const float* scores, const uint8_t* visible, float* probs, int64_t count);

// out [rows, heads, keys] = scale * q . key.
void attention_scores(const float* q, const float* keys, float scale, float* out, int64_t queries, int64_t key_count, int64_t dim);

// out [queries, rank] = probs [queries, keys] @ latent [keys, rank]. A key of probability 0 is not read, as in a masked kernel.
void weighted_latents(const float* probs, const float* latent, float* out, int64_t queries, int64_t key_count, int64_t rank);

}  // namespace paritree
