// Shared by every kernel of this folder. NVRTC-clean: no host header and no standard header is included.
#pragma once

#define PARITREE_INLINE __device__ __forceinline__

// The dynamic shared memory of the block as an array of `type`. One declaration for all kernels, so that they link together.
#ifdef PARITREE_EMULATOR
#define PARITREE_SHARED(type, name) type* name = reinterpret_cast<type*>(paritree_dynamic_shared)
#else
#define PARITREE_SHARED(type, name)                                              \
    extern __shared__ __align__(16) unsigned char paritree_dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(paritree_dynamic_shared)
#endif

namespace paritree {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned FULL_WARP = 0xffffffffu;

// What a kernel found wrong with its inputs, or-ed into a status word; the host turns it into an error. impls/cuda/ops.py has the same.
constexpr int STATUS_NOT_FINITE = 1;  // T8: NaN or +inf
constexpr int STATUS_ASCENDS = 2;     // T4: log-probabilities ascend along a row
constexpr int STATUS_INEXACT = 4;     // T2: a path score needs more than two doubles
constexpr int STATUS_STRUCTURE = 8;   // T6: parents do not ascend from one root
constexpr int STATUS_DUPLICATE = 16;  // T6: a token twice under one parent

PARITREE_INLINE float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }
PARITREE_INLINE float not_a_number() { return __int_as_float(0x7fc00000); }

PARITREE_INLINE float warp_max(float x) {
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

PARITREE_INLINE float warp_sum(float x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

PARITREE_INLINE unsigned long long warp_max(unsigned long long x) {
    for (int step = 16; step; step >>= 1) {
        const unsigned long long other = __shfl_xor_sync(FULL_WARP, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// The maximum or sum over a block, the same in every thread. `scratch`: 32 elements of shared memory, free again on return.
PARITREE_INLINE float block_max(float x, float* scratch) {
    x = warp_max(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    x = warp_max((threadIdx.x & 31) < blockDim.x / 32 ? scratch[threadIdx.x & 31] : minus_infinity());
    __syncthreads();
    return x;
}

PARITREE_INLINE float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    x = warp_sum((threadIdx.x & 31) < blockDim.x / 32 ? scratch[threadIdx.x & 31] : 0.0f);
    __syncthreads();
    return x;
}

PARITREE_INLINE unsigned long long block_max(unsigned long long x, unsigned long long* scratch) {
    x = warp_max(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    x = warp_max((threadIdx.x & 31) < blockDim.x / 32 ? scratch[threadIdx.x & 31] : 0ull);
    __syncthreads();
    return x;
}

// Unsigned integers in the order of the floats; both zeros are one value, NaN comes below -inf, and 0 is below everything.
PARITREE_INLINE unsigned ordered(float x) {
    if (x != x) return 1u;
    const unsigned bits = __float_as_uint(x + 0.0f);  // -0 becomes +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

PARITREE_INLINE float unordered(unsigned key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Larger value first, then the lower index: as one integer, larger is better (A1, T4, N5).
PARITREE_INLINE unsigned long long ranked(unsigned key, int index) {
    return (static_cast<unsigned long long>(key) << 32) | (0xffffffffu - static_cast<unsigned>(index));
}

PARITREE_INLINE int index_of(unsigned long long rank) { return static_cast<int>(0xffffffffu - static_cast<unsigned>(rank)); }

// 1 / (1 + e^-x), the small side without overflow: subnormal results keep their bits.
PARITREE_INLINE float sigmoid(float x) {
    const float power = expf(x < 0.0f ? x : -x);
    return (x < 0.0f ? power : 1.0f) / (1.0f + power);
}

// A cache row by its logical index: contiguous when `pages` is null, else through the page table of the sequence.
template <typename Element>
PARITREE_INLINE const Element* cache_row(const Element* cache, const int* pages, int page_size, int width, int key) {
    const long long slot = pages == nullptr ? key : static_cast<long long>(pages[key / page_size]) * page_size + key % page_size;
    return cache + slot * width;
}

// Rule C3: the prefix is visible to every row; key prefix_len + j is visible to row t iff bit j of the row's mask is set.
PARITREE_INLINE bool sees(const unsigned* mask_row, int prefix_len, int key) {
    if (key < prefix_len) return true;
    const int j = key - prefix_len;
    return (mask_row[j >> 5] >> (j & 31)) & 1u;
}

// Where `prefix_at` is given, the prefix is as long as it says on the device and `keys` moves with it: a captured graph then serves every length
// up to those that its launch was made for.
PARITREE_INLINE void on_device(const int* prefix_at, int& prefix_len, int& keys) {
    if (prefix_at == nullptr) return;
    keys += *prefix_at - prefix_len;
    prefix_len = *prefix_at;
}

// Whether a tile may hold this key. `seen`: bits of the keys that some row sees, null: all. A slot that no row sees may hold NaN, and a
// matrix product would carry it into every row, as 0 * NaN is NaN.
PARITREE_INLINE bool is_read(const unsigned* seen, int prefix_len, int key) { return seen == nullptr || sees(seen, prefix_len, key); }

}  // namespace paritree
