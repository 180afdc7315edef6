// Four float32 lanes, and the one summation order of the engine: runs of at most 32 sequential terms, then a balanced tree.
//
// Every sum of products here has height min(n - 1, 32 + ceil(log2(n / 32))); the profile declares it as height_block = 32.
// The order depends on n alone, never on the other rows of a batch, and -ffp-contract=off keeps a tail loop from being fused
// where the main loop is not: that is what the profile's batch_invariant claims.
#pragma once

#include <cstdint>
#include <cstring>

namespace paritree {

constexpr int64_t kRun = 32;  // sequential terms; the declared height, and a K-block of 32 rows of w stays in the first cache level

typedef float f32x4 __attribute__((vector_size(16)));

inline f32x4 load4(const float* from) {
  f32x4 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store4(float* to, f32x4 value) { std::memcpy(to, &value, sizeof value); }

inline f32x4 broadcast4(float value) { return f32x4{value, value, value, value}; }

inline float sum4(f32x4 value) { return (value[0] + value[1]) + (value[2] + value[3]); }

// Adds equal-sized partial sums pairwise, as a binary counter does: `push` once per run, then `total`.
template <class Value>
class PairwiseSum {
 public:
  void push(Value partial) {
    uint64_t carry = pushed_++;
    int level = 0;
    for (; carry & 1; carry >>= 1, ++level) partial = levels_[level] + partial;
    levels_[level] = partial;
  }

  Value total() const {
    Value sum{};
    bool first = true;
    for (int level = 0; level < 64; ++level) {
      if (!(pushed_ >> level)) break;
      if (!((pushed_ >> level) & 1)) continue;
      sum = first ? levels_[level] : levels_[level] + sum;
      first = false;
    }
    return sum;
  }

 private:
  uint64_t pushed_ = 0;
  Value levels_[48];  // 2**48 runs are more than a machine holds; a level is written before it is read
};

// sum_i term(i) for i < count, with term4(i) = the four terms from i on.
template <class Term4, class Term>
float lane_sum(int64_t count, Term4 term4, Term term) {
  PairwiseSum<float> sum;
  int64_t i = 0;
  while (count - i >= 4) {
    f32x4 lanes = term4(i);
    int64_t end = i + 4 * kRun;
    if (end > count) end = count;
    for (i += 4; end - i >= 4; i += 4) lanes += term4(i);
    sum.push(sum4(lanes));
  }
  if (i < count) {
    float tail = term(i);
    for (++i; i < count; ++i) tail += term(i);
    sum.push(tail);
  }
  return sum.total();
}

inline float dot(const float* a, const float* b, int64_t count) {
  return lane_sum(
      count, [&](int64_t i) { return load4(a + i) * load4(b + i); }, [&](int64_t i) { return a[i] * b[i]; });
}

}  // namespace paritree
