// run_op: the operations of spec/ops by the kernels that a session launches, and by the unfused ones that only taps and trials ask for. Names, shapes
// and ids are checked as in the CPU engine (../../native/operands.hpp) before anything is launched: an id is an address here.
#include "operations.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "../../native/moe.hpp"
#include "../../native/operands.hpp"
#include "session.hpp"

namespace paritree::cuda {
namespace {

constexpr int64_t kGuardBytes = 256;
constexpr uint8_t kPoison = 0xff;  // float32 NaN, int32 -1

// What a kernel found wrong with its inputs (common.cuh): or-ed bits of the status word.
struct Complaint {
  int32_t bit;
  const char* words;
};
constexpr Complaint kComplaints[] = {
    {1, "T8: a logit or log-probability is NaN or +inf"},
    {2, "T4: log-probabilities ascend along a row"},
    {4, "T2: a path score has more than 106 bits, and these kernels do not guess"},
    {8, "T6: parents must ascend from one root at index 0"},
    {16, "T6: a token occurs twice under one parent"},
    {32, "S1: a row of logits is no distribution: NaN, +inf, or nothing finite after penalties and temperature"},
    {64, "S3: two numbers agree to about 85 bits, and these kernels do not guess"},
};
constexpr int32_t kGivenUp = 4 | 64;  // not the caller's mistake, but the end of what these kernels do

// The device of run_op and its buffers, which only grow: one of a process and precision, made at the first call and kept to its end.
class Bench {
 public:
  explicit Bench(Precision precision) : device(precision) {}

  Device device;
  std::vector<Memory<char>> buffers;

  char* buffer(std::size_t number, int64_t bytes) {
    if (number == buffers.size()) buffers.emplace_back(device, bytes);
    if (buffers[number].count() < bytes) buffers[number] = Memory<char>(device, std::max(bytes, 2 * buffers[number].count()));
    return buffers[number].data();
  }
};

// The operands of one call on the device, in the order in which the operation names them.
class Call : public Operands {
 public:
  Call(const paritree_op_call& call, Bench& bench, Precision precision) : Operands(call), device(bench.device), narrow(precision == Precision::bf16), bench_(bench) {}

  Device& device;
  const bool narrow;  // tree attention on bfloat16 operands

  template <class T>
  const T* on(const T* host, int64_t count) {
    T* target = scratch<T>(count);
    device.copy_in(target, host, count * static_cast<int64_t>(sizeof(T)));
    return target;
  }
  template <class T>
  const T* on(const char* name, std::initializer_list<int64_t> shape) {
    return on(in<T>(name, shape), count_of(shape));
  }
  template <class T>
  T* result(const char* name, std::initializer_list<int64_t> shape) {
    T* host = out<T>(name, shape);
    T* target = scratch<T>(count_of(shape));
    results_.push_back({host, target, count_of(shape) * static_cast<int64_t>(sizeof(T))});
    return target;
  }
  // Poisoned, and guarded behind the end.
  template <class T>
  T* scratch(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    char* memory = bench_.buffer(guarded_.size(), bytes + kGuardBytes);
    device.fill(memory, kPoison, bytes + kGuardBytes);
    guarded_.push_back(memory + bytes);
    return reinterpret_cast<T*>(memory);
  }
  int32_t* status() {
    if (status_ == nullptr) {
      status_ = scratch<int32_t>(1);
      device.fill(status_, 0, 4);
    }
    return status_;
  }

  // Waits; hands the outputs over unless a kernel complained or wrote past a buffer.
  void finish() {
    if (status_ != nullptr) {
      int32_t found = 0;
      device.copy_out(&found, status_, 4);
      if (found != 0) complain(found);
    }
    for (const Result& result : results_) device.copy_out(result.host, result.device, result.bytes);
    uint8_t guard[kGuardBytes];
    for (const char* memory : guarded_) {
      device.copy_out(guard, memory, kGuardBytes);
      if (std::any_of(guard, guard + kGuardBytes, [](uint8_t byte) { return byte != kPoison; })) failed("a kernel wrote behind the end of one of its buffers");
    }
    device.synchronise();
  }

 private:
  struct Result {
    void* host;
    const void* device;
    int64_t bytes;
  };

  static int64_t count_of(std::initializer_list<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
  [[noreturn]] static void complain(int32_t found) {
    std::string words;
    for (const Complaint& complaint : kComplaints)
      if (found & complaint.bit) words += (words.empty() ? "" : "; ") + std::string(complaint.words);
    if ((found & ~kGivenUp) == 0) unsupported(words);
    invalid(words);
  }

  Bench& bench_;
  std::vector<const char*> guarded_;
  std::vector<Result> results_;
  int32_t* status_ = nullptr;
};

void op_embed(Call& op) {
  const int64_t V = op.size("table", 2, 0), N = op.size("table", 2, 1), T = op.size("ids", 1, 0);
  check_ids("ids", op.in<int32_t>("ids", {T}), T, V);
  op.device.gather(op.on<float>("table", {V, N}), op.on<int32_t>("ids", {T}), op.result<float>("out", {T, N}), T, N);
}

void op_rms_norm(Call& op) {
  const int64_t T = op.size("x", 2, 0), N = op.size("x", 2, 1);
  op.device.rms_norm(op.on<float>("x", {T, N}), N, op.on<float>("gain", {N}), static_cast<float>(op.params.number("eps")), op.result<float>("out", {T, N}), N, T, N);
}

void op_matmul(Call& op) {
  const int64_t T = op.size("x", 2, 0), K = op.size("x", 2, 1), N = op.size("w", 2, 1);
  op.device.gemm({op.on<float>("x", {T, K}), K, 0, op.on<float>("w", {K, N}), N, 0, op.result<float>("out", {T, N}), N, 0, T, N, K, 1, false});
}

void op_int4_matmul(Call& op) {
  const int64_t T = op.size("x", 2, 0), K = op.size("x", 2, 1), G = op.size("scales", 2, 0), N = op.size("scales", 2, 1);
  if (K != G * 32) invalid("x has ", K, " columns, but ", G, " groups of 32 need ", G * 32);
  op.device.matmul_int4(op.on<float>("x", {T, K}), op.on<int32_t>("packed", {G * 4, N}), op.on<float>("scales", {G, N}), op.result<float>("out", {T, N}), T, N, K);
}

void op_rope(Call& op) {
  const int64_t T = op.size("x", 3, 0), H = op.size("x", 3, 1), D = op.size("x", 3, 2);
  if (D % 2 != 0) invalid("x has ", D, " elements to rotate, but pairs are rotated: give an even number");
  op.device.rope(op.on<float>("x", {T, H, D}), H * D, D, op.on<float>("cos", {T, D / 2}), op.on<float>("sin", {T, D / 2}), op.result<float>("out", {T, H, D}),
                 H * D, D, T, H, D, op.params.flag("half_layout"));
}

// out[t, h] = x[t, h] @ w[h]
void per_head(Call& op, const char* x, const char* w) {
  const int64_t T = op.size(x, 3, 0), H = op.size(x, 3, 1), K = op.size(x, 3, 2), N = op.size(w, 3, 2);
  op.device.gemm({op.on<float>(x, {T, H, K}), H * K, K, op.on<float>(w, {H, K, N}), N, K * N, op.result<float>("out", {T, H, N}), H * N, N, T, N, K, H, false});
}
void op_q_absorb(Call& op) { per_head(op, "q_nope", "w_kc"); }
void op_o_heads(Call& op) { per_head(op, "o_latent", "w_vc"); }

void op_scores(Call& op) {
  const int64_t T = op.size("q", 3, 0), H = op.size("q", 3, 1), C = op.size("q", 3, 2), S = op.size("keys", 2, 0);
  op.device.scores(op.on<float>("q", {T, H, C}), op.on<float>("keys", {S, C}), op.result<float>("out", {T, H, S}), T * H, C, S,
                   static_cast<float>(op.params.number("scale")));
}

void op_softmax(Call& op) {
  const int64_t T = op.size("scores", 3, 0), H = op.size("scores", 3, 1), S = op.size("scores", 3, 2);
  op.device.softmax(op.on<float>("scores", {T, H, S}), op.on<uint8_t>("visible", {T, S}), op.result<float>("out", {T, H, S}), T, H, S);
}

void op_o_latent(Call& op) {
  const int64_t T = op.size("probs", 3, 0), H = op.size("probs", 3, 1), S = op.size("probs", 3, 2), R = op.size("latent", 2, 1);
  op.device.o_latent(op.on<float>("probs", {T, H, S}), op.on<float>("latent", {S, R}), op.result<float>("out", {T, H, R}), T * H, S, R);
}

void op_tree_attention(Call& op) {
  const int64_t T = op.size("q", 3, 0), H = op.size("q", 3, 1), C = op.size("q", 3, 2), S = op.size("cache", 2, 0), words = (S + 31) / 32;
  const int64_t R = op.params.integer("kv_rank");
  if (R < 1 || R > C) invalid("kv_rank is ", R, ", but must be between 1 and the width of a cache row (", C, ")");
  const float scale = static_cast<float>(op.params.number("scale"));
  const float* q = op.on<float>("q", {T, H, C});
  const float* cache = op.on<float>("cache", {S, C});
  const uint8_t* visible = op.on<uint8_t>("visible", {T, S});
  float* out = op.result<float>("out", {T, H, R});
  // any visibility: no prefix, one bit for each key
  uint32_t* bits = op.scratch<uint32_t>(T * words);
  uint32_t* seen = op.scratch<uint32_t>(words);
  op.device.pack_mask(visible, bits, seen, T, S);
  float* work = op.scratch<float>(op.narrow ? op.device.narrow_attention_workspace(T, H, R, C, S) : op.device.attention_workspace(T, H, R, C, S));
  if (op.narrow) {
    uint16_t* narrow_q = op.scratch<uint16_t>(T * H * C);
    uint16_t* narrow_cache = op.scratch<uint16_t>(S * C);
    op.device.cast_rows(q, C, narrow_q, C, T * H, C);
    op.device.cast_rows(cache, C, narrow_cache, C, S, C);
    op.device.tree_attention({narrow_q, narrow_cache, {}, bits, words, T, H, R, C, 0, S, nullptr, scale, out, seen}, work);
  } else {
    op.device.tree_attention({q, cache, {}, bits, words, T, H, R, C, 0, S, nullptr, scale, out, seen}, work);
  }
}

void op_router_scores(Call& op) {
  const int64_t T = op.size("logits", 2, 0), E = op.size("logits", 2, 1);
  op.device.router_scores(op.on<float>("logits", {T, E}), op.result<float>("out", {T, E}), T, E, op.params.flag("softmax"));
}

void op_route(Call& op) {
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
  op.device.route(op.on<float>("scores", {T, E}), op.on<float>("bias", {E}), op.result<int32_t>("ids", {T, config.top_k}),
                  op.result<float>("weights", {T, config.top_k}), T,
                  {E, config.top_k, config.groups, config.top_groups, config.group_score_max, config.norm_top_k, config.routed_scale, config.denominator_eps,
                   config.group_fill == 0.0f, config.denominator_clamp});
}

void op_swiglu(Call& op) {
  const int64_t T = op.size("gate", 2, 0), N = op.size("gate", 2, 1);
  op.device.swiglu(op.on<float>("gate", {T, N}), op.on<float>("up", {T, N}), op.result<float>("out", {T, N}), T * N);
}

void op_moe(Call& op) {
  const int64_t T = op.size("x", 2, 0), N = op.size("x", 2, 1), K = op.size("ids", 2, 1), E = op.size("gate", 3, 0), F = op.size("gate", 3, 2), pairs = T * K;
  check_ids("ids", op.in<int32_t>("ids", {T, K}), pairs, E);
  const float* x = op.on<float>("x", {T, N});
  const int32_t* ids = op.on<int32_t>("ids", {T, K});
  int32_t* starts = op.scratch<int32_t>(E + 1);
  int32_t* order = op.scratch<int32_t>(pairs);
  float *gate = op.scratch<float>(pairs * F), *up = op.scratch<float>(pairs * F), *act = op.scratch<float>(pairs * F);
  op.device.moe_group(ids, starts, order, pairs, E);
  op.device.matmul_grouped(x, K, op.on<float>("gate", {E, N, F}), op.on<float>("up", {E, N, F}), starts, order, gate, up, pairs, E, F, N);
  op.device.swiglu(gate, up, act, pairs * F);
  op.device.matmul_grouped(act, 1, op.on<float>("down", {E, F, N}), nullptr, starts, order, op.result<float>("out", {T, K, N}), nullptr, pairs, E, N, F);
}

void op_combine(Call& op) {
  const int64_t T = op.size("experts", 3, 0), K = op.size("experts", 3, 1), N = op.size("experts", 3, 2);
  op.device.combine(op.on<float>("weights", {T, K}), op.on<float>("experts", {T, K, N}), op.on<float>("shared", {T, N}), op.result<float>("out", {T, N}), T, K, N);
}

void op_add(Call& op) {
  const int64_t T = op.size("a", 2, 0), N = op.size("a", 2, 1);
  op.device.add(op.on<float>("a", {T, N}), op.on<float>("b", {T, N}), op.result<float>("out", {T, N}), T * N);
}

void op_argmax(Call& op) {
  const int64_t T = op.size("logits", 2, 0), V = op.size("logits", 2, 1);
  if (V == 0 && T > 0) invalid("logits has no column to choose");
  op.device.argmax(op.on<float>("logits", {T, V}), op.result<int32_t>("ids", {T}), op.scratch<uint64_t>(T * 64), T, V);
}

void op_sample(Call& op) {
  const int64_t T = op.size("logits", 2, 0), V = op.size("logits", 2, 1), J = op.size("history", 2, 1);
  const float* logits = op.on<float>("logits", {T, V});
  const int32_t* history = op.in<int32_t>("history", {T, J});
  const int32_t* sequences = op.in<int32_t>("sequences", {T});
  const Sampling sampling = sampling_fields(op.params);
  const int64_t prompt_len = op.params.integer("prompt_len");
  if (V == 0 && T > 0) invalid("logits has no column to choose");
  std::vector<int32_t> streams;
  for (int64_t t = 0; t < T; ++t) {
    const int32_t* own = history + t * J;
    const int64_t length = std::find(own, own + J, -1) - own;  // -1 ends a history
    check_ids("history", own, length, V);
    for (const int64_t word : {t * J, length, std::min(prompt_len, length), static_cast<int64_t>(sequences[t])}) streams.push_back(static_cast<int32_t>(word));
  }
  const DrawRule rule = draw_rule(sampling);
  const Draws draws = {op.on(&rule, 1), nullptr, nullptr, op.on(history, T * J), op.on(streams.data(), T * 4)};
  op.device.sample(logits, draws, {nullptr, nullptr, nullptr, 1, 1}, op.result<int32_t>("ids", {T}), op.status(),
                   op.scratch<char>(Device::sample_workspace(T, V)), T, V);
}

void op_draft_table(Call& op) {
  const int64_t L = op.size("logits", 2, 0), V = op.size("logits", 2, 1), K = std::min(budget_of(op), V);
  op.device.draft_table(op.on<float>("logits", {L, V}), op.result<int32_t>("ids", {L, K}), op.result<float>("log_probs", {L, K}), op.status(),
                        op.scratch<uint32_t>(L * kDraftCounters), op.scratch<float>(L * ((V + 4095) / 4096) * 2), op.scratch<uint64_t>(L * V), L, V, K);
}

void op_best_first_tree(Call& op) {
  const int64_t L = op.size("ids", 2, 0), K = op.size("ids", 2, 1), budget = budget_of(op);
  const int32_t root = static_cast<int32_t>(op.params.integer("root"));
  op.device.best_first_tree(op.on<int32_t>("ids", {L, K}), op.on<float>("log_probs", {L, K}), L, K, budget, op.on(&root, 1),
                            op.result<int32_t>("tokens", {budget + 1}), op.result<int32_t>("parents", {budget + 1}), op.result<int32_t>("depths", {budget + 1}),
                            op.result<int32_t>("count", {1}), op.status());
}

void op_tree_mask(Call& op) {
  const int64_t M = op.size("parents", 1, 0), P = prefix_of(op);
  op.device.tree_mask_bytes(op.on<int32_t>("parents", {M}), M, P, op.result<int32_t>("positions", {M}), op.scratch<uint32_t>(M * ((M + 31) / 32)),
                            op.result<uint8_t>("visible", {M, P + M}), op.status());
}

void op_accept(Call& op) {
  const int64_t M = op.size("tokens", 1, 0);
  op.device.accept_checked(op.on<int32_t>("tokens", {M}), op.on<int32_t>("parents", {M}), op.on<int32_t>("target", {M}), M, op.result<int32_t>("path", {M}),
                           op.result<int32_t>("length", {1}), op.result<int32_t>("bonus", {1}), op.status());
}

// In place on a copy of the cache as one layer, as a session does it.
void op_compact(Call& op) {
  const int64_t S = op.size("cache", 2, 0), C = op.size("cache", 2, 1), J = op.size("path", 1, 0), P = prefix_of(op);
  if (P > S) invalid("K1: prefix_len is ", P, ", but the cache holds ", S, " rows");
  const int32_t* path = op.in<int32_t>("path", {J});
  check_path(path, J, S - P);
  float* store = op.scratch<float>(S * C);
  float* out = op.result<float>("out", {P + J, C});
  const int32_t kept = static_cast<int32_t>(J);
  op.device.copy_in(store, op.in<float>("cache", {S, C}), S * C * 4);
  if (J > 0 && C > 0) op.device.compact(store, S * C, {}, op.on(path, J), op.on(&kept, 1), P, nullptr, C, 1);
  op.device.copy_rows(out, store, (P + J) * C * 4, (P + J) * C * 4, (P + J) * C == 0 ? 0 : 1);
}

struct Operation {
  const char* name;
  void (*run)(Call&);
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
    {"moe", op_moe},
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

void check_op(const paritree_op_call& call) { find_operation(kOperations, call); }

void run_op(const paritree_op_call& call, Precision precision) {
  const Operation& operation = find_operation(kOperations, call);
  static std::mutex one_at_a_time;
  static Bench* benches[3] = {};  // one a precision, never destroyed: at the end of a process the CUDA runtime may be gone before it
  Bench*& bench = benches[static_cast<int>(precision)];
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  named(operation.name, [&] {
    if (bench == nullptr) bench = new Bench(precision);
    Call operands(call, *bench, precision);
    operation.run(operands);
    operands.finish();
  });
}

}  // namespace paritree::cuda
