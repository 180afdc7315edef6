// The instructions that C++ has no words for, each with its meaning in plain C++ for the emulator. sm_80 and later.
#pragma once
#include "common.cuh"

namespace paritree {

#ifdef PARITREE_EMULATOR

PARITREE_INLINE void copy16_async(void* shared, const void* global, bool valid) {
    if (valid) std::memcpy(shared, global, 16);
    else std::memset(shared, 0, 16);
}
PARITREE_INLINE void copy_commit() {}
template <int PENDING>
PARITREE_INLINE void copy_wait() {}

PARITREE_INLINE float of_bf16(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
PARITREE_INLINE unsigned short to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
PARITREE_INLINE unsigned pack_bf16(float low, float high) { return to_bf16(low) | (static_cast<unsigned>(to_bf16(high)) << 16); }
// the same, but what would round to infinity becomes the largest number, infinities too
PARITREE_INLINE unsigned pack_bf16_finite(float low, float high) {
    const unsigned pair = pack_bf16(low, high);
    const unsigned first = (pair & 0x7fffu) == 0x7f80u ? pair - 1u : pair;
    return (first >> 16 & 0x7fffu) == 0x7f80u ? first - 0x10000u : first;
}

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 and gets, of matrix i, the two elements
// (l / 4, 2 * (l % 4)) and the next one; transposed: the elements (2 * (l % 4), l / 4) and the one below.
template <bool TRANSPOSED>
PARITREE_INLINE void load_matrices(unsigned (&out)[4], const void* row) {
    const int lane = threadIdx.x & 31;
    unsigned long long* slots = reinterpret_cast<unsigned long long*>(paritree_emulator::warp_slots());
    slots[lane] = reinterpret_cast<unsigned long long>(row);
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        out[i] = 0;
        for (int half = 0; half < 2; ++half) {
            const int r = TRANSPOSED ? 2 * (lane % 4) + half : lane / 4;
            const int c = TRANSPOSED ? lane / 4 : 2 * (lane % 4) + half;
            out[i] |= static_cast<unsigned>(reinterpret_cast<const unsigned short*>(slots[i * 8 + r])[c]) << (16 * half);
        }
    }
    __syncwarp();
}

// d += a @ b, a 16x16, b 16x8 bf16, d 16x8 float32. Fragments as in the PTX manual.
PARITREE_INLINE void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int lane = threadIdx.x & 31;
    unsigned long long* slots = reinterpret_cast<unsigned long long*>(paritree_emulator::warp_slots());
    unsigned long long left[2][4], right[2][4];  // registers (0, 2) and (1, 3) of a of the four lanes of a row, (b0, b1) of those of two columns
    for (int half = 0; half < 2; ++half) {
        slots[lane] = a[half] | static_cast<unsigned long long>(a[2 + half]) << 32;
        __syncwarp();
        for (int i = 0; i < 4; ++i) left[half][i] = slots[lane / 4 * 4 + i];
        __syncwarp();
    }
    slots[lane] = b0 | static_cast<unsigned long long>(b1) << 32;
    __syncwarp();
    for (int column = 0; column < 2; ++column)
        for (int i = 0; i < 4; ++i) right[column][i] = slots[(2 * (lane % 4) + column) * 4 + i];
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        float sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const int shift = k / 8 * 32 + k % 2 * 16;
            sum = fmaf(of_bf16(static_cast<unsigned short>(left[i / 2][k % 8 / 2] >> shift)),
                       of_bf16(static_cast<unsigned short>(right[i % 2][k % 8 / 2] >> shift)), sum);
        }
        d[i] = sum;
    }
}

// the same with eight columns of a and rows of b
PARITREE_INLINE void mma_bf16(float (&d)[4], const unsigned (&a)[2], unsigned b) {
    const unsigned wide[4] = {a[0], a[1], 0u, 0u};
    mma_bf16(d, wide, b, 0u);
}

#else

// Asynchronous copy of 16 bytes into shared memory; an invalid source is not read, and zeros are written.
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

PARITREE_INLINE float of_bf16(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
PARITREE_INLINE unsigned short to_bf16(float x) {
    unsigned short out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}
PARITREE_INLINE unsigned pack_bf16(float low, float high) {
    unsigned out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

PARITREE_INLINE unsigned pack_bf16_finite(float low, float high) {
    unsigned out;
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

template <bool TRANSPOSED>
PARITREE_INLINE void load_matrices(unsigned (&out)[4], const void* row) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(address)
                     : "memory");
}

PARITREE_INLINE void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

PARITREE_INLINE void mma_bf16(float (&d)[4], const unsigned (&a)[2], unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

#endif

}  // namespace paritree
