// The configuration and the weights of a session: read from the ABI's parameters, checked, copied.
#include <cmath>
#include <functional>
#include <memory>

#include "session.hpp"
#include "tensors.hpp"

namespace paritree {
namespace {

int64_t at_least(const Params& params, const char* key, int64_t least) {
  const int64_t value = params.integer(key);
  if (value < least) invalid(key, " is ", value, ", but must be at least ", least);
  return value;
}

float positive(const Params& params, const char* key) {
  const double value = params.number(key);
  if (!(value > 0.0) || std::isinf(value)) invalid(key, " is ", value, ", but must be positive and finite");
  return static_cast<float>(value);
}

RopeConfig read_rope(const Params& params) {
  RopeConfig rope;
  rope.dim = at_least(params, "rope_dim", 1);
  if (rope.dim % 2 != 0) invalid("rope_dim is ", rope.dim, ", but pairs are rotated: give an even number");
  rope.theta = params.number("rope_theta");
  if (!(rope.theta > 0.0) || std::isinf(rope.theta)) invalid("rope_theta is ", rope.theta, ", but must be positive and finite");
  rope.half_layout = params.flag("rope_layout_half");
  rope.yarn = params.has("yarn_factor");
  if (rope.yarn) {
    rope.factor = params.number("yarn_factor");
    rope.original_len = params.number("yarn_original_len");
    rope.beta_fast = params.number("yarn_beta_fast");
    rope.beta_slow = params.number("yarn_beta_slow");
    rope.mscale = params.number("yarn_mscale");
    rope.mscale_all_dim = params.number("yarn_mscale_all_dim");
    for (const char* key : {"yarn_factor", "yarn_original_len", "yarn_beta_fast", "yarn_beta_slow"}) positive(params, key);
    if (rope.factor > 1.0 && !(rope.theta > 1.0)) invalid("rope_theta is ", rope.theta, ", but YaRN needs more than 1");
  }
  return rope;
}

}  // namespace

ModelConfig read_config(const Params& params) {
  params.refuse_unknown({
      "vocab", "hidden", "layers", "first_dense", "heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim", "dense_dim", "experts", "top_k",
      "expert_dim", "shared_experts", "groups", "top_groups", "scoring_softmax", "group_score_max", "group_fill_zero", "norm_top_k", "routed_scale",
      "denominator_eps", "denominator_clamp", "rms_eps", "latent_eps", "rope_theta", "rope_layout_half", "rope_table_len", "yarn_factor",
      "yarn_original_len", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim", "tied", "attention_bias", "window",
      "cache_format", "softmax_scale", "stream_experts", "cache_slots",
  });
  ModelConfig config{};
  config.vocab = at_least(params, "vocab", 1);
  config.hidden = at_least(params, "hidden", 1);
  config.layers = at_least(params, "layers", 1);
  config.first_dense = at_least(params, "first_dense", 0);
  config.heads = at_least(params, "heads", 1);
  config.q_rank = at_least(params, "q_rank", 0);
  config.kv_rank = at_least(params, "kv_rank", 1);
  config.nope_dim = at_least(params, "nope_dim", 1);
  config.v_dim = at_least(params, "v_dim", 1);
  config.rope = read_rope(params);
  config.rope_dim = config.rope.dim;
  config.dense_dim = at_least(params, "dense_dim", config.first_dense > 0 ? 1 : 0);
  config.scoring_softmax = params.flag("scoring_softmax");
  config.tied = params.flag("tied");
  config.attention_bias = params.flag("attention_bias", false);
  config.stream_experts = params.flag("stream_experts", false);
  config.window = params.integer("window", 0);
  config.rope_table_len = params.integer("rope_table_len", 0);
  if (config.window < 0 || config.rope_table_len < 0) invalid("window and rope_table_len must not be negative");
  constexpr Rounding kFormats[] = {round_nothing, round_bfloat16, round_float16};
  const int64_t format = params.integer("cache_format", 0);
  if (format < 0 || format > 2) unsupported("cache_format is ", format, ", but this engine has float32 (0), bfloat16 (1) and float16 (2)");
  config.to_cache = kFormats[format];
  config.rms_eps = positive(params, "rms_eps");
  config.latent_eps = positive(params, "latent_eps");
  config.softmax_scale = positive(params, "softmax_scale");
  config.shared_experts = at_least(params, "shared_experts", 0);
  if (config.first_dense < config.layers) {
    config.experts = config.route.experts = at_least(params, "experts", 1);
    config.expert_dim = at_least(params, "expert_dim", 1);
    config.top_k = config.route.top_k = params.integer("top_k");
    config.route.groups = params.integer("groups");
    config.route.top_groups = params.integer("top_groups");
    config.route.group_score_max = params.flag("group_score_max");
    config.route.norm_top_k = params.flag("norm_top_k");
    config.route.routed_scale = static_cast<float>(params.number("routed_scale"));
    config.route.denominator_eps = static_cast<float>(params.number("denominator_eps"));
    config.route.denominator_clamp = static_cast<float>(params.number("denominator_clamp", 0.0));
    if (params.flag("group_fill_zero", false)) config.route.group_fill = 0.0f;
    check_route(config.route);
  }
  return config;
}

namespace {

using Load = std::function<Weight(const std::string& name, std::initializer_list<int64_t> shape)>;

// One expert at a time, by names like "3.expert_gate/17"; the last one is kept, because its matrices are in use until the next.
ExpertSource streamed_experts(const Load& load, const std::string& prefix, int64_t hidden, int64_t width) {
  struct Held {
    Weight gate, up, down;
  };
  const auto held = std::make_shared<Held>();
  return [=](int64_t expert) {
    const std::string slice = "/" + std::to_string(expert);
    held->gate = load(prefix + "expert_gate" + slice, {hidden, width});
    held->up = load(prefix + "expert_up" + slice, {hidden, width});
    held->down = load(prefix + "expert_down" + slice, {width, hidden});
    return ExpertMatrices{held->gate.data(), held->up.data(), held->down.data()};
  };
}

}  // namespace

ModelWeights load_weights(const ModelConfig& config, paritree_weight_fn weight, void* user) {
  const Load load = [weight, user](const std::string& name, std::initializer_list<int64_t> shape) {
    DLTensor tensor{};
    const paritree_status status = weight(user, name.c_str(), &tensor);
    if (status != PARITREE_OK) failed("the weight callback answered ", status, " for ", name, "; expected float32 ", shape_text(shape.begin(), static_cast<int64_t>(shape.size())));
    const float* data = checked_data<float>(name.c_str(), tensor, shape);
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return Weight(data, data + count);
  };
  const ModelConfig& c = config;
  ModelWeights weights;
  weights.embed = load("embed", {c.vocab, c.hidden});
  if (c.rope_table_len > 0) {
    const Weight cos = load("rope_cos", {c.rope_table_len, c.rope_dim / 2});
    weights.rope = carried_table(cos, load("rope_sin", {c.rope_table_len, c.rope_dim / 2}), c.rope_table_len);
  } else {
    weights.rope = computed_table(c.rope);
  }
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string prefix = std::to_string(layer) + ".";
    LayerWeights& w = weights.layers.emplace_back();
    w.attn_norm = load(prefix + "attn_norm", {c.hidden});
    if (c.q_rank > 0) {
      w.q_a = load(prefix + "q_a", {c.hidden, c.q_rank});
      w.q_a_norm = load(prefix + "q_a_norm", {c.q_rank});
      w.q_b = load(prefix + "q_b", {c.q_rank, c.heads * c.head_dim()});
    } else {
      w.q = load(prefix + "q", {c.hidden, c.heads * c.head_dim()});
    }
    if (c.attention_bias) {
      (c.q_rank > 0 ? w.q_a_bias : w.q_bias) = c.q_rank > 0 ? load(prefix + "q_a_bias", {c.q_rank}) : load(prefix + "q_bias", {c.heads * c.head_dim()});
      w.kv_a_bias = load(prefix + "kv_a_bias", {c.cache_dim()});
      w.o_bias = load(prefix + "o_bias", {c.hidden});
    }
    w.kv_a = load(prefix + "kv_a", {c.hidden, c.cache_dim()});
    w.kv_a_norm = load(prefix + "kv_a_norm", {c.kv_rank});
    w.w_kc = load(prefix + "w_kc", {c.heads, c.nope_dim, c.kv_rank});
    w.w_vc = load(prefix + "w_vc", {c.heads, c.kv_rank, c.v_dim});
    w.o = load(prefix + "o", {c.heads * c.v_dim, c.hidden});
    w.ffn_norm = load(prefix + "ffn_norm", {c.hidden});
    if (c.is_dense(layer)) {
      w.gate = load(prefix + "gate", {c.hidden, c.dense_dim});
      w.up = load(prefix + "up", {c.hidden, c.dense_dim});
      w.down = load(prefix + "down", {c.dense_dim, c.hidden});
      continue;
    }
    w.router = load(prefix + "router", {c.hidden, c.experts});
    w.router_bias = c.scoring_softmax ? Weight(static_cast<std::size_t>(c.experts), 0.0f) : load(prefix + "router_bias", {c.experts});
    if (c.stream_experts) {
      w.experts = streamed_experts(load, prefix, c.hidden, c.expert_dim);
    } else {
      w.expert_gate = load(prefix + "expert_gate", {c.experts, c.hidden, c.expert_dim});
      w.expert_up = load(prefix + "expert_up", {c.experts, c.hidden, c.expert_dim});
      w.expert_down = load(prefix + "expert_down", {c.experts, c.expert_dim, c.hidden});
      w.experts = experts_of_stacks(w.expert_gate.data(), w.expert_up.data(), w.expert_down.data(), c.hidden, c.expert_dim);
    }
    if (c.shared_experts > 0) {
      w.shared_gate = load(prefix + "shared_gate", {c.hidden, c.shared_dim()});
      w.shared_up = load(prefix + "shared_up", {c.hidden, c.shared_dim()});
      w.shared_down = load(prefix + "shared_down", {c.shared_dim(), c.hidden});
    }
  }
  weights.norm = load("norm", {c.hidden});
  if (!c.tied) {
    weights.head = load("head", {c.hidden, c.vocab});
  } else {
    weights.head.resize(weights.embed.size());
    for (int64_t token = 0; token < c.vocab; ++token) {
      for (int64_t i = 0; i < c.hidden; ++i) {
        weights.head[static_cast<std::size_t>(i * c.vocab + token)] = weights.embed[static_cast<std::size_t>(token * c.hidden + i)];
      }
    }
  }
  return weights;
}

}  // namespace paritree
