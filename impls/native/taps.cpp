// Pushing taps: one callback per tensor, in data order, over memory that stays valid during the callback only.
#include <algorithm>

#include "session.hpp"
#include "tensors.hpp"

namespace paritree {
namespace {

bool is_tap_name(const std::string& name) {
  static const std::string names = "," PARITREE_TAP_NAMES ",";
  return names.find("," + name + ",") != std::string::npos;
}

}  // namespace

TapSink::TapSink(const char* names, paritree_tap_fn push, void* user) : push_(push), user_(user) {
  const std::string list = names == nullptr ? "" : names;
  for (std::size_t start = 0; start < list.size();) {
    const std::size_t end = std::min(list.find(',', start), list.size());
    names_.push_back(list.substr(start, end - start));
    if (!is_tap_name(names_.back())) unsupported("there is no tap '", names_.back(), "' here; this engine has " PARITREE_TAP_NAMES);
    start = end + 1;
  }
  if (!names_.empty() && push_ == nullptr) invalid("taps are asked for, but the tap callback is null");
}

bool TapSink::wants(const char* name) const {
  return std::any_of(names_.begin(), names_.end(), [name](const std::string& wanted) { return wanted == name; });
}

template <class T>
void TapSink::push(const char* name, int64_t layer, const T* data, std::initializer_list<int64_t> shape) const {
  if (!wants(name)) return;
  int64_t sizes[4];
  std::copy(shape.begin(), shape.end(), sizes);
  paritree_tap tap{};
  tap.struct_size = sizeof tap;
  tap.layer = static_cast<int32_t>(layer);
  tap.name = name;
  tap.tensor = tensor_over(const_cast<T*>(data), sizes, static_cast<int32_t>(shape.size()));
  tap.shard_axis = -1;
  tap.shard_of = 1;
  const paritree_status status = push_(user_, &tap);
  if (status != PARITREE_OK) failed("the tap callback answered ", status, " to tap ", name, " of layer ", layer);
}

template void TapSink::push(const char*, int64_t, const float*, std::initializer_list<int64_t>) const;
template void TapSink::push(const char*, int64_t, const int32_t*, std::initializer_list<int64_t>) const;

}  // namespace paritree
