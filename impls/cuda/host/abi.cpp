// The C ABI of impls/native/include/paritree.h over the CUDA engine: argument checks, exceptions to statuses, the description.
// Tensors of the caller are on the host; the precision of matrix products comes from PARITREE_CUDA_PRECISION (float32, tf32, bf16).
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "../../native/params.hpp"
#include "../../native/pointwise.hpp"
#include "../../native/tensors.hpp"
#include "../../native/tree.hpp"
#include "session.hpp"

struct paritree_session {
  paritree::cuda::DeviceSession session;
};

namespace paritree::cuda {
namespace {

constexpr int64_t kCacheSlots = 1 << 14;

thread_local std::string last_error;

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

template <class Struct>
const Struct& checked_struct(const Struct* value, const char* name) {
  if (value == nullptr) invalid(name, " is null");
  if (value->struct_size < sizeof(Struct)) {
    invalid(name, " has struct_size ", value->struct_size, ", but this engine (ABI ", PARITREE_ABI_VERSION, ") needs at least ", sizeof(Struct));
  }
  return *value;
}

DeviceSession& checked(paritree_session* session) {
  if (session == nullptr) invalid("session is null");
  return session->session;
}

template <class T>
std::vector<T> copied(const char* name, const T* values, int64_t count) {
  if (count < 0) invalid(name, " has count ", count, ", but counts are not negative");
  if (count > 0 && values == nullptr) invalid(name, " is null");
  return std::vector<T>(values, values + count);
}

Precision precision() {
  const char* word = std::getenv("PARITREE_CUDA_PRECISION");
  if (word == nullptr || *word == '\0' || std::strcmp(word, "float32") == 0) return Precision::float32;
  if (std::strcmp(word, "tf32") == 0) return Precision::tf32;
  if (std::strcmp(word, "bf16") == 0) return Precision::bf16;
  invalid("PARITREE_CUDA_PRECISION is ", word, ", but must be float32, tf32 or bf16");
}

paritree_param number(const char* key, double value) {
  paritree_param param{};
  param.key = key;
  param.kind = 1;
  param.value.d = value;
  return param;
}

void forward(DeviceSession& session, const paritree_forward_args& args) {
  if (args.first_layer != 0 || args.hidden != nullptr) unsupported("this engine does not take a residual stream");
  BatchRows rows;
  rows.sequence = copied("sequence", args.sequence, args.row_count);
  rows.token = copied("token", args.token, args.row_count);
  rows.position = copied("position", args.position, args.row_count);
  rows.parent = copied("parent", args.parent, args.row_count);
  rows.want_logits = copied("want_logits", args.want_logits, args.row_count);
  const int64_t wanted = std::count_if(rows.want_logits.begin(), rows.want_logits.end(), [](uint8_t want) { return want != 0; });
  float* logits = nullptr;
  if (wanted > 0) {
    if (args.logits == nullptr) invalid("logits is null, but ", wanted, " rows want logits");
    logits = checked_data<float>("logits", *args.logits, {wanted, session.config().vocab});
  }
  session.forward(rows, logits, TapSink(args.taps, args.tap, args.tap_user));
}

}  // namespace
}  // namespace paritree::cuda

using namespace paritree;
using namespace paritree::cuda;

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

const char* paritree_last_error(void) { return last_error.c_str(); }

paritree_status paritree_describe(paritree_description* description) {
  return guarded([&] {
    checked_struct(description, "description");
    // expf, exp2f and rsqrtf within 2 ulp, logf within 1 (CUDA C++ Programming Guide); TF32 drops 13 bits of an operand, bfloat16 rounds to 8;
    // tensor cores add without rounding each sum to nearest
    static const paritree_param exact[] = {number("exp_ulp", 2.0), number("log_ulp", 1.0), number("rsqrt_ulp", 2.0)};
    static const paritree_param tf32[] = {number("u_input", 0x1p-10), number("u_accumulate", 0x1p-22)};
    static const paritree_param bf16[] = {number("u_input", 0x1p-8), number("u_accumulate", 0x1p-22)};
    const Precision chosen = precision();
    description->name = "cuda-native";
    description->version = "0.1.0";
    description->profile_name = chosen == Precision::float32 ? "cuda-float32" : chosen == Precision::tf32 ? "cuda-tf32" : "cuda-bf16";
    description->profile = chosen == Precision::float32 ? paritree_params{exact, 3} : chosen == Precision::tf32 ? paritree_params{tf32, 2} : paritree_params{bf16, 2};
    description->capabilities = "forward,taps,commit,cache_rows,fork,evict,free_slots,generate,generate_tree";
    description->ops = "";
    // scores and probabilities never leave the attention kernel
    static const std::string taps = [] {
      std::string names = PARITREE_TAP_NAMES;
      for (const char* hidden : {"scores,", "probs,"}) {
        const std::size_t at = names.find(std::string(",") + hidden);
        if (at != std::string::npos) names.erase(at + 1, std::strlen(hidden));
      }
      return names;
    }();
    description->taps = taps.c_str();
  });
}

paritree_status paritree_open(const paritree_open_args* args, paritree_session** session) {
  return guarded([&] {
    checked_struct(args, "args");
    if (session == nullptr) invalid("session is null");
    if (args->weight == nullptr) unsupported("this engine does not load weights_path: give a weight callback");
    const Params params(args->config);
    const ModelConfig config = read_config(params);
    // switches of the model that these kernels do not have
    if (config.window > 0) unsupported("window is ", config.window, ", but this engine sees every key of the prefix");
    if (config.attention_bias) unsupported("attention_bias is set, but this engine has no biases");
    if (config.rope_table_len > 0) unsupported("rope_table_len is ", config.rope_table_len, ", but this engine computes its tables");
    if (config.to_cache != round_nothing) unsupported("cache_format is not float32, but this engine has no other");
    const int64_t cache_slots = params.integer("cache_slots", kCacheSlots);
    if (cache_slots < 1) invalid("cache_slots is ", cache_slots, ", but must be at least 1");
    *session = new paritree_session{{config, args->weight, args->weight_user, cache_slots, precision()}};
  });
}

void paritree_close(paritree_session* session) { delete session; }

paritree_status paritree_forward(paritree_session* session, const paritree_forward_args* args) {
  return guarded([&] { forward(checked(session), checked_struct(args, "args")); });
}

paritree_status paritree_commit(paritree_session* session, int32_t sequence, const int32_t* path, int64_t path_count) {
  return guarded([&] {
    const std::vector<int32_t> kept = copied("path", path, path_count);
    checked(session).commit(sequence, kept.data(), path_count);
  });
}

paritree_status paritree_cache_rows(paritree_session* session, int32_t sequence, int64_t layer, DLTensor* rows, int64_t* row_count) {
  return guarded([&] {
    DeviceSession& own = checked(session);
    if (row_count == nullptr) invalid("row_count is null");
    if (layer < 0 || layer >= own.config().layers) invalid("layer is ", layer, ", but must be between 0 and ", own.config().layers - 1);
    if (!own.contains(sequence)) invalid("sequence ", sequence, " is unknown: a sequence exists from its first row on");
    *row_count = own.committed(sequence);
    if (rows == nullptr) return;
    own.cache_rows(sequence, layer, checked_data<float>("rows", *rows, {*row_count, own.config().cache_dim()}));
  });
}

paritree_status paritree_evict(paritree_session* session, int32_t sequence) {
  return guarded([&] { checked(session).evict(sequence); });
}

paritree_status paritree_fork(paritree_session* session, int32_t source, int32_t target) {
  return guarded([&] { checked(session).fork(source, target); });
}

paritree_status paritree_free_slots(paritree_session* session, int64_t* slots) {
  return guarded([&] {
    if (slots == nullptr) invalid("slots is null");
    *slots = checked(session).free_rows();
  });
}

paritree_status paritree_generate(paritree_session* session, const paritree_generate_args* args) {
  return guarded([&] {
    DeviceSession& own = checked(session);
    checked_struct(args, "args");
    if (args->prompt_count < 0 || (args->prompt_count > 0 && (args->prompts == nullptr || args->prompt_lengths == nullptr)))
      invalid("prompt_count is ", args->prompt_count, ", but prompts or prompt_lengths is null");
    if (args->max_new < 0) invalid("max_new is ", args->max_new, ", but must not be negative");
    if (args->stop_count < 0 || (args->stop_count > 0 && args->stop_tokens == nullptr)) invalid("stop_count is ", args->stop_count, ", but stop_tokens is null");
    if (args->draft != nullptr && args->block_len < 0) invalid("block_len is ", args->block_len, ", but must not be negative");
    if (args->draft != nullptr && (args->budget < 0 || args->budget > kBudgetMax))
      invalid("T5: budget is ", args->budget, ", but must be between 0 and ", kBudgetMax, " (the root is not counted)");
    if (args->emit == nullptr) invalid("emit is null");
    generate(own, *args);
  });
}
