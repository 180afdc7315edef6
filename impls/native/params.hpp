// Lookup in the (key, int64 | double) pairs of the ABI.
#pragma once

#include <cstring>
#include <initializer_list>

#include "common.hpp"

namespace paritree {

class Params {
 public:
  explicit Params(const paritree_params& params) : params_(params) {
    if (params.count < 0 || (params.count > 0 && params.items == nullptr)) invalid("params has count ", params.count, " but no items");
    for (int64_t i = 0; i < params.count; ++i) {
      const paritree_param& item = params.items[i];
      if (item.key == nullptr) invalid("params[", i, "] has no key");
      if (item.kind != 0 && item.kind != 1) invalid("parameter ", item.key, " has kind ", item.kind, ", but must be 0 (int) or 1 (double)");
    }
  }

  bool has(const char* key) const { return find(key) != nullptr; }

  // A key that the engine does not know may change the function: "I do not do this" is the only honest answer.
  void refuse_unknown(std::initializer_list<const char*> known) const {
    for (int64_t i = 0; i < params_.count; ++i) {
      bool found = false;
      for (const char* key : known) found = found || std::strcmp(params_.items[i].key, key) == 0;
      if (!found) unsupported("parameter ", params_.items[i].key, " is unknown to this engine");
    }
  }

  int64_t integer(const char* key) const {
    const paritree_param& item = required(key);
    if (item.kind != 0) invalid("parameter ", key, " is the double ", item.value.d, ", but must be an integer");
    return item.value.i;
  }
  int64_t integer(const char* key, int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }

  bool flag(const char* key, bool otherwise) const { return has(key) ? flag(key) : otherwise; }
  bool flag(const char* key) const {
    const int64_t value = integer(key);
    if (value != 0 && value != 1) invalid("parameter ", key, " is ", value, ", but must be 0 or 1");
    return value == 1;
  }

  // An integer is taken for a number as well.
  double number(const char* key) const {
    const paritree_param& item = required(key);
    return item.kind == 1 ? item.value.d : static_cast<double>(item.value.i);
  }
  double number(const char* key, double otherwise) const { return has(key) ? number(key) : otherwise; }

 private:
  const paritree_param* find(const char* key) const {
    for (int64_t i = 0; i < params_.count; ++i) {
      if (std::strcmp(params_.items[i].key, key) == 0) return &params_.items[i];
    }
    return nullptr;
  }
  const paritree_param& required(const char* key) const {
    const paritree_param* item = find(key);
    if (item == nullptr) invalid("parameter ", key, " is missing");
    return *item;
  }

  paritree_params params_;
};

}  // namespace paritree
