// What every part of the engine shares: how it reports an error, and how it names a plant.
//
// Inside the engine an error is the exception Error; abi.cpp turns it into a status and a message at the boundary.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)  // everything else is hidden: two engines in one process do not mix
#include "include/paritree.h"
#pragma GCC visibility pop

namespace paritree {

class Error : public std::exception {
 public:
  Error(paritree_status status, std::string message) : status_(status), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  paritree_status status() const noexcept { return status_; }

 private:
  paritree_status status_;
  std::string message_;
};

// The parts of a message, printed one after the other. Not a string stream: those triple the time to compile the engine.
inline void append(std::string& out, const char* part) { out += part; }
inline void append(std::string& out, const std::string& part) { out += part; }
inline void append(std::string& out, double part) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", part);
  out += digits;
}
template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
void append(std::string& out, Integer part) {
  out += std::to_string(part);
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

template <class... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  throw Error(PARITREE_INVALID, text(parts...));
}

template <class... Parts>
[[noreturn]] void unsupported(const Parts&... parts) {
  throw Error(PARITREE_UNSUPPORTED, text(parts...));
}

template <class... Parts>
[[noreturn]] void failed(const Parts&... parts) {
  throw Error(PARITREE_FAILED, text(parts...));
}

// A buffer of floats that only grows: contents of an earlier use stay in it, so every kernel must write what it owns.
class Buffer {
 public:
  float* sized(int64_t count) {
    if (static_cast<int64_t>(values_.size()) < count) values_.resize(static_cast<std::size_t>(count));
    return values_.data();
  }

 private:
  std::vector<float> values_;
};

}  // namespace paritree
