#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "sampling.hpp"
#include "session.hpp"

namespace paritree {

struct GenerateRequest {
  std::vector<std::vector<int32_t>> prompts;
  // Fills [block_len, vocab] for prompt `number` with this history; empty: one token at a time.
  std::function<void(int32_t number, const std::vector<int32_t>& history, float* logits)> draft;
  int64_t block_len = 0;
  int64_t budget = 0;
  int64_t max_new = 0;
  std::vector<int32_t> stop_tokens;
  std::function<void(const paritree_emission&)> emit;
  std::optional<Sampling> sampling;  // none: greedy
};

// Decoding of all prompts together, on sequences of its own that are evicted at the end, also after an error.
void generate(Session& session, const GenerateRequest& request);

}  // namespace paritree
