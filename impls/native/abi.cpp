// The C ABI of include/paritree.h over the engine, and its description; what it refuses: arguments.hpp.
#include <algorithm>

#include "arguments.hpp"
#include "generate.hpp"
#include "lanes.hpp"
#include "ops.hpp"

struct paritree_session {
  paritree::Session session;
};

namespace paritree {
namespace {

constexpr int64_t kCacheSlots = 1 << 20;  // of one session unless the parameter cache_slots says otherwise; memory is taken as used

Session& checked_session(paritree_session* session) { return checked_pointer(session, "session").session; }

void forward(Session& session, const paritree_forward_args* args) {
  const ForwardRequest request = read_forward(args, session.config());
  session.forward(request.rows, request.logits, TapSink(args->taps, args->tap, args->tap_user), args->first_layer, request.hidden);
}

void cache_rows(Session& session, int32_t sequence, int64_t layer, const DLTensor* rows, int64_t* row_count) {
  Cache& cache = session.cache();
  const int64_t width = session.config().cache_dim();
  float* out = read_cache_rows(session.config(), sequence, cache.contains(sequence), layer, rows, row_count, [&](int32_t of) { return cache.committed(of); });
  if (out == nullptr) return;
  for (int64_t i = 0; i < *row_count; ++i, out += width) std::copy_n(cache.row(layer, sequence, i), width, out);
}

void generate(Session& session, const paritree_generate_args& args) {
  GenerateRequest request;
  for (int64_t i = 0; i < args.prompt_count; ++i) request.prompts.push_back(copied("prompt", args.prompts[i], args.prompt_lengths[i]));
  request.max_new = args.max_new;
  request.stop_tokens = copied("stop_tokens", args.stop_tokens, args.stop_count);
  if (args.draft != nullptr) {
    request.block_len = args.block_len;
    request.budget = args.budget;
    request.draft = [&args](int32_t number, const std::vector<int32_t>& history, float* logits) {
      const paritree_status status = args.draft(args.draft_user, number, history.data(), static_cast<int64_t>(history.size()), logits);
      if (status != PARITREE_OK) failed("the draft callback answered ", status, " for prompt ", number);
    };
  }
  request.emit = [&args](const paritree_emission& emission) {
    const paritree_status status = args.emit(args.emit_user, &emission);
    if (status != PARITREE_OK) failed("the emit callback answered ", status, " for prompt ", emission.sequence);
  };
  if (args.sampling.count != 0) request.sampling = read_sampling(args.sampling, session.config().vocab);
  generate(session, request);
}

paritree_param profile_int(const char* key, int64_t value) {
  paritree_param param{};
  param.key = key;
  param.value.i = value;
  return param;
}

paritree_param profile_double(const char* key, double value) {
  paritree_param param{};
  param.key = key;
  param.kind = 1;
  param.value.d = value;
  return param;
}

}  // namespace
}  // namespace paritree

using namespace paritree;

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

const char* paritree_last_error(void) { return last_error().c_str(); }

paritree_status paritree_describe(paritree_description* description) {
  return guarded([&] {
    checked_struct(description, "description");
    // libm's exp and log are within 1 ulp; 1 / sqrt is two correctly rounded operations; sums: lanes.hpp
    static const paritree_param profile[] = {
        profile_double("exp_ulp", 1.0),    profile_double("log_ulp", 1.0),       profile_double("rsqrt_ulp", 1.5),
        profile_int("height_block", kRun), profile_int("online_softmax", 1),     profile_int("exp2_folding", 0),
        profile_int("flush_to_zero", 0),   profile_int("batch_invariant", 1),
    };
    description->name = "native";
    description->version = "0.1.0";
    description->profile_name = "float32-any-order";
    description->profile = {profile, sizeof profile / sizeof profile[0]};
    description->capabilities = "run_op,forward,taps,commit,cache_rows,fork,evict,free_slots,generate,generate_tree,sampling";
    description->ops = PARITREE_OP_NAMES;
    description->taps = PARITREE_TAP_NAMES;
  });
}

paritree_status paritree_run_op(const paritree_op_call* call) {
  return guarded([&] {
    check_device(checked_struct(call, "call").device);
    run_op(*call);
  });
}

paritree_status paritree_run_op_workspace(const paritree_op_call* call, uint64_t* bytes) {
  return guarded([&] {
    checked_struct(call, "call");
    checked_pointer(bytes, "bytes") = run_op_workspace(*call);
  });
}

paritree_status paritree_open(const paritree_open_args* args, paritree_session** session) {
  return guarded([&] {
    const OpenRequest request = read_open(args, session, kCacheSlots);
    *session = new paritree_session{Session(request.config, load_weights(request.config, args->weight, args->weight_user), request.cache_slots)};
  });
}

void paritree_close(paritree_session* session) { delete session; }

paritree_status paritree_forward(paritree_session* session, const paritree_forward_args* args) {
  return guarded([&] { forward(checked_session(session), args); });
}

paritree_status paritree_commit(paritree_session* session, int32_t sequence, const int32_t* path, int64_t path_count) {
  return guarded([&] {
    const std::vector<int32_t> kept = copied("path", path, path_count);
    checked_session(session).cache().commit(sequence, kept.data(), path_count);
  });
}

paritree_status paritree_cache_rows(paritree_session* session, int32_t sequence, int64_t layer, DLTensor* rows, int64_t* row_count) {
  return guarded([&] { cache_rows(checked_session(session), sequence, layer, rows, row_count); });
}

paritree_status paritree_evict(paritree_session* session, int32_t sequence) {
  return guarded([&] { checked_session(session).cache().evict(sequence); });
}

paritree_status paritree_fork(paritree_session* session, int32_t source, int32_t target) {
  return guarded([&] { checked_session(session).cache().fork(source, target); });
}

paritree_status paritree_free_slots(paritree_session* session, int64_t* slots) {
  return guarded([&] {
    checked_pointer(slots, "slots") = checked_session(session).cache().free_rows();
  });
}

paritree_status paritree_generate(paritree_session* session, const paritree_generate_args* args) {
  return guarded([&] {
    Session& own = checked_session(session);
    generate(own, checked_generate(args));
  });
}
