// The C ABI of impls/native/include/paritree.h over the CUDA engine, and its description; what it refuses: ../../native/arguments.hpp.
// Tensors of the caller are on the host; the precision of matrix products comes from PARITREE_CUDA_PRECISION (float32, tf32, bf16).
#include <cstdlib>
#include <cstring>
#include <string>

#include "../../native/arguments.hpp"
#include "../../native/pointwise.hpp"
#include "operations.hpp"
#include "session.hpp"

namespace paritree::cuda {
namespace {

constexpr int64_t kCacheSlots = 1 << 14;

DeviceSession& checked(paritree_session* session) { return checked_pointer(session, "session").session; }

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

void forward(DeviceSession& session, const paritree_forward_args* args) {
  const ForwardRequest request = read_forward(args, session.config());
  if (args->first_layer != 0 || request.hidden != nullptr) unsupported("this engine does not take a residual stream");
  session.forward(request.rows, request.logits, TapSink(args->taps, args->tap, args->tap_user));
}

}  // namespace
}  // namespace paritree::cuda

using namespace paritree;
using namespace paritree::cuda;

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

const char* paritree_last_error(void) { return last_error().c_str(); }

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
    description->capabilities = "run_op,forward,taps,commit,cache_rows,fork,evict,free_slots,generate,generate_tree,sampling";
    description->ops = PARITREE_OP_NAMES;
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

paritree_status paritree_run_op(const paritree_op_call* call) {
  return guarded([&] {
    check_device(checked_struct(call, "call").device);
    paritree::cuda::run_op(*call, precision());
  });
}

paritree_status paritree_run_op_workspace(const paritree_op_call* call, uint64_t* bytes) {
  return guarded([&] {
    check_op(checked_struct(call, "call"));
    checked_pointer(bytes, "bytes") = 0;
  });
}

paritree_status paritree_open(const paritree_open_args* args, paritree_session** session) {
  return guarded([&] {
    const OpenRequest request = read_open(args, session, kCacheSlots);
    const ModelConfig& config = request.config;
    // switches of the model that these kernels do not have
    if (config.window > 0) unsupported("window is ", config.window, ", but this engine sees every key of the prefix");
    if (config.attention_bias) unsupported("attention_bias is set, but this engine has no biases");
    if (config.rope_table_len > 0) unsupported("rope_table_len is ", config.rope_table_len, ", but this engine computes its tables");
    if (config.to_cache != round_nothing) unsupported("cache_format is not float32, but this engine has no other");
    *session = new paritree_session{{config, args->weight, args->weight_user, request.cache_slots, precision()}};
  });
}

void paritree_close(paritree_session* session) { delete session; }

paritree_status paritree_forward(paritree_session* session, const paritree_forward_args* args) {
  return guarded([&] { forward(checked(session), args); });
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
    float* out = read_cache_rows(own.config(), sequence, own.contains(sequence), layer, rows, row_count, [&](int32_t of) { return own.committed(of); });
    if (out != nullptr) own.cache_rows(sequence, layer, out);
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
    checked_pointer(slots, "slots") = checked(session).free_rows();
  });
}

paritree_status paritree_generate(paritree_session* session, const paritree_generate_args* args) {
  return guarded([&] {
    DeviceSession& own = checked(session);
    const paritree_generate_args& request = checked_generate(args);
    generate(own, request);
  });
}
