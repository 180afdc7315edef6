// The argument checks of the C ABI, in one place: an engine over another device refuses the same calls in the same words. Nothing here knows
// an engine; exceptions become statuses here, and every check says argument, found, expected.
#pragma once

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "common.hpp"
#include "params.hpp"
#include "session.hpp"
#include "tensors.hpp"
#include "tree.hpp"

namespace paritree {

// Of the last call on this thread that did not return OK.
inline std::string& last_error() {
  thread_local std::string message;
  return message;
}

// Runs `body`, and turns what it throws into a status and last_error.
template <class Body>
paritree_status guarded(Body body) noexcept {
  try {
    body();
    return PARITREE_OK;
  } catch (const Error& error) {
    last_error() = error.what();
    return error.status();
  } catch (const std::bad_alloc&) {
    last_error() = "out of memory";
    return PARITREE_FAILED;
  } catch (const std::exception& error) {
    last_error() = text("internal error: ", error.what());
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

// Handles, and results that the caller wants written.
template <class T>
T& checked_pointer(T* value, const char* name) {
  if (value == nullptr) invalid(name, " is null");
  return *value;
}

// Tensors of the caller are in host memory, whatever the engine computes on.
inline void check_device(const DLDevice& device) {
  if (device.device_type != 1) unsupported("device type is ", device.device_type, ", but this engine takes tensors in host memory (1)");
}

template <class T>
std::vector<T> copied(const char* name, const T* values, int64_t count) {
  if (count < 0) invalid(name, " has count ", count, ", but counts are not negative");
  if (count > 0 && values == nullptr) invalid(name, " is null");
  return std::vector<T>(values, values + count);
}

// ---- open ------------------------------------------------------------------------------------------------------------

struct OpenRequest {
  ModelConfig config;
  int64_t cache_slots;
};

// `cache_slots` of one session unless the parameter of that name says otherwise.
inline OpenRequest read_open(const paritree_open_args* given, paritree_session** session, int64_t cache_slots) {
  const paritree_open_args& args = checked_struct(given, "args");
  checked_pointer(session, "session");
  check_device(args.device);
  if (args.weight == nullptr) unsupported("this engine does not load weights_path: give a weight callback");
  const Params params(args.config);
  OpenRequest request{read_config(params), params.integer("cache_slots", cache_slots)};
  if (request.cache_slots < 1) invalid("cache_slots is ", request.cache_slots, ", but must be at least 1");
  return request;
}

// ---- forward ---------------------------------------------------------------------------------------------------------

struct ForwardRequest {
  BatchRows rows;
  float* logits = nullptr;        // [wanted rows, vocab], where any are wanted
  const float* hidden = nullptr;  // [rows, hidden], where given
};

inline ForwardRequest read_forward(const paritree_forward_args* given, const ModelConfig& config) {
  const paritree_forward_args& args = checked_struct(given, "args");
  ForwardRequest request;
  request.rows.sequence = copied("sequence", args.sequence, args.row_count);
  request.rows.token = copied("token", args.token, args.row_count);
  request.rows.position = copied("position", args.position, args.row_count);
  request.rows.parent = copied("parent", args.parent, args.row_count);
  request.rows.want_logits = copied("want_logits", args.want_logits, args.row_count);
  const int64_t wanted = std::count_if(request.rows.want_logits.begin(), request.rows.want_logits.end(), [](uint8_t want) { return want != 0; });
  if (wanted > 0) {
    if (args.logits == nullptr) invalid("logits is null, but ", wanted, " rows want logits");
    request.logits = checked_data<float>("logits", *args.logits, {wanted, config.vocab});
  }
  if (args.hidden != nullptr) request.hidden = checked_data<float>("hidden", *args.hidden, {args.row_count, config.hidden});
  return request;
}

// ---- the cache -------------------------------------------------------------------------------------------------------

// Sets *row_count; where to write the rows [committed, width], null where the caller only counts. `committed` is asked for once the sequence is known.
template <class Committed>
float* read_cache_rows(const ModelConfig& config, int32_t sequence, bool known, int64_t layer, const DLTensor* rows, int64_t* row_count, Committed committed) {
  checked_pointer(row_count, "row_count");
  if (layer < 0 || layer >= config.layers) invalid("layer is ", layer, ", but must be between 0 and ", config.layers - 1);
  if (!known) invalid("sequence ", sequence, " is unknown: a sequence exists from its first row on");
  *row_count = committed(sequence);
  return rows == nullptr ? nullptr : checked_data<float>("rows", *rows, {*row_count, config.cache_dim()});
}

// ---- generate --------------------------------------------------------------------------------------------------------

inline const paritree_generate_args& checked_generate(const paritree_generate_args* given) {
  const paritree_generate_args& args = checked_struct(given, "args");
  if (args.prompt_count < 0 || (args.prompt_count > 0 && (args.prompts == nullptr || args.prompt_lengths == nullptr))) {
    invalid("prompt_count is ", args.prompt_count, ", but prompts or prompt_lengths is null");
  }
  for (int64_t i = 0; i < args.prompt_count; ++i) {
    if (args.prompt_lengths[i] < 0) invalid("prompt has count ", args.prompt_lengths[i], ", but counts are not negative");
    if (args.prompt_lengths[i] > 0 && args.prompts[i] == nullptr) invalid("prompt is null");
  }
  if (args.max_new < 0) invalid("max_new is ", args.max_new, ", but must not be negative");
  if (args.stop_count < 0) invalid("stop_tokens has count ", args.stop_count, ", but counts are not negative");
  if (args.stop_count > 0 && args.stop_tokens == nullptr) invalid("stop_tokens is null");
  if (args.draft != nullptr) {
    if (args.block_len < 0) invalid("block_len is ", args.block_len, ", but must not be negative");
    if (args.budget < 0 || args.budget > kBudgetMax) invalid("T5: budget is ", args.budget, ", but must be between 0 and ", kBudgetMax, " (the root is not counted)");
  }
  if (args.emit == nullptr) invalid("emit is null");
  return args;
}

}  // namespace paritree
