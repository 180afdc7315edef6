// Absorbed-MLA tree attention on bfloat16 operands for Hopper (sm_90a): answers spec/ops/tree_attention.py. Tensors as in tree_attention_bf16.cuh.
//
//   tree_attention_wgmma_bf16   kv_rank 512, rope_dim 64: warpgroup products (wgmma) straight from shared memory, 64 query rows and 64 keys a
//                               tile; 226 KiB of shared memory. What it improves on: tree_attention_mma32_bf16 loads every operand into
//                               registers by ldmatrix and gets about half of the tensor cores' rate
//   tree_attention_wgmma_pair_bf16   the same for two splits, joined by a cluster of two blocks instead of another launch and 25 MB of traffic
//
// Two warpgroups: each computes the scores of all 64 rows against 32 of the keys, and 256 of the 512 output columns. Scores, maxima, sums
// and outputs accumulate in float32; weights are rounded to bfloat16, their sum is not.
#pragma once
#include "tree_attention_f32.cuh"

// PARITREE_SM90A: the whole compilation is for sm_90a, its host part included, which then may launch these kernels
#if defined(PARITREE_EMULATOR) || defined(PARITREE_SM90A) || (defined(__CUDA_ARCH_FEAT_SM90_ALL) && __CUDA_ARCH__ == 900)

namespace paritree {
namespace wgmma_tile {
constexpr int RANK = 512, WIDTH = 576, ROWS = 64, KEYS = 64, THREADS = 256;
constexpr int CHUNKS = WIDTH / 64, CHUNK_BYTES = 64 * 128;        // 64 rows of 64 elements: 128 bytes, swizzled
constexpr int TILE_BYTES = CHUNKS * CHUNK_BYTES;                  // 73,728: the query, or one tile of keys
constexpr int WEIGHT_BYTES = ROWS * KEYS * 2;
constexpr int BYTES = 3 * TILE_BYTES + WEIGHT_BYTES + 4 * ROWS * 4 + 1024;  // the query, two tiles, weights, maxima and sums, alignment
static_assert(BYTES == 231424 && BYTES <= 232448, "sm_90 grants 227 KiB a block; impls/cuda/kernels.py has the number");

// Where 16-byte unit `unit` of row `row` stands in a chunk: the 128-byte swizzle of the hardware.
PARITREE_INLINE int swizzled(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

#ifdef PARITREE_EMULATOR

struct Descriptor {
    const unsigned char* start;
    int lead, stride;  // bytes between 64-element groups (transposed operand), and between groups of 8 rows
};
PARITREE_INLINE Descriptor describe(const void* start, int lead, int stride) { return {static_cast<const unsigned char*>(start), lead, stride}; }
PARITREE_INLINE Descriptor moved(Descriptor d, int bytes) { return {d.start + bytes, d.lead, d.stride}; }
PARITREE_INLINE float element(const Descriptor& d, long long offset) {
    unsigned long long address = reinterpret_cast<unsigned long long>(d.start) + offset;
    address ^= (address >> 7 & 7) << 4;
    return of_bf16(*reinterpret_cast<const unsigned short*>(address));
}
template <int N, bool TRANSPOSED>
PARITREE_INLINE void product(float (&d)[N / 2], const Descriptor& a, const Descriptor& b, int accumulate) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    for (int i = 0; i < N / 2; ++i) {
        const int m = warp * 16 + lane / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        float sum = accumulate ? d[i] : 0.0f;
        for (int k = 0; k < 16; ++k) {
            const float x = element(a, m / 8 * a.stride + m % 8 * 128 + k * 2);
            const float y = TRANSPOSED ? element(b, n / 64 * b.lead + k / 8 * b.stride + k % 8 * 128 + n % 64 * 2)
                                       : element(b, n / 8 * b.stride + n % 8 * 128 + k * 2);
            sum = fmaf(x, y, sum);
        }
        d[i] = sum;
    }
}
PARITREE_INLINE void products_begin() {}
PARITREE_INLINE void products_commit() {}
PARITREE_INLINE void products_wait() {}
PARITREE_INLINE void show_to_tensor_cores() {}

#else

using Descriptor = unsigned long long;
// 128-byte swizzle; all starts are multiples of 1,024 bytes before they are moved along a row
PARITREE_INLINE Descriptor describe(const void* start, int lead, int stride) {
    const unsigned long long address = __cvta_generic_to_shared(start);
    return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(lead >> 4) << 16 | static_cast<unsigned long long>(stride >> 4) << 32 | 1ull << 62;
}
PARITREE_INLINE Descriptor moved(Descriptor d, int bytes) { return d + (bytes >> 4); }

// d = a @ b (+ d): a 64 x 16 rows in shared memory; b N x 16 (keys by columns), or 16 x N read transposed
template <int N, bool TRANSPOSED>
PARITREE_INLINE void product(float (&d)[N / 2], Descriptor a, Descriptor b, int accumulate);
template <>
PARITREE_INLINE void product<32, false>(float (&d)[16], Descriptor a, Descriptor b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(accumulate));
}
template <>
PARITREE_INLINE void product<256, true>(float (&d)[128], Descriptor a, Descriptor b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "l"(a), "l"(b), "r"(accumulate));
}
PARITREE_INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
PARITREE_INLINE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
PARITREE_INLINE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory"); }
// shared memory written by ordinary stores and cp.async becomes visible to wgmma; a barrier has to follow
PARITREE_INLINE void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// A pair of blocks that run together and see each other's shared memory.
PARITREE_INLINE void pair_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
PARITREE_INLINE unsigned in_other_block(const void* shared, unsigned rank) {
    unsigned out;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "r"(rank));
    return out;
}
PARITREE_INLINE void store_in_other_block(unsigned address, float x, float y, float z, float w) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
#endif

// PAIR: the two splits of a row tile run as one cluster and are joined through shared memory. Without, parts are joined by another kernel.
template <bool PAIR>
PARITREE_INLINE void tree_attention(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask, int mask_words,
                          const unsigned* seen, int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out,
                          float* part_out, float* part_stat) {
    PARITREE_SHARED(unsigned char, memory);
    unsigned char* aligned = memory + (1024 - reinterpret_cast<unsigned long long>(memory) % 1024) % 1024;
    unsigned char* query_tile = aligned;
    unsigned char* key_tiles = aligned + TILE_BYTES;
    unsigned char* weights = aligned + 3 * TILE_BYTES;
    float* max_of = reinterpret_cast<float*>(weights + WEIGHT_BYTES);  // [2][ROWS], by warpgroup
    float* sum_of = max_of + 2 * ROWS;                                 // [2][ROWS]

    const int thread = threadIdx.x, group = thread / 128, lane = thread % 32;
    const int first_row = blockIdx.x * ROWS;
    const int begin = blockIdx.y * keys_per_split, end = min(keys, begin + keys_per_split);
    const int row0 = thread / 32 % 4 * 16 + lane / 4;  // and row0 + 8: the rows of this thread's fragments
    const int last = query_rows - 1;
    const unsigned* mask_rows[2] = {mask + static_cast<long long>(min(first_row + row0, last) / heads) * mask_words,
                                    mask + static_cast<long long>(min(first_row + row0 + 8, last) / heads) * mask_words};
    const float scale2 = scale * LOG2_E;

    auto load_keys = [&](int start, unsigned char* tile) {
        // eight threads a key: each takes one 16-byte unit of every chunk
#pragma unroll
        for (int key = thread / 8; key < KEYS; key += THREADS / 8) {
            const bool valid = start + key < end && is_read(seen, prefix_len, start + key);
            const unsigned short* source = cache_row(cache, pages, page_size, WIDTH, valid ? start + key : begin) + thread % 8 * 8;
            unsigned char* target = tile + swizzled(key, thread % 8);
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) copy16_async(target + chunk * CHUNK_BYTES, source + chunk * 64, valid);
        }
    };
    for (int i = thread; i < ROWS * (WIDTH / 8); i += THREADS) {
        const int row = i / (WIDTH / 8), unit = i % (WIDTH / 8);
        const bool valid = first_row + row < query_rows;
        copy16_async(query_tile + unit / 8 * CHUNK_BYTES + swizzled(row, unit % 8),
                     query + static_cast<long long>(valid ? first_row + row : first_row) * WIDTH + unit * 8, valid);
    }
    if (begin < end) load_keys(begin, key_tiles);
    copy_commit();

    float sums[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] = 0.0f;
    float row_max[2] = {minus_infinity(), minus_infinity()}, row_sum[2] = {0.0f, 0.0f};

    int buffer = 0;
    for (int start = begin; start < end; start += KEYS, buffer ^= 1) {
        unsigned char* tile = key_tiles + buffer * TILE_BYTES;
        copy_wait<0>();
        show_to_tensor_cores();
        __syncthreads();  // the tile has arrived, and both warpgroups are done with the other one and with the weights
        float score[16];
        products_begin();
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const Descriptor a = describe(query_tile + chunk * CHUNK_BYTES, 16, 1024);
            const Descriptor b = describe(tile + chunk * CHUNK_BYTES + group * 32 * 128, 16, 1024);
#pragma unroll
            for (int step = 0; step < 4; ++step) product<32, false>(score, moved(a, step * 32), moved(b, step * 32), chunk + step > 0);
        }
        products_commit();
        if (start + KEYS < end) load_keys(start + KEYS, key_tiles + (buffer ^ 1) * TILE_BYTES);  // while the tensor cores work
        copy_commit();
        products_wait();

        const bool whole = start + KEYS <= min(end, prefix_len);  // every key of the tile is visible to every row
        float top[2] = {row_max[0], row_max[1]};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int half = i / 2 % 2, key = start + group * 32 + i / 4 * 8 + 2 * (lane % 4) + i % 2;
            score[i] = whole || (key < end && sees(mask_rows[half], prefix_len, key)) ? score[i] * scale2 : minus_infinity();
            top[half] = fmaxf(top[half], score[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = fmaxf(top[half], __shfl_xor_sync(FULL_WARP, top[half], 1));
            top[half] = fmaxf(top[half], __shfl_xor_sync(FULL_WARP, top[half], 2));
            if (lane % 4 == 0) max_of[group * ROWS + row0 + half * 8] = top[half];
        }
        __syncthreads();  // both halves of the keys know their maxima
        float base[2], shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = fmaxf(max_of[row0 + half * 8], max_of[ROWS + row0 + half * 8]);
            base[half] = top[half] == minus_infinity() ? 0.0f : top[half];  // nothing visible yet
            shrink[half] = exp2f(row_max[half] - base[half]);
            row_max[half] = top[half];
            row_sum[half] *= shrink[half];
        }
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const int half = i / 2 % 2, row = row0 + half * 8, column = group * 32 + i / 4 * 8 + 2 * (lane % 4);
            const float x = exp2f(score[i] - base[half]), y = exp2f(score[i + 1] - base[half]);
            row_sum[half] += x + y;
            *reinterpret_cast<unsigned*>(weights + swizzled(row, column / 8) + column % 8 * 2) = pack_bf16(x, y);
        }
        show_to_tensor_cores();
        if (__any_sync(FULL_WARP, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 128; ++i) sums[i] *= shrink[i / 2 % 2];
        }
        __syncthreads();  // the weights are complete
        products_begin();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            const Descriptor a = describe(weights, 16, 1024), b = describe(tile + group * 4 * CHUNK_BYTES, CHUNK_BYTES, 1024);
            product<256, true>(sums, moved(a, step * 32), moved(b, step * 2048), 1);
        }
        products_commit();
        products_wait();
    }
    copy_wait<0>();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row_sum[half] += __shfl_xor_sync(FULL_WARP, row_sum[half], 1);
        row_sum[half] += __shfl_xor_sync(FULL_WARP, row_sum[half], 2);
        if (lane % 4 == 0) sum_of[group * ROWS + row0 + half * 8] = row_sum[half];
        if (PAIR && group == 0 && lane % 4 == 0) max_of[row0 + half * 8] = row_max[half];
    }
    __syncthreads();
#ifndef PARITREE_EMULATOR  // it runs blocks one after the other
    if constexpr (PAIR) {
        // Each block of the pair finishes 256 of the columns: it gets the other's sums of those, and gives its own of the rest.
        const unsigned own = blockIdx.y;
        float* given = reinterpret_cast<float*>(key_tiles);  // [32][128 threads][4]
        float* stats = given + 64 * 256;                     // [2][ROWS], maxima and sums of the other block
        if (thread < ROWS) sum_of[thread] += sum_of[ROWS + thread];
        pair_barrier();  // both are done with their tiles
        if (group != own) {
            const unsigned target = in_other_block(given, own ^ 1) + (thread % 128) * 16;
#pragma unroll
            for (int i = 0; i < 32; ++i) store_in_other_block(target + i * 2048, sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
            if (thread % 128 < 2 * ROWS / 4) {
                const float4 x = *reinterpret_cast<const float4*>((thread % 128 < ROWS / 4 ? max_of : sum_of) + thread % (ROWS / 4) * 4);
                store_in_other_block(in_other_block(stats, own ^ 1) + thread % 128 * 16, x.x, x.y, x.z, x.w);
            }
        }
        pair_barrier();
        if (group != own) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + half * 8;
            if (first_row + row >= query_rows) continue;
            const float other_max = stats[row], top = fmaxf(row_max[half], other_max), base = top == minus_infinity() ? 0.0f : top;
            const float mine = exp2f(row_max[half] - base), theirs = exp2f(other_max - base);
            const float total = sum_of[row] * mine + stats[ROWS + row] * theirs;
            const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
            float* target = out + static_cast<long long>(first_row + row) * RANK + group * 256 + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < 32; ++n) {
                const float2 x = *reinterpret_cast<const float2*>(given + n * 512 + thread % 128 * 4 + half * 2);
                *reinterpret_cast<float2*>(target + n * 8) =
                    make_float2((sums[n * 4 + half * 2] * mine + x.x * theirs) * inverse, (sums[n * 4 + half * 2 + 1] * mine + x.y * theirs) * inverse);
            }
        }
        return;
    }
#endif
    const bool final = gridDim.y == 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = row0 + half * 8;
        if (first_row + row >= query_rows) continue;
        const float total = sum_of[row] + sum_of[ROWS + row];
        const long long at = static_cast<long long>(blockIdx.y) * query_rows + first_row + row;
        if (!final && group == 0 && lane % 4 == 0) {
            part_stat[at * 2] = row_max[half];
            part_stat[at * 2 + 1] = total;
        }
        const float inverse = final ? (total > 0.0f ? 1.0f / total : 0.0f) : 1.0f;
        float* target = (final ? out + static_cast<long long>(first_row + row) * RANK : part_out + at * RANK) + group * 256 + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < 32; ++n)
            *reinterpret_cast<float2*>(target + n * 8) = make_float2(sums[n * 4 + half * 2] * inverse, sums[n * 4 + half * 2 + 1] * inverse);
    }
}

}  // namespace wgmma_tile
}  // namespace paritree

// grid (ceil(rows * heads / 64), splits), block 256; parameters as tree_attention_tiled_f32
extern "C" __global__ void __launch_bounds__(256, 1)
tree_attention_wgmma_bf16(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask, int mask_words,
                          const unsigned* seen, int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out,
                          float* part_out, float* part_stat, const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::wgmma_tile::tree_attention<false>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys,
                                                  keys_per_split, scale, out, part_out, part_stat);
}

#ifndef PARITREE_EMULATOR
// grid (ceil(rows * heads / 64), 2): the same for two splits, which the pair of blocks joins; no parts are written
extern "C" __global__ void __launch_bounds__(256, 1) __cluster_dims__(1, 2, 1)
tree_attention_wgmma_pair_bf16(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask, int mask_words,
                          const unsigned* seen, int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out,
                          float* part_out, float* part_stat, const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::wgmma_tile::tree_attention<true>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys,
                                                  keys_per_split, scale, out, part_out, part_stat);
}
#endif

#endif
