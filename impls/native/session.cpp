// The forward pass over ragged rows: prefill, chunk, decode and tree batches are one path. Rows of all sequences share every
// matrix product; attention runs row by row over the keys that the row sees.
#include "session.hpp"

#include <algorithm>
#include <limits>

#include "gemm.hpp"
#include "norm.hpp"
#include "pointwise.hpp"
#include "tree.hpp"

namespace paritree {
namespace {

constexpr float kUnspecified = -std::numeric_limits<float>::infinity();  // scores of columns that a row does not see

}  // namespace

Session::Session(const ModelConfig& config, ModelWeights weights, int64_t cache_slots)
    : config_(config), weights_(std::move(weights)), cache_(config.layers, config.cache_dim(), cache_slots) {}

void Session::check_rows(const BatchRows& rows) const {
  for (int64_t i = 0; i < rows.count(); ++i) {
    const std::size_t at = static_cast<std::size_t>(i);
    if (rows.token[at] < 0 || rows.token[at] >= config_.vocab) {
      invalid("token[", i, "] is ", rows.token[at], ", but must be between 0 and ", config_.vocab - 1);
    }
    if (rows.position[at] < 0) invalid("position[", i, "] is ", rows.position[at], ", but positions start at 0");
    if (rows.parent[at] < -1 || rows.parent[at] >= i) {
      invalid("parent[", i, "] is ", rows.parent[at], ", but must be -1 or an earlier row of the batch");
    }
    if (rows.parent[at] >= 0 && rows.sequence[static_cast<std::size_t>(rows.parent[at])] != rows.sequence[at]) {
      invalid("parent[", i, "] is ", rows.parent[at], ", a row of sequence ", rows.sequence[static_cast<std::size_t>(rows.parent[at])],
              ", but must be of sequence ", rows.sequence[at]);
    }
  }
}

void Session::plan_batch(const BatchRows& rows, Plan& plan) {
  const std::size_t count = static_cast<std::size_t>(rows.count());
  std::map<int32_t, std::vector<int64_t>> members;  // batch rows of each sequence
  std::vector<int32_t> local(count);                // index of a row among those of its sequence
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<int64_t>& own = members[rows.sequence[i]];
    local[i] = static_cast<int32_t>(own.size());
    own.push_back(static_cast<int64_t>(i));
  }
  plan.slot.resize(count);
  plan.visible.resize(count);
  for (const auto& [sequence, own] : members) {
    const int64_t prefix = cache_.committed(sequence);
    std::vector<int32_t> parents, positions;
    for (const int64_t row : own) {
      positions.push_back(rows.position[static_cast<std::size_t>(row)]);
      const int32_t parent = rows.parent[static_cast<std::size_t>(row)];
      parents.push_back(parent < 0 ? -1 : local[static_cast<std::size_t>(parent)]);
    }
#ifdef PARITREE_PLANT_MASK_STALE
    // as a graph is captured once per request and number of rows: the parents of its first replay stay in its buffers
    auto& captured = captured_parents_[sequence];
    if (prefix == 0) captured.clear();
    const Ancestors ancestors(captured.try_emplace(parents.size(), parents).first->second);
#else
    const Ancestors ancestors(parents);
#endif
    for (std::size_t i = 0; i < own.size(); ++i) {
      const std::size_t row = static_cast<std::size_t>(own[i]);
      plan.slot[row] = prefix + static_cast<int64_t>(i);
      for (int64_t key = 0; key < prefix; ++key) plan.visible[row].push_back(key);
      ancestors.visit(static_cast<int64_t>(i), [&](int64_t column) { plan.visible[row].push_back(prefix + column); });
    }
    plan.key_columns = std::max(plan.key_columns, prefix + static_cast<int64_t>(own.size()));
    cache_.append(sequence, parents, positions);
    if (config_.window > 0) {
      const std::vector<int32_t>& at = cache_.positions(sequence);
      for (const int64_t row : own) {
        std::vector<int64_t>& seen = plan.visible[static_cast<std::size_t>(row)];
        int64_t last_hidden = int64_t{rows.position[static_cast<std::size_t>(row)]} - config_.window;
#ifdef PARITREE_PLANT_WINDOW_INCLUSIVE
        --last_hidden;
#endif
        seen.erase(std::remove_if(seen.begin(), seen.end(), [&](int64_t key) { return at[static_cast<std::size_t>(key)] <= last_hidden; }), seen.end());
      }
    }
  }
  const int64_t pairs = config_.rope_dim / 2;
  plan.cos.resize(count * static_cast<std::size_t>(pairs));
  plan.sin.resize(plan.cos.size());
  for (std::size_t i = 0; i < count; ++i) {
#ifdef PARITREE_PLANT_POSITION_INDEX
    const int64_t position = plan.slot[i];
#else
    const int64_t position = rows.position[i];
#endif
    weights_.rope(position, plan.cos.data() + i * static_cast<std::size_t>(pairs), plan.sin.data() + i * static_cast<std::size_t>(pairs));
  }
}

void Session::forward(const BatchRows& rows, float* logits, const TapSink& taps, int64_t first_layer, const float* hidden) {
  check_rows(rows);
  if (hidden == nullptr && first_layer != 0) invalid("first_layer is ", first_layer, ", but without hidden it must be 0");
  if (first_layer < 0 || first_layer > config_.layers) invalid("first_layer is ", first_layer, ", but must be between 0 and ", config_.layers);
  const int64_t count = rows.count(), width = config_.hidden;
  if (count == 0) return;
  for (const int32_t sequence : rows.sequence) cache_.drop_pending(sequence);
  Plan plan;
  try {
    plan_batch(rows, plan);
    float* residual = buffer("residual", count * width);
    if (hidden == nullptr) {
      embed(weights_.embed.data(), rows.token.data(), residual, count, width);
      taps.push("embed", -1, residual, {count, width});
    } else {
      std::copy_n(hidden, count * width, residual);
    }
    for (int64_t layer = first_layer; layer < config_.layers; ++layer) {
      attention_block(layer, rows, plan, residual, taps);
      feed_forward_block(layer, count, residual, taps);
    }
    float* final_norm = buffer("final_norm", count * width);
    rms_norm(residual, width, weights_.norm.data(), config_.rms_eps, final_norm, count, width);
    taps.push("final_norm", config_.layers, final_norm, {count, width});
    float* wanted = buffer("wanted", count * width);
    int64_t wanted_count = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (rows.want_logits[static_cast<std::size_t>(i)]) std::copy_n(final_norm + i * width, width, wanted + wanted_count++ * width);
    }
    matmul(wanted, width, weights_.head.data(), logits, config_.vocab, wanted_count, width, config_.vocab);
    taps.push("logits", config_.layers, logits, {wanted_count, config_.vocab});
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < wanted_count; ++i) ids.push_back(argmax(logits + i * config_.vocab, config_.vocab));
    taps.push("argmax", config_.layers, ids.data(), {wanted_count});
  } catch (...) {
    for (const int32_t sequence : rows.sequence) cache_.drop_pending(sequence);
    throw;
  }
}

void Session::attention_block(int64_t layer, const BatchRows& rows, const Plan& plan, float* residual, const TapSink& taps) {
  const ModelConfig& c = config_;
  const LayerWeights& w = weights_.layers[static_cast<std::size_t>(layer)];
  const int64_t T = rows.count(), H = c.heads, R = c.kv_rank, D = c.rope_dim, n = c.nope_dim;
  float* x = buffer("attn_norm", T * c.hidden);
  rms_norm(residual, c.hidden, w.attn_norm.data(), c.rms_eps, x, T, c.hidden);
  taps.push("attn_norm", layer, x, {T, c.hidden});

  float* q = buffer("q", T * H * c.head_dim());  // [T, H, n + D]
  if (c.q_rank > 0) {
    float* q_a = buffer("q_a", T * c.q_rank);
    float* q_a_norm = buffer("q_a_norm", T * c.q_rank);
    matmul(x, c.hidden, w.q_a.data(), q_a, c.q_rank, T, c.hidden, c.q_rank);
    if (c.attention_bias) add_bias(w.q_a_bias.data(), q_a, T, c.q_rank);
    taps.push("q_a", layer, q_a, {T, c.q_rank});
    rms_norm(q_a, c.q_rank, w.q_a_norm.data(), c.latent_eps, q_a_norm, T, c.q_rank);
    taps.push("q_a_norm", layer, q_a_norm, {T, c.q_rank});
    matmul(q_a_norm, c.q_rank, w.q_b.data(), q, H * c.head_dim(), T, c.q_rank, H * c.head_dim());
  } else {
    matmul(x, c.hidden, w.q.data(), q, H * c.head_dim(), T, c.hidden, H * c.head_dim());
    if (c.attention_bias) add_bias(w.q_bias.data(), q, T, H * c.head_dim());
  }
  taps.push("q", layer, q, {T, H, c.head_dim()});

  float* kv_a = buffer("kv_a", T * c.cache_dim());  // [T, R + D]
  matmul(x, c.hidden, w.kv_a.data(), kv_a, c.cache_dim(), T, c.hidden, c.cache_dim());
  if (c.attention_bias) add_bias(w.kv_a_bias.data(), kv_a, T, c.cache_dim());
  taps.push("kv_a", layer, kv_a, {T, c.cache_dim()});
  float* latent = buffer("latent", T * R);
  rms_norm(kv_a, c.cache_dim(), w.kv_a_norm.data(), c.latent_eps, latent, T, R);
  c.to_cache(latent, T * R);
  taps.push("latent", layer, latent, {T, R});

  float* q_rope = buffer("q_rope", T * H * D);
  float* k_rope = buffer("k_rope", T * D);
  rotate(q + n, H * c.head_dim(), c.head_dim(), plan.cos.data(), plan.sin.data(), q_rope, T, H, D, c.rope.half_layout);
  taps.push("q_rope", layer, q_rope, {T, H, D});
  bool key_half_layout = c.rope.half_layout;
#ifdef PARITREE_PLANT_KEY_LAYOUT
  key_half_layout = !key_half_layout;
#endif
  rotate(kv_a + R, c.cache_dim(), 0, plan.cos.data(), plan.sin.data(), k_rope, T, 1, D, key_half_layout);
  c.to_cache(k_rope, T * D);
  taps.push("k_rope", layer, k_rope, {T, D});
  for (int64_t t = 0; t < T; ++t) {
    float* row = cache_.row(layer, rows.sequence[static_cast<std::size_t>(t)], plan.slot[static_cast<std::size_t>(t)]);
    std::copy_n(latent + t * R, R, row);
    std::copy_n(k_rope + t * D, D, row + R);
  }

  float* q_absorb = buffer("q_absorb", T * H * R);
  matmul_per_head(q, H * c.head_dim(), c.head_dim(), w.w_kc.data(), q_absorb, T, H, n, R);
  taps.push("q_absorb", layer, q_absorb, {T, H, R});

  const int64_t S = plan.key_columns;
  AttentionShape shape{H, R + D, R, c.softmax_scale};
  float* scores = taps.wants("scores") ? buffer("scores", T * H * S) : nullptr;
  float* probs = taps.wants("probs") ? buffer("probs", T * H * S) : nullptr;
  if (scores != nullptr) std::fill_n(scores, T * H * S, kUnspecified);
  float* o_latent = buffer("o_latent", T * H * R);
  float* query = buffer("query", H * (R + D));
  VisibleKeys keys;
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t h = 0; h < H; ++h) {
      std::copy_n(q_absorb + (t * H + h) * R, R, query + h * (R + D));
      std::copy_n(q_rope + (t * H + h) * D, D, query + h * (R + D) + R);
    }
    keys.clear();
    for (const int64_t key : plan.visible[static_cast<std::size_t>(t)]) {
      keys.push(cache_.row(layer, rows.sequence[static_cast<std::size_t>(t)], key), key);
    }
    AttentionTaps of_row{scores == nullptr ? nullptr : scores + t * H * S, probs == nullptr ? nullptr : probs + t * H * S, S};
    attend(shape, query, keys, o_latent + t * H * R, of_row);
  }
  if (scores != nullptr) taps.push("scores", layer, scores, {T, H, S});
  if (probs != nullptr) taps.push("probs", layer, probs, {T, H, S});
  taps.push("o_latent", layer, o_latent, {T, H, R});

  float* o_heads = buffer("o_heads", T * H * c.v_dim);
  matmul_per_head(o_latent, H * R, R, w.w_vc.data(), o_heads, T, H, R, c.v_dim);
  taps.push("o_heads", layer, o_heads, {T, H, c.v_dim});
  float* attn_out = buffer("attn_out", T * c.hidden);
  matmul(o_heads, H * c.v_dim, w.o.data(), attn_out, c.hidden, T, H * c.v_dim, c.hidden);
  if (c.attention_bias) add_bias(w.o_bias.data(), attn_out, T, c.hidden);
  taps.push("attn_out", layer, attn_out, {T, c.hidden});
  add(residual, attn_out, residual, T * c.hidden);
  taps.push("attn_residual", layer, residual, {T, c.hidden});
}

void Session::feed_forward_block(int64_t layer, int64_t rows, float* residual, const TapSink& taps) {
  const int64_t count = rows * config_.hidden;
  float* x = buffer("ffn_norm", count);
  rms_norm(residual, config_.hidden, weights_.layers[static_cast<std::size_t>(layer)].ffn_norm.data(), config_.rms_eps, x, rows, config_.hidden);
  taps.push("ffn_norm", layer, x, {rows, config_.hidden});
  float* out = buffer("ffn_out", count);
  if (config_.is_dense(layer)) {
    dense_feed_forward(layer, rows, x, out, taps);
  } else {
    sparse_feed_forward(layer, rows, x, out, taps);
  }
  taps.push("ffn_out", layer, out, {rows, config_.hidden});
  add(residual, out, residual, count);
  taps.push("ffn_residual", layer, residual, {rows, config_.hidden});
}

void Session::dense_feed_forward(int64_t layer, int64_t rows, const float* x, float* out, const TapSink& taps) {
  const LayerWeights& w = weights_.layers[static_cast<std::size_t>(layer)];
  const int64_t width = config_.dense_dim, hidden = config_.hidden;
  float* gate = buffer("gate", rows * width);
  float* up = buffer("up", rows * width);
  float* act = buffer("act", rows * width);
  matmul(x, hidden, w.gate.data(), gate, width, rows, hidden, width);
  taps.push("gate", layer, gate, {rows, width});
  matmul(x, hidden, w.up.data(), up, width, rows, hidden, width);
  taps.push("up", layer, up, {rows, width});
  swiglu(gate, up, act, rows * width);
  taps.push("act", layer, act, {rows, width});
  matmul(act, width, w.down.data(), out, hidden, rows, width, hidden);
}

void Session::sparse_feed_forward(int64_t layer, int64_t rows, const float* x, float* out, const TapSink& taps) {
  const ModelConfig& c = config_;
  const LayerWeights& w = weights_.layers[static_cast<std::size_t>(layer)];
  const int64_t K = c.top_k, E = c.experts, F = c.expert_dim, hidden = c.hidden, shared_dim = c.shared_dim();
  float* router_logits = buffer("router_logits", rows * E);
  float* scores = buffer("router_scores", rows * E);
  float* expert_weights = buffer("expert_weights", rows * K);
  std::vector<int32_t> ids(static_cast<std::size_t>(rows * K));
  matmul(x, hidden, w.router.data(), router_logits, E, rows, hidden, E);
  taps.push("router_logits", layer, router_logits, {rows, E});
  router_scores(router_logits, scores, rows, E, c.scoring_softmax);
  taps.push("router_scores", layer, scores, {rows, E});
  route(c.route, scores, w.router_bias.data(), ids.data(), expert_weights, rows);
  taps.push("expert_ids", layer, ids.data(), {rows, K});
  taps.push("expert_weights", layer, expert_weights, {rows, K});

  ExpertTaps of_experts;
  if (taps.wants("expert_gate")) of_experts.gate = buffer("expert_gate", rows * K * F);
  if (taps.wants("expert_up")) of_experts.up = buffer("expert_up", rows * K * F);
  if (taps.wants("expert_act")) of_experts.act = buffer("expert_act", rows * K * F);
  float* expert_out = buffer("expert_out", rows * K * hidden);
  experts(x, ids.data(), w.experts, expert_out, buffer("expert_workspace", experts_workspace(rows, K, hidden, F)), rows, K, E, hidden, F, of_experts);
  taps.push("expert_gate", layer, of_experts.gate, {rows, K, F});
  taps.push("expert_up", layer, of_experts.up, {rows, K, F});
  taps.push("expert_act", layer, of_experts.act, {rows, K, F});
  taps.push("expert_out", layer, expert_out, {rows, K, hidden});

  float* shared_out = buffer("shared_out", rows * hidden);
  if (c.shared_experts > 0) {
    float* gate = buffer("shared_gate", rows * shared_dim);
    float* up = buffer("shared_up", rows * shared_dim);
    float* act = buffer("shared_act", rows * shared_dim);
    matmul(x, hidden, w.shared_gate.data(), gate, shared_dim, rows, hidden, shared_dim);
    taps.push("shared_gate", layer, gate, {rows, shared_dim});
    matmul(x, hidden, w.shared_up.data(), up, shared_dim, rows, hidden, shared_dim);
    taps.push("shared_up", layer, up, {rows, shared_dim});
    swiglu(gate, up, act, rows * shared_dim);
    taps.push("shared_act", layer, act, {rows, shared_dim});
    matmul(act, shared_dim, w.shared_down.data(), shared_out, hidden, rows, shared_dim, hidden);
    taps.push("shared_out", layer, shared_out, {rows, hidden});
  } else {
    std::fill_n(shared_out, rows * hidden, 0.0f);
  }
  combine(expert_weights, expert_out, shared_out, out, rows, K, hidden);
}

}  // namespace paritree
