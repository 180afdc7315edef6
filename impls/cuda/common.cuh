// Shared by every kernel of this folder. NVRTC-clean: no host header and no standard header is included.
#pragma once

#define PARITREE_INLINE __device__ __forceinline__

namespace paritree {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned FULL_WARP = 0xffffffffu;

PARITREE_INLINE float minus_infinity() { return __int_as_float(0xff800000); }

PARITREE_INLINE float warp_max(float x) {
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

PARITREE_INLINE float warp_sum(float x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

// Asynchronous copy of 16 bytes into shared memory (sm_80 and later); past-the-end rows are filled with zeros.
PARITREE_INLINE void copy16_async(void* shared, const void* global, bool valid) {
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(global), "r"(bytes) : "memory");
}

PARITREE_INLINE void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

template <int PENDING>
PARITREE_INLINE void copy_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
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

}  // namespace paritree
