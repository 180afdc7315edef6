// The C ABI of include/paritree.h over the engine: argument checks, exceptions to statuses, and the description.
#include <algorithm>
#include <new>
#include <string>

#include "common.hpp"
#include "generate.hpp"
#include "lanes.hpp"
#include "ops.hpp"
#include "params.hpp"
#include "session.hpp"
#include "tensors.hpp"
#include "tree.hpp"

struct paritree_session {
  paritree::Session session;
};

namespace paritree {
namespace {

constexpr int64_t kCacheSlots = 1 << 20;  // of one session unless the parameter cache_slots says otherwise; memory is taken as used

thread_local std::string last_error;

// Runs `body`, and turns what it throws into a status and last_error.
template <class Body>
paritree_status guarded(Body body) noexcept {
  try {
    body();
    return PARITREE_OK;
  } catch (const Error& error) {
    last_error = error.what();
    return error.status();
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
    return PARITREE_FAILED;
  } catch (const std::exception& error) {
    last_error = text("internal error: ", error.what());
    return PARITREE_FAILED;
  }
}

// A struct of the caller that is at least as large as ours.
template <class Struct>
const Struct& checked_struct(const Struct* value, const char* name) {
  if (value == nullptr) invalid(name, " is null");
  if (value->struct_size < sizeof(Struct)) {
    invalid(name, " has struct_size ", value->struct_size, ", but this engine (ABI ", PARITREE_ABI_VERSION, ") needs at least ", sizeof(Struct));
  }
  return *value;
}

Session& checked_session(paritree_session* session) {
  if (session == nullptr) invalid("session is null");
  return session->session;
}

void check_device(const DLDevice& device) {
  if (device.device_type != 1) unsupported("device type is ", device.device_type, ", but this engine runs on the CPU (1)");
}

template <class T>
std::vector<T> copied(const char* name, const T* values, int64_t count) {
  if (count < 0) invalid(name, " has count ", count, ", but counts are not negative");
  if (count > 0 && values == nullptr) invalid(name, " is null");
  return std::vector<T>(values, values + count);
}

void forward(Session& session, const paritree_forward_args& args) {
  BatchRows rows;
  rows.sequence = copied("sequence", args.sequence, args.row_count);
  rows.token = copied("token", args.token, args.row_count);
  rows.position = copied("position", args.position, args.row_count);
  rows.parent = copied("parent", args.parent, args.row_count);
  rows.want_logits = copied("want_logits", args.want_logits, args.row_count);
  int64_t wanted = 0;
  for (const uint8_t want : rows.want_logits) wanted += want != 0;
  float* logits = nullptr;
  if (wanted > 0) {
    if (args.logits == nullptr) invalid("logits is null, but ", wanted, " rows want logits");
    logits = checked_data<float>("logits", *args.logits, {wanted, session.config().vocab});
  }
  const float* hidden = args.hidden == nullptr ? nullptr : checked_data<float>("hidden", *args.hidden, {args.row_count, session.config().hidden});
  session.forward(rows, logits, TapSink(args.taps, args.tap, args.tap_user), args.first_layer, hidden);
}

void cache_rows(Session& session, int32_t sequence, int64_t layer, DLTensor* rows, int64_t* row_count) {
  const ModelConfig& config = session.config();
  if (row_count == nullptr) invalid("row_count is null");
  if (layer < 0 || layer >= config.layers) invalid("layer is ", layer, ", but must be between 0 and ", config.layers - 1);
  if (!session.cache().contains(sequence)) invalid("sequence ", sequence, " is unknown: a sequence exists from its first row on");
  *row_count = session.cache().committed(sequence);
  if (rows == nullptr) return;
  float* out = checked_data<float>("rows", *rows, {*row_count, config.cache_dim()});
  for (int64_t i = 0; i < *row_count; ++i, out += config.cache_dim()) std::copy_n(session.cache().row(layer, sequence, i), config.cache_dim(), out);
}

void generate(Session& session, const paritree_generate_args& args) {
  GenerateRequest request;
  if (args.prompt_count < 0 || (args.prompt_count > 0 && (args.prompts == nullptr || args.prompt_lengths == nullptr))) {
    invalid("prompt_count is ", args.prompt_count, ", but prompts or prompt_lengths is null");
  }
  for (int64_t i = 0; i < args.prompt_count; ++i) request.prompts.push_back(copied("prompt", args.prompts[i], args.prompt_lengths[i]));
  if (args.max_new < 0) invalid("max_new is ", args.max_new, ", but must not be negative");
  request.max_new = args.max_new;
  request.stop_tokens = copied("stop_tokens", args.stop_tokens, args.stop_count);
  if (args.draft != nullptr) {
    if (args.block_len < 0) invalid("block_len is ", args.block_len, ", but must not be negative");
    if (args.budget < 0 || args.budget > kBudgetMax) invalid("T5: budget is ", args.budget, ", but must be between 0 and ", kBudgetMax, " (the root is not counted)");
    request.block_len = args.block_len;
    request.budget = args.budget;
    request.draft = [&args](int32_t number, const std::vector<int32_t>& history, float* logits) {
      const paritree_status status = args.draft(args.draft_user, number, history.data(), static_cast<int64_t>(history.size()), logits);
      if (status != PARITREE_OK) failed("the draft callback answered ", status, " for prompt ", number);
    };
  }
  if (args.emit == nullptr) invalid("emit is null");
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

const char* paritree_last_error(void) { return last_error.c_str(); }

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
    if (bytes == nullptr) invalid("bytes is null");
    *bytes = run_op_workspace(*call);
  });
}

paritree_status paritree_open(const paritree_open_args* args, paritree_session** session) {
  return guarded([&] {
    checked_struct(args, "args");
    if (session == nullptr) invalid("session is null");
    check_device(args->device);
    if (args->weight == nullptr) unsupported("this engine does not load weights_path: give a weight callback");
    const Params params(args->config);
    const ModelConfig config = read_config(params);
    const int64_t cache_slots = params.integer("cache_slots", kCacheSlots);
    if (cache_slots < 1) invalid("cache_slots is ", cache_slots, ", but must be at least 1");
    *session = new paritree_session{Session(config, load_weights(config, args->weight, args->weight_user), cache_slots)};
  });
}

void paritree_close(paritree_session* session) { delete session; }

paritree_status paritree_forward(paritree_session* session, const paritree_forward_args* args) {
  return guarded([&] { forward(checked_session(session), checked_struct(args, "args")); });
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
    if (slots == nullptr) invalid("slots is null");
    *slots = checked_session(session).cache().free_rows();
  });
}

paritree_status paritree_generate(paritree_session* session, const paritree_generate_args* args) {
  return guarded([&] { generate(checked_session(session), checked_struct(args, "args")); });
}
