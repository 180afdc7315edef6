// Checks of the tensors that cross the ABI: dtype, shape, device and layout, with messages that say found and expected.
#pragma once

#include <initializer_list>

#include "common.hpp"

namespace paritree {

template <class T>
struct Dtype;
template <>
struct Dtype<float> {
  static constexpr uint8_t code = 2, bits = 32;
  static constexpr const char* name = "float32";
};
template <>
struct Dtype<int32_t> {
  static constexpr uint8_t code = 0, bits = 32;
  static constexpr const char* name = "int32";
};
template <>
struct Dtype<uint8_t> {
  static constexpr uint8_t code = 1, bits = 8;
  static constexpr const char* name = "uint8";
};

std::string shape_text(const int64_t* shape, int64_t ndim);

// Throws unless the tensor is on the CPU, contiguous, of `ndim` dimensions and of this dtype.
void check_layout(const char* name, const DLTensor& tensor, int64_t ndim, uint8_t code, uint8_t bits, const char* dtype_name);
// Throws unless the shape is exactly this one.
void check_shape(const char* name, const DLTensor& tensor, std::initializer_list<int64_t> shape);

template <class T>
T* data_of(const DLTensor& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
}

// The data of a tensor of this dtype and exactly this shape.
template <class T>
T* checked_data(const char* name, const DLTensor& tensor, std::initializer_list<int64_t> shape) {
  check_layout(name, tensor, static_cast<int64_t>(shape.size()), Dtype<T>::code, Dtype<T>::bits, Dtype<T>::name);
  check_shape(name, tensor, shape);
  return data_of<T>(tensor);
}

// A DLTensor over memory of the engine, for taps; shape must outlive it.
template <class T>
DLTensor tensor_over(T* data, int64_t* shape, int32_t ndim) {
  DLTensor tensor{};
  tensor.data = data;
  tensor.device = {1, 0};
  tensor.ndim = ndim;
  tensor.dtype = {Dtype<T>::code, Dtype<T>::bits, 1};
  tensor.shape = shape;
  return tensor;
}

}  // namespace paritree
