// Drawing a token from a row of logits with prescribed noise (rules S1-S3, A6; spec/sampling.py).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "params.hpp"

namespace paritree {

struct Sampling {
  double temperature = 1.0;  // 0: the argmax, after penalties
  int64_t top_k = 0;         // 0: all
  bool top_k_ties_all = false;
  double top_p = 1.0, min_p = 0.0;
  double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;
  uint64_t seed = 0;
  std::vector<std::pair<int64_t, double>> logit_bias;  // (token, added to its logit)
};

// Throws for a key that is none of these, and for values outside the domain.
Sampling read_sampling(const paritree_params& params, int64_t vocab);

// The key of the noise besides the seed: which prompt, and the absolute position of the token that is drawn.
struct Place {
  int32_t sequence;
  int64_t position;
};

// The fields by name, biases left out. Throws for values outside the domain.
Sampling sampling_fields(const Params& params);

// argmax of z + g. `seen` is what penalties count: prompt, emitted tokens, and the path of the node; its first prompt_len tokens are the prompt.
// In float64: two keys closer than its rounding may come out either way. Throws for a row that is no distribution.
int32_t draw(const Sampling& sampling, const float* logits, int64_t vocab, const std::vector<int32_t>& seen, int64_t prompt_len, const Place& place);

// Word `index` of Philox4x64-10 with key (seed, position): word index % 4 of the block with counter (index / 4 + 1, sequence, 0, 0).
class Philox {
 public:
  Philox(uint64_t seed, uint64_t position, uint64_t sequence);
  uint64_t next();

 private:
  uint64_t key_[2], sequence_, block_ = 0, words_[4] = {};
  int used_ = 4;
};

}  // namespace paritree
