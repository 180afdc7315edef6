#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention.hpp"
#include "cache.hpp"
#include "common.hpp"
#include "moe.hpp"
#include "params.hpp"
#include "pointwise.hpp"
#include "rope.hpp"

namespace paritree {

struct ModelConfig {
  int64_t vocab, hidden, layers, first_dense, heads, q_rank, kv_rank, nope_dim, rope_dim, v_dim, dense_dim, experts, top_k, expert_dim;
  int64_t shared_experts;
  bool scoring_softmax, tied, attention_bias, stream_experts;
  int64_t window;          // a row sees keys at positions above its own - window; 0: all
  int64_t rope_table_len;  // of carried rotary tables; 0: computed
  Rounding to_cache;       // of latent and k_rope on their way into the cache
  float rms_eps, latent_eps, softmax_scale;
  RouteConfig route;
  RopeConfig rope;

  int64_t head_dim() const { return nope_dim + rope_dim; }
  int64_t cache_dim() const { return kv_rank + rope_dim; }
  int64_t shared_dim() const { return shared_experts * expert_dim; }
  bool is_dense(int64_t layer) const { return layer < first_dense; }
};

ModelConfig read_config(const Params& params);

using Weight = std::vector<float>;

// Names as in spec/weights.py; an absent tensor (q_a without q_rank, ...) stays empty.
struct LayerWeights {
  Weight attn_norm, q, q_a, q_a_norm, q_b, kv_a, kv_a_norm, w_kc, w_vc, o, ffn_norm;
  Weight q_bias, q_a_bias, kv_a_bias, o_bias;
  Weight gate, up, down;
  Weight router, router_bias, expert_gate, expert_up, expert_down, shared_gate, shared_up, shared_down;
  ExpertSource experts;  // over the three stacks, or asking for one expert at a time
};

struct ModelWeights {
  Weight embed, norm, head;  // head is [hidden, vocab], also when tied
  RopeTable rope;
  std::vector<LayerWeights> layers;
};

// Copies every tensor that the configuration needs; with stream_experts, `weight` is also called later, for experts by name/index.
ModelWeights load_weights(const ModelConfig& config, paritree_weight_fn weight, void* user);

// Pushes the taps that were asked for.
class TapSink {
 public:
  TapSink(const char* names, paritree_tap_fn push, void* user);
  bool wants(const char* name) const;
  const std::vector<std::string>& names() const { return names_; }
  // Each tap is exactly what the next operation consumed (handoff 0), and whole.
  template <class T>
  void push(const char* name, int64_t layer, const T* data, std::initializer_list<int64_t> shape) const;

 private:
  std::vector<std::string> names_;
  paritree_tap_fn push_;
  void* user_;
};

// Ragged rows, T of each array.
struct BatchRows {
  std::vector<int32_t> sequence, token, position, parent;
  std::vector<uint8_t> want_logits;

  int64_t count() const { return static_cast<int64_t>(token.size()); }
};

class Session {
 public:
  Session(const ModelConfig& config, ModelWeights weights, int64_t cache_slots);

  // Writes [wanted rows, vocab]. Drops rows of these sequences that are still pending. Throws and keeps the committed rows as they were when anything is wrong, also in a tap callback.
  // `hidden` [T, hidden]: start before `first_layer` from this residual stream; cache rows of skipped layers hold NaN.
  void forward(const BatchRows& rows, float* logits, const TapSink& taps, int64_t first_layer = 0, const float* hidden = nullptr);

  const ModelConfig& config() const { return config_; }
  Cache& cache() { return cache_; }

 private:
  // Which keys each row of the running batch sees.
  struct Plan {
    std::vector<int64_t> slot;                 // [T], index of the row in its sequence
    std::vector<std::vector<int64_t>> visible;  // [T], indices in the sequence, ascending
    std::vector<float> cos, sin;               // [T, rope_dim / 2]
    int64_t key_columns = 0;                   // S
  };

  void check_rows(const BatchRows& rows) const;
  void plan_batch(const BatchRows& rows, Plan& plan);
  void attention_block(int64_t layer, const BatchRows& rows, const Plan& plan, float* residual, const TapSink& taps);
  void feed_forward_block(int64_t layer, int64_t rows, float* residual, const TapSink& taps);
  void dense_feed_forward(int64_t layer, int64_t rows, const float* x, float* out, const TapSink& taps);
  void sparse_feed_forward(int64_t layer, int64_t rows, const float* x, float* out, const TapSink& taps);
  float* buffer(const char* name, int64_t count) { return buffers_[name].sized(count); }

  ModelConfig config_;
  ModelWeights weights_;
  Cache cache_;
  std::map<std::string, Buffer> buffers_;  // by the name of what they hold; kept between batches
#ifdef PARITREE_PLANT_MASK_STALE
  std::map<int32_t, std::map<std::size_t, std::vector<int32_t>>> captured_parents_;  // by sequence and number of rows
#endif
};

}  // namespace paritree
