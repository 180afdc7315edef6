// run_op: the operations of spec/ops on the caller's tensors. Here names, shapes and ids are checked; the kernels are elsewhere.
#include "ops.hpp"

#include <algorithm>
#include <cstring>

#include "attention.hpp"
#include "gemm.hpp"
#include "moe.hpp"
#include "norm.hpp"
#include "operands.hpp"
#include "params.hpp"
#include "pointwise.hpp"
#include "rope.hpp"
#include "sampling.hpp"
#include "tensors.hpp"
#include "tree.hpp"

namespace paritree {
namespace {

void op_embed(const Operands& op) {
  const int64_t V = op.size("table", 2, 0), N = op.size("table", 2, 1), T = op.size("ids", 1, 0);
  const float* table = op.in<float>("table", {V, N});
  const int32_t* ids = op.in<int32_t>("ids", {T});
  float* out = op.out<float>("out", {T, N});
  check_ids("ids", ids, T, V);
  embed(table, ids, out, T, N);
}

void op_rms_norm(const Operands& op) {
  const int64_t T = op.size("x", 2, 0), N = op.size("x", 2, 1);
  rms_norm(op.in<float>("x", {T, N}), N, op.in<float>("gain", {N}), static_cast<float>(op.params.number("eps")), op.out<float>("out", {T, N}), T, N);
}

void op_matmul(const Operands& op) {
  const int64_t T = op.size("x", 2, 0), K = op.size("x", 2, 1), N = op.size("w", 2, 1);
  matmul(op.in<float>("x", {T, K}), K, op.in<float>("w", {K, N}), op.out<float>("out", {T, N}), N, T, K, N);
}

void op_int4_matmul(const Operands& op) {
  const int64_t T = op.size("x", 2, 0), K = op.size("x", 2, 1), G = op.size("scales", 2, 0), N = op.size("scales", 2, 1);
  if (K != G * 32) invalid("x has ", K, " columns, but ", G, " groups of 32 need ", G * 32);
  int4_matmul(op.in<float>("x", {T, K}), op.in<int32_t>("packed", {G * 4, N}), op.in<float>("scales", {G, N}), op.out<float>("out", {T, N}), T, K, N);
}

void op_rope(const Operands& op) {
  const int64_t T = op.size("x", 3, 0), H = op.size("x", 3, 1), D = op.size("x", 3, 2);
  if (D % 2 != 0) invalid("x has ", D, " elements to rotate, but pairs are rotated: give an even number");
  rotate(op.in<float>("x", {T, H, D}), H * D, D, op.in<float>("cos", {T, D / 2}), op.in<float>("sin", {T, D / 2}), op.out<float>("out", {T, H, D}), T,
         H, D, op.params.flag("half_layout"));
}

void op_q_absorb(const Operands& op) {
  const int64_t T = op.size("q_nope", 3, 0), H = op.size("q_nope", 3, 1), n = op.size("q_nope", 3, 2), R = op.size("w_kc", 3, 2);
  matmul_per_head(op.in<float>("q_nope", {T, H, n}), H * n, n, op.in<float>("w_kc", {H, n, R}), op.out<float>("out", {T, H, R}), T, H, n, R);
}

void op_scores(const Operands& op) {
  const int64_t T = op.size("q", 3, 0), H = op.size("q", 3, 1), C = op.size("q", 3, 2), S = op.size("keys", 2, 0);
  attention_scores(op.in<float>("q", {T, H, C}), op.in<float>("keys", {S, C}), static_cast<float>(op.params.number("scale")),
                   op.out<float>("out", {T, H, S}), T * H, S, C);
}

void op_softmax(const Operands& op) {
  const int64_t T = op.size("scores", 3, 0), H = op.size("scores", 3, 1), S = op.size("scores", 3, 2);
  const float* scores = op.in<float>("scores", {T, H, S});
  const uint8_t* visible = op.in<uint8_t>("visible", {T, S});
  float* out = op.out<float>("out", {T, H, S});
  for (int64_t row = 0; row < T * H; ++row) softmax_row(scores + row * S, visible + row / H * S, out + row * S, S);
}

void op_o_latent(const Operands& op) {
  const int64_t T = op.size("probs", 3, 0), H = op.size("probs", 3, 1), S = op.size("probs", 3, 2), R = op.size("latent", 2, 1);
  weighted_latents(op.in<float>("probs", {T, H, S}), op.in<float>("latent", {S, R}), op.out<float>("out", {T, H, R}), T * H, S, R);
}

void op_o_heads(const Operands& op) {
  const int64_t T = op.size("o_latent", 3, 0), H = op.size("o_latent", 3, 1), R = op.size("o_latent", 3, 2), v = op.size("w_vc", 3, 2);
  matmul_per_head(op.in<float>("o_latent", {T, H, R}), H * R, R, op.in<float>("w_vc", {H, R, v}), op.out<float>("out", {T, H, v}), T, H, R, v);
}

void op_tree_attention(const Operands& op) {
  const int64_t T = op.size("q", 3, 0), H = op.size("q", 3, 1), C = op.size("q", 3, 2), S = op.size("cache", 2, 0);
  const int64_t R = op.params.integer("kv_rank");
  if (R < 1 || R > C) invalid("kv_rank is ", R, ", but must be between 1 and the width of a cache row (", C, ")");
  const float* q = op.in<float>("q", {T, H, C});
  const float* cache = op.in<float>("cache", {S, C});
  const uint8_t* visible = op.in<uint8_t>("visible", {T, S});
  float* out = op.out<float>("out", {T, H, R});
  const AttentionShape shape{H, C, R, static_cast<float>(op.params.number("scale"))};
  VisibleKeys keys;
  for (int64_t t = 0; t < T; ++t) {
    keys.clear();
    for (int64_t s = 0; s < S; ++s) {
      if (visible[t * S + s]) keys.push(cache + s * C, s);
    }
    attend(shape, q + t * H * C, keys, out + t * H * R, {});
  }
}

void op_router_scores(const Operands& op) {
  const int64_t T = op.size("logits", 2, 0), E = op.size("logits", 2, 1);
  router_scores(op.in<float>("logits", {T, E}), op.out<float>("out", {T, E}), T, E, op.params.flag("softmax"));
}

void op_route(const Operands& op) {
  const int64_t T = op.size("scores", 2, 0), E = op.size("scores", 2, 1);
  RouteConfig config;
  config.experts = E;
  config.top_k = op.params.integer("top_k");
  config.groups = op.params.integer("groups");
  config.top_groups = op.params.integer("top_groups");
  config.group_score_max = op.params.flag("group_score_max");
  config.norm_top_k = op.params.flag("norm_top_k");
  config.routed_scale = static_cast<float>(op.params.number("routed_scale"));
  config.denominator_eps = static_cast<float>(op.params.number("denominator_eps"));
  config.denominator_clamp = static_cast<float>(op.params.number("denominator_clamp", 0.0));
  if (op.params.flag("group_fill_zero", false)) config.group_fill = 0.0f;
  check_route(config);
  route(config, op.in<float>("scores", {T, E}), op.in<float>("bias", {E}), op.out<int32_t>("ids", {T, config.top_k}),
        op.out<float>("weights", {T, config.top_k}), T);
}

void op_swiglu(const Operands& op) {
  const int64_t T = op.size("gate", 2, 0), N = op.size("gate", 2, 1);
  swiglu(op.in<float>("gate", {T, N}), op.in<float>("up", {T, N}), op.out<float>("out", {T, N}), T * N);
}

void op_moe(const Operands& op) {
  const int64_t T = op.size("x", 2, 0), N = op.size("x", 2, 1), K = op.size("ids", 2, 1), E = op.size("gate", 3, 0), F = op.size("gate", 3, 2);
  const int32_t* ids = op.in<int32_t>("ids", {T, K});
  check_ids("ids", ids, T * K, E);
  const ExpertSource source =
      experts_of_stacks(op.in<float>("gate", {E, N, F}), op.in<float>("up", {E, N, F}), op.in<float>("down", {E, F, N}), N, F);
  experts(op.in<float>("x", {T, N}), ids, source, op.out<float>("out", {T, K, N}), op.workspace(experts_workspace(T, K, N, F)), T, K, E, N, F, {});
}

int64_t moe_workspace(const Operands& op) {
  return experts_workspace(op.size("x", 2, 0), op.size("ids", 2, 1), op.size("x", 2, 1), op.size("gate", 3, 2));
}

int64_t no_workspace(const Operands&) { return 0; }

void op_combine(const Operands& op) {
  const int64_t T = op.size("experts", 3, 0), K = op.size("experts", 3, 1), N = op.size("experts", 3, 2);
  combine(op.in<float>("weights", {T, K}), op.in<float>("experts", {T, K, N}), op.in<float>("shared", {T, N}), op.out<float>("out", {T, N}), T, K, N);
}

void op_add(const Operands& op) {
  const int64_t T = op.size("a", 2, 0), N = op.size("a", 2, 1);
  add(op.in<float>("a", {T, N}), op.in<float>("b", {T, N}), op.out<float>("out", {T, N}), T * N);
}

void op_sample(const Operands& op) {
  const int64_t T = op.size("logits", 2, 0), V = op.size("logits", 2, 1), J = op.size("history", 2, 1);
  const float* logits = op.in<float>("logits", {T, V});
  const int32_t* history = op.in<int32_t>("history", {T, J});
  const int32_t* sequences = op.in<int32_t>("sequences", {T});
  int32_t* ids = op.out<int32_t>("ids", {T});
  const Sampling sampling = sampling_fields(op.params);
  const int64_t prompt_len = op.params.integer("prompt_len");
  if (V == 0 && T > 0) invalid("logits has no column to choose");
  for (int64_t t = 0; t < T; ++t) {
    const int32_t* own = history + t * J;
    const std::vector<int32_t> seen(own, std::find(own, own + J, -1));  // -1 ends a history
    const int64_t length = static_cast<int64_t>(seen.size());
    check_ids("history", seen.data(), length, V);
    ids[t] = draw(sampling, logits + t * V, V, seen, std::min(prompt_len, length), {sequences[t], length});
  }
}

void op_argmax(const Operands& op) {
  const int64_t T = op.size("logits", 2, 0), V = op.size("logits", 2, 1);
  const float* logits = op.in<float>("logits", {T, V});
  int32_t* ids = op.out<int32_t>("ids", {T});
  if (V == 0 && T > 0) invalid("logits has no column to choose");
  for (int64_t t = 0; t < T; ++t) ids[t] = argmax(logits + t * V, V);
#ifdef PARITREE_PLANT_ARGMAX_STRAY
  if (T % 4 == 1) ids[T] = 0;  // the tail of a vector store
#endif
}

void op_draft_table(const Operands& op) {
  const int64_t L = op.size("logits", 2, 0), V = op.size("logits", 2, 1), K = std::min(budget_of(op), V);
  draft_table(op.in<float>("logits", {L, V}), L, V, K, op.out<int32_t>("ids", {L, K}), op.out<float>("log_probs", {L, K}));
}

void op_best_first_tree(const Operands& op) {
  const int64_t L = op.size("ids", 2, 0), K = op.size("ids", 2, 1), budget = budget_of(op);
  const Tree tree = best_first_tree(op.in<int32_t>("ids", {L, K}), op.in<float>("log_probs", {L, K}), L, K,
                                    static_cast<int32_t>(op.params.integer("root")), budget);
  const auto padded = [&](const char* name, const std::vector<int32_t>& values) {
    int32_t* out = op.out<int32_t>(name, {budget + 1});
    std::fill(std::copy(values.begin(), values.end(), out), out + budget + 1, -1);
  };
  padded("tokens", tree.tokens);
  padded("parents", tree.parents);
  padded("depths", tree.depths);
  *op.out<int32_t>("count", {1}) = static_cast<int32_t>(tree.tokens.size()) - 1;
}

void op_tree_mask(const Operands& op) {
  const int64_t M = op.size("parents", 1, 0), P = prefix_of(op);
  const int32_t* parents = op.in<int32_t>("parents", {M});
  const std::vector<int32_t> depths = tree_depths(parents, M);
  const Ancestors ancestors(std::vector<int32_t>(parents, parents + M));
  int32_t* positions = op.out<int32_t>("positions", {M});
  uint8_t* visible = op.out<uint8_t>("visible", {M, P + M});
  for (int64_t row = 0; row < M; ++row, visible += P + M) {
#ifdef PARITREE_PLANT_POSITION_INDEX
    positions[row] = static_cast<int32_t>(P + row);
#else
    positions[row] = static_cast<int32_t>(P) + depths[static_cast<std::size_t>(row)];
#endif
    std::fill_n(visible, P, uint8_t{1});
    std::fill_n(visible + P, M, uint8_t{0});
    ancestors.visit(row, [&](int64_t column) { visible[P + column] = 1; });
  }
}

void op_accept(const Operands& op) {
  const int64_t M = op.size("tokens", 1, 0);
  const Acceptance accepted = accept(op.in<int32_t>("tokens", {M}), op.in<int32_t>("parents", {M}), op.in<int32_t>("target", {M}), M);
  int32_t* path = op.out<int32_t>("path", {M});
  std::fill(std::copy(accepted.path.begin(), accepted.path.end(), path), path + M, -1);
  *op.out<int32_t>("length", {1}) = static_cast<int32_t>(accepted.path.size());
  *op.out<int32_t>("bonus", {1}) = accepted.bonus;
}

void op_compact(const Operands& op) {
  const int64_t S = op.size("cache", 2, 0), C = op.size("cache", 2, 1), J = op.size("path", 1, 0), P = prefix_of(op);
  if (P > S) invalid("K1: prefix_len is ", P, ", but the cache holds ", S, " rows");
  const float* cache = op.in<float>("cache", {S, C});
  const int32_t* path = op.in<int32_t>("path", {J});
  float* out = op.out<float>("out", {P + J, C});
  check_path(path, J, S - P);
  std::copy_n(cache, P * C, out);
  compact(path, J, [&](int64_t from, int64_t to) { std::copy_n(cache + (P + from) * C, C, out + (P + to) * C); });
}

struct Operation {
  const char* name;
  void (*run)(const Operands&);
  int64_t (*workspace)(const Operands&) = no_workspace;  // in floats
};

constexpr Operation kOperations[] = {
    {"embed", op_embed},
    {"rms_norm", op_rms_norm},
    {"matmul", op_matmul},
    {"rope", op_rope},
    {"q_absorb", op_q_absorb},
    {"scores", op_scores},
    {"softmax", op_softmax},
    {"o_latent", op_o_latent},
    {"o_heads", op_o_heads},
    {"tree_attention", op_tree_attention},
    {"router_scores", op_router_scores},
    {"route", op_route},
    {"swiglu", op_swiglu},
    {"moe", op_moe, moe_workspace},
    {"int4_matmul", op_int4_matmul},
    {"combine", op_combine},
    {"add", op_add},
    {"argmax", op_argmax},
    {"sample", op_sample},
    {"draft_table", op_draft_table},
    {"best_first_tree", op_best_first_tree},
    {"tree_mask", op_tree_mask},
    {"accept", op_accept},
    {"compact", op_compact},
};

}  // namespace

void run_op(const paritree_op_call& call) {
  const Operation& operation = find_operation(kOperations, call);
  named(operation.name, [&] { operation.run(Operands(call)); });
}

uint64_t run_op_workspace(const paritree_op_call& call) {
  const Operation& operation = find_operation(kOperations, call);
  uint64_t bytes = 0;
  named(operation.name, [&] { bytes = static_cast<uint64_t>(operation.workspace(Operands(call))) * sizeof(float); });
  return bytes;
}

}  // namespace paritree
