// The operands of one run_op call, and the checks of their values: what every engine behind the C ABI refuses in the same words.
#pragma once

#include <cstring>
#include <initializer_list>

#include "common.hpp"
#include "params.hpp"
#include "tensors.hpp"
#include "tree.hpp"

namespace paritree {

// The operands of one call, by name.
class Operands {
 public:
  explicit Operands(const paritree_op_call& call) : params(call.params), call_(call) {
    if (call.input_count < 0 || (call.input_count > 0 && call.inputs == nullptr)) invalid("input_count is ", call.input_count, ", but inputs is null");
    if (call.output_count < 0 || (call.output_count > 0 && call.outputs == nullptr)) invalid("output_count is ", call.output_count, ", but outputs is null");
  }

  const Params params;

  // Size `axis` of an input, after the number of its dimensions is known to be `ndim`.
  int64_t size(const char* name, int64_t ndim, int64_t axis) const {
    const DLTensor& tensor = find(call_.inputs, call_.input_count, name, "input");
    if (tensor.ndim != ndim) invalid("input ", name, " has ", tensor.ndim, " dimensions, but must have ", ndim);
    if (tensor.shape == nullptr) invalid("input ", name, " has no shape");
    if (tensor.shape[axis] < 0) invalid("input ", name, " has shape ", shape_text(tensor.shape, ndim), ", but sizes are not negative");
    return tensor.shape[axis];
  }

  template <class T>
  const T* in(const char* name, std::initializer_list<int64_t> shape) const {
    return checked_data<T>(name, find(call_.inputs, call_.input_count, name, "input"), shape);
  }

  template <class T>
  T* out(const char* name, std::initializer_list<int64_t> shape) const {
    return checked_data<T>(name, find(call_.outputs, call_.output_count, name, "output"), shape);
  }

  // The caller's workspace as floats.
  float* workspace(int64_t floats) const {
    const uint64_t bytes = static_cast<uint64_t>(floats) * sizeof(float);
    if (bytes > 0 && (call_.workspace == nullptr || call_.workspace_bytes < bytes)) {
      invalid("workspace holds ", call_.workspace == nullptr ? 0 : call_.workspace_bytes, " bytes, but this call needs ", bytes);
    }
    return static_cast<float*>(call_.workspace);
  }

 private:
  static const DLTensor& find(const paritree_named_tensor* tensors, int64_t count, const char* name, const char* kind) {
    for (int64_t i = 0; i < count; ++i) {
      if (tensors[i].name != nullptr && std::strcmp(tensors[i].name, name) == 0) return tensors[i].tensor;
    }
    invalid(kind, " ", name, " is missing");
  }

  const paritree_op_call& call_;
};

inline void check_ids(const char* name, const int32_t* ids, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= limit) invalid(name, " holds ", ids[i], " at ", i, ", but ids are between 0 and ", limit - 1);
  }
}

inline int64_t budget_of(const Operands& op) {
  const int64_t budget = op.params.integer("budget");
  if (budget < 0 || budget > kBudgetMax) invalid("T5: budget is ", budget, ", but must be between 0 and ", kBudgetMax, " (the root is not counted)");
  return budget;
}

inline int64_t prefix_of(const Operands& op) {
  const int64_t prefix = op.params.integer("prefix_len");
  if (prefix < 0) invalid("prefix_len is ", prefix, ", but must not be negative");
  return prefix;
}

// Runs `body`; its errors carry the operation's name.
template <class Body>
void named(const char* operation, Body body) {
  try {
    body();
  } catch (const Error& error) {
    throw Error(error.status(), text(operation, ": ", error.what()));
  }
}

// The entry of a table of operations ({name, ...}) that the call asks for.
template <class Operation, std::size_t count>
const Operation& find_operation(const Operation (&operations)[count], const paritree_op_call& call) {
  if (call.op == nullptr) invalid("op is null");
  for (const Operation& operation : operations) {
    if (std::strcmp(operation.name, call.op) == 0) return operation;
  }
  unsupported("there is no operation '", call.op, "' here; this engine has " PARITREE_OP_NAMES);
}

}  // namespace paritree
