// CUDA's execution model on one CPU thread, for testing kernels where there is no GPU. Included before the kernels.
//
// A block runs as one fiber per CUDA thread. Fibers give way at barriers and warp exchanges only, in an order drawn from a
// seed, so that a missing barrier changes results from seed to seed. Dynamic shared memory is full of NaN before each block.
// Differences to a GPU: blocks run one after the other, arithmetic is the host's (no FMA contraction of a * b + c, libm's
// functions), a warp exchange needs all lanes of its mask, and time means nothing.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define PARITREE_EMULATOR 1
#define __device__
#define __host__
#define __global__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint2 {
  unsigned x, y;
};
struct __attribute__((aligned(16))) float4 {
  float x, y, z, w;
};
struct __attribute__((aligned(16))) uint4 {
  unsigned x, y, z, w;
};
struct __attribute__((aligned(8))) float2 {
  float x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the running fiber
extern unsigned char* paritree_dynamic_shared;

namespace paritree_emulator {
void block_barrier();
void warp_barrier(unsigned mask);
uint64_t* warp_slots();  // 32 exchange slots of the running fiber's warp
// Runs a grid; null, or what went wrong.
const char* run(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned shared_bytes, const std::function<void()>& kernel,
                uint64_t seed = 0);
}  // namespace paritree_emulator

inline unsigned paritree_lane() { return threadIdx.x & 31u; }

inline void __syncthreads() { paritree_emulator::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { paritree_emulator::warp_barrier(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T paritree_exchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8, "an exchange moves at most 8 bytes");
  uint64_t* slots = paritree_emulator::warp_slots();
  std::memcpy(&slots[paritree_lane()], &value, sizeof(T));
  paritree_emulator::warp_barrier(mask);
  T out;
  std::memcpy(&out, &slots[source & 31u], sizeof(T));
  paritree_emulator::warp_barrier(mask);
  return out;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source) { return paritree_exchange(mask, value, static_cast<unsigned>(source)); }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) { return paritree_exchange(mask, value, paritree_lane() ^ static_cast<unsigned>(step)); }
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned step) {
  const unsigned source = paritree_lane() + step;
  return paritree_exchange(mask, value, source < 32 ? source : paritree_lane());
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned step) {
  const unsigned lane = paritree_lane();
  return paritree_exchange(mask, value, lane >= step ? lane - step : lane);
}

template <class T, class Join>
T paritree_reduce(unsigned mask, T value, Join join) {
  uint64_t* slots = paritree_emulator::warp_slots();
  std::memcpy(&slots[paritree_lane()], &value, sizeof(T));
  paritree_emulator::warp_barrier(mask);
  bool first = true;
  T out{};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    T other;
    std::memcpy(&other, &slots[lane], sizeof(T));
    out = first ? other : join(out, other);
    first = false;
  }
  paritree_emulator::warp_barrier(mask);
  return out;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return paritree_reduce(mask, value, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return paritree_reduce(mask, value, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return paritree_reduce(mask, predicate ? 1u << paritree_lane() : 0u, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = value > before ? value : before;
  return before;
}
inline int atomicMin(int* at, int value) {
  const int before = *at;
  *at = value < before ? value : before;
  return before;
}
template <class T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at = before | value;
  return before;
}

inline float __int_as_float(int bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline int __float_as_int(float value) {
  int out;
  std::memcpy(&out, &value, 4);
  return out;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(__float_as_int(value)); }
inline long long __double_as_longlong(double value) {
  long long out;
  std::memcpy(&out, &value, 8);
  return out;
}
inline double __longlong_as_double(long long bits) {
  double out;
  std::memcpy(&out, &bits, 8);
  return out;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __logf(float x) { return std::log(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class T>
T __ldg(const T* at) { return *at; }

template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }
