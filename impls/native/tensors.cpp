// Refusals of tensors, in words: name, found, expected.
#include "tensors.hpp"

namespace paritree {
namespace {

const char* dtype_kind(uint8_t code) {
  switch (code) {
    case 0: return "int";
    case 1: return "uint";
    case 2: return "float";
    case 4: return "bfloat";
    default: return "dtype code ";
  }
}

int64_t element_count(const DLTensor& tensor) {
  int64_t count = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
  return count;
}

// A stride matters only where a dimension has more than one element.
bool is_contiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr || element_count(tensor) == 0) return true;
  int64_t expected = 1;
  for (int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace

std::string shape_text(const int64_t* shape, int64_t ndim) {
  std::string out = "[";
  for (int64_t i = 0; i < ndim; ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

void check_layout(const char* name, const DLTensor& tensor, int64_t ndim, uint8_t code, uint8_t bits, const char* dtype_name) {
  if (tensor.device.device_type != 1) unsupported(name, " is on device type ", tensor.device.device_type, ", but this engine takes tensors in host memory (1)");
  if (tensor.dtype.code != code || tensor.dtype.bits != bits || tensor.dtype.lanes != 1) {
    invalid(name, " is ", dtype_kind(tensor.dtype.code), int{tensor.dtype.bits}, " with ", tensor.dtype.lanes, " lanes, but must be ", dtype_name);
  }
  if (tensor.ndim != ndim) invalid(name, " has ", tensor.ndim, " dimensions, but must have ", ndim);
  if (ndim > 0 && tensor.shape == nullptr) invalid(name, " has no shape");
  for (int64_t i = 0; i < ndim; ++i) {
    if (tensor.shape[i] < 0) invalid(name, " has shape ", shape_text(tensor.shape, ndim), ", but sizes are not negative");
  }
  if (tensor.data == nullptr && element_count(tensor) > 0) invalid(name, " has no data");
  if (!is_contiguous(tensor)) {
    unsupported(name, " has strides ", shape_text(tensor.strides, ndim), ", but this engine takes contiguous row-major tensors only: pass a copy");
  }
}

void check_shape(const char* name, const DLTensor& tensor, std::initializer_list<int64_t> shape) {
  int64_t i = 0;
  for (const int64_t size : shape) {
    if (tensor.shape[i++] != size) {
      invalid(name, " has shape ", shape_text(tensor.shape, tensor.ndim), ", but must be ", shape_text(shape.begin(), tensor.ndim));
    }
  }
}

}  // namespace paritree
