// The C ABI of impls/native/include/paritree.h over the CUDA engine, and its description; what it refuses: ../../native/arguments.hpp.
// Tensors of the caller are on the host; the precision of matrix products comes from PARITREE_CUDA_PRECISION (float32, tf32, bf16).
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../native/arguments.hpp"
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

// What each operation computes in a mode: spec.engine.Profile, entries "operation.field" or "tap.field" where they differ from the rest.
// expf, exp2f and rsqrtf are within 2 ulp, logf within 1 (CUDA C++ Programming Guide). TF32 drops 13 bits of an operand, bfloat16 rounds to 8. Tensor cores
// add without rounding each sum to nearest: 2^-22.
const std::vector<paritree_param>& profile_of(Precision precision) {
  // The tiled forms of attention fold log2(e) into the scale: a score counts as rounded twice more. The form for any sizes and the unfused softmax do not.
  static const std::vector<paritree_param> exact = {number("exp_ulp", 2.0), number("log_ulp", 1.0), number("rsqrt_ulp", 2.0), number("softmax.exp2_folding", 0.0),
                                                    number("scores.u_output", 0x1p-23)};
  const auto products = [](std::vector<paritree_param> profile, double input) {
    // cuBLAS; the experts' grouped products and the unfused scores are our own, in float32 in every mode
    static constexpr const char* keys[][2] = {
        {"matmul.u_input", "matmul.u_accumulate"}, {"q_absorb.u_input", "q_absorb.u_accumulate"}, {"o_heads.u_input", "o_heads.u_accumulate"}};
    for (const auto& [input_key, accumulate_key] : keys) {
      profile.push_back(number(input_key, input));
      profile.push_back(number(accumulate_key, 0x1p-22));
    }
    for (const char* key : {"expert_gate.u_accumulate", "expert_up.u_accumulate", "expert_out.u_accumulate"}) profile.push_back(number(key, 0x1p-24));
    return profile;
  };
  static const std::vector<paritree_param> tf32 = products(exact, 0x1p-10);
  static const std::vector<paritree_param> bf16 = [&] {
    std::vector<paritree_param> profile = products(exact, 0x1p-8);
    // attention on bfloat16: query and cache rows are rounded on their way to it and shown as it reads them, so that its own products are exact
    for (const char* key : {"q_absorb.u_output", "q_rope.u_output", "latent.u_output", "k_rope.u_output"}) profile.push_back(number(key, 0x1p-8));
    // weights are rounded to bfloat16 before they meet the latents, which are bfloat16 already: 2^-8 of each product, (1 + 2^-9)^2 - 1 of the profile
    for (const auto& [key, value] : {std::pair{"scores.u_accumulate", 0x1p-22}, std::pair{"o_latent.u_input", 0x1p-9}, std::pair{"o_latent.u_accumulate", 0x1p-22},
                                     std::pair{"tree_attention.u_input", 0x1p-8}, std::pair{"tree_attention.u_accumulate", 0x1p-22}})
      profile.push_back(number(key, value));
    return profile;
  }();
  return precision == Precision::float32 ? exact : precision == Precision::tf32 ? tf32 : bf16;
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
    const Precision chosen = precision();
    description->name = "cuda-native";
    description->version = "0.1.0";
    description->profile_name = chosen == Precision::float32 ? "cuda-float32" : chosen == Precision::tf32 ? "cuda-tf32" : "cuda-bf16";
    const std::vector<paritree_param>& profile = profile_of(chosen);
    description->profile = {profile.data(), static_cast<int64_t>(profile.size())};
    description->capabilities = "run_op,forward,taps,commit,cache_rows,fork,evict,free_slots,generate,generate_tree,sampling";
    description->ops = PARITREE_OP_NAMES;
    // probabilities never leave the attention kernel; scores do where its form is the one for any sizes
    static const std::string taps = [] {
      std::string names = PARITREE_TAP_NAMES;
      names.erase(names.find(",probs,"), std::strlen(",probs"));
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
    if (config.stream_experts) unsupported("stream_experts is set, but this engine keeps every expert on the device: it has no room for a model that large");
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
