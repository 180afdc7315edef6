// Absorbed-MLA tree attention on bfloat16 operands with tensor cores (mma.sync, sm_80 and later): answers spec/ops/tree_attention.py.
//
//   query  [rows, heads, 576] bfloat16    cache [keys, 576] bfloat16, or paged    mask, out: as in tree_attention_f32.cuh; out is float32
//
// Scores, running maxima and sums, and the output accumulate in float32; the unnormalised weights are rounded to bfloat16 before they meet
// the latents (a profile has to say so: u_input covers it), their sum is not. exp2 with log2(e) folded into the scale.
//   tree_attention_plain_bf16    one block per (row, head), any sizes, weights not rounded
//   tree_attention_mma_bf16      kv_rank 512, rope_dim 64, tiles of 16 keys: 66 KiB of shared memory
//   tree_attention_mma32_bf16    the same with tiles of 32 keys: half as many barriers, 113 KiB (not on sm_120)
#pragma once
#include "tree_attention_f32.cuh"

namespace paritree {
namespace mma_bf16_tile {
constexpr int RANK = 512, WIDTH = 576, ROWS = 64, THREADS = 256;
constexpr int STRIDE = 584;           // of a key row: an odd number of 16-byte units, so that ldmatrix rows fall into different banks
constexpr int SLICES = 4, SLICE = WIDTH / SLICES, STEPS = SLICE / 16;
constexpr int COLUMNS = RANK / SLICES;  // output columns of a warp
template <int KEYS>
struct Layout {
    static constexpr int WEIGHT_STRIDE = KEYS + 8;
    static constexpr int TILE_BYTES = KEYS * STRIDE * 2, PART_FLOATS = ROWS * KEYS;
    static constexpr int PART_BYTES = SLICES * PART_FLOATS * 4, WEIGHT_BYTES = ROWS * WEIGHT_STRIDE * 2;
    static constexpr int BYTES = 2 * TILE_BYTES + PART_BYTES + WEIGHT_BYTES + 2 * ROWS * 4;
};
static_assert(Layout<16>::BYTES == 57344 && Layout<16>::BYTES <= 101376, "sm_120 grants 99 KiB a block; impls/cuda/kernels.py has the number");
static_assert(Layout<32>::BYTES == 113152, "impls/cuda/kernels.py has the number");
}  // namespace mma_bf16_tile

// Column of a partial score in a row of KEYS floats: four rows that are written together, and two that are read, fall into different banks.
template <int KEYS>
PARITREE_INLINE int banked(int row, int key) {
    return KEYS == 16 ? key ^ ((row >> 1 & 1) << 3) : key ^ ((row & 1) << 4 | (row >> 1 & 1) << 3);
}

// 8 warps: for the scores 2 groups of 32 rows x 4 slices of 144 products, whose partial sums meet in shared memory; for the values the same
// groups of rows x 4 groups of 128 columns. The query stays in registers (72 a thread), as does the output (128).
// grid (ceil(rows * heads / 64), splits), as tree_attention_tiled_f32.
template <int KEYS>
PARITREE_INLINE void tree_attention_mma(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask,
                                        int mask_words, const unsigned* seen, int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out,
                                        float* part_out, float* part_stat) {
    using namespace mma_bf16_tile;
    using L = Layout<KEYS>;
    PARITREE_SHARED(unsigned char, memory);
    unsigned short* tiles = reinterpret_cast<unsigned short*>(memory);                            // [2][KEYS][STRIDE]
    float* parts = reinterpret_cast<float*>(memory + 2 * L::TILE_BYTES);                          // [SLICES][ROWS][PART_STRIDE]
    unsigned short* weights = reinterpret_cast<unsigned short*>(memory + 2 * L::TILE_BYTES + L::PART_BYTES);  // [ROWS][WEIGHT_STRIDE]
    float* shrink_of = reinterpret_cast<float*>(memory + 2 * L::TILE_BYTES + L::PART_BYTES + L::WEIGHT_BYTES);  // [ROWS]
    float* sum_of = shrink_of + ROWS;                                                             // [ROWS], at the end

    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int row_group = (warp >> 2) * 32, quarter = warp & 3;
    const int first_row = blockIdx.x * ROWS;
    const int begin = blockIdx.y * keys_per_split, end = min(keys, begin + keys_per_split);
    const int soft_row = thread >> 2, soft_part = thread & 3, soft_query = first_row + soft_row;
    const unsigned* mask_row = mask + static_cast<long long>(min(soft_query, query_rows - 1) / heads) * mask_words;
    const float scale2 = scale * LOG2_E;

    auto load_tile = [&](int start, unsigned short* target) {
        constexpr int TEAM = THREADS / KEYS;  // threads that share a key
        const int key = thread / TEAM, first = thread % TEAM * 8;
        const bool valid = start + key < end && is_read(seen, prefix_len, start + key);
        const unsigned short* source = cache_row(cache, pages, page_size, WIDTH, valid ? start + key : begin);
#pragma unroll
        for (int column = 0; column < WIDTH; column += TEAM * 8)
            if (WIDTH % (TEAM * 8) == 0 || first + column < WIDTH) copy16_async(target + key * STRIDE + first + column, source + first + column, valid);
    };

    if (begin < end) load_tile(begin, tiles);
    copy_commit();
    unsigned q[2][STEPS][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first_row + row_group + m * 16 + lane / 4 + (i & 1) * 8;
                const int column = quarter * SLICE + step * 16 + 2 * (lane & 3) + (i >> 1) * 8;
                q[m][step][i] = row < query_rows ? *reinterpret_cast<const unsigned*>(query + static_cast<long long>(row) * WIDTH + column) : 0u;
            }
    float sums[2][16][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    float row_max = minus_infinity(), row_sum = 0.0f;

    int buffer = 0;
    for (int start = begin; start < end; start += KEYS, buffer ^= 1) {
        const unsigned short* tile = tiles + buffer * KEYS * STRIDE;
        copy_wait<0>();
        __syncthreads();  // the tile has arrived, and every warp is done with the other one, the weights and the shrink factors
        if (start + KEYS < end) load_tile(start + KEYS, tiles + (buffer ^ 1) * KEYS * STRIDE);
        copy_commit();

        // scores of 32 rows x 16 keys over this warp's slice
#pragma unroll
        for (int group = 0; group < KEYS / 16; ++group) {
            float part[2][2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) part[m][n][i] = 0.0f;
            const unsigned short* address =
                tile + (group * 16 + (lane & 7) + (lane >> 4) * 8) * STRIDE + quarter * SLICE + ((lane >> 3) & 1) * 8;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                unsigned b[4];
                load_matrices<false>(b, address + step * 16);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma_bf16(part[m][0], q[m][step], b[0], b[1]);
                    mma_bf16(part[m][1], q[m][step], b[2], b[3]);
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int row = row_group + m * 16 + lane / 4;
                    float* target = parts + quarter * L::PART_FLOATS + row * KEYS + banked<KEYS>(row, group * 16 + n * 8 + 2 * (lane & 3));
                    *reinterpret_cast<float2*>(target) = make_float2(part[m][n][0], part[m][n][1]);
                    *reinterpret_cast<float2*>(target + 8 * KEYS) = make_float2(part[m][n][2], part[m][n][3]);  // row + 8 has the same order
                }
        }
        __syncthreads();
        {
            constexpr int OWN = KEYS / 4;
            const bool whole = start + KEYS <= min(end, prefix_len);  // every key of the tile is visible to every row
            float own[OWN], top = row_max;
#pragma unroll
            for (int i = 0; i < OWN; i += 4) {
                const int key = soft_part * 4 + i * 4;  // four keys at a time, so that a row's threads read neighbouring vectors
                const float* source = parts + soft_row * KEYS + banked<KEYS>(soft_row, key);
                float4 x = *reinterpret_cast<const float4*>(source);
#pragma unroll
                for (int s = 1; s < SLICES; ++s) {
                    const float4 y = *reinterpret_cast<const float4*>(source + s * L::PART_FLOATS);
                    x.x += y.x;
                    x.y += y.y;
                    x.z += y.z;
                    x.w += y.w;
                }
                const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = start + key + j;
                    own[i + j] = whole || (at < end && soft_query < query_rows && sees(mask_row, prefix_len, at)) ? values[j] * scale2 : minus_infinity();
                    top = fmaxf(top, own[i + j]);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
            const float base = top == minus_infinity() ? 0.0f : top;  // nothing visible yet
            const float shrink = exp2f(row_max - base);
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < OWN; i += 4) {
                float w[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    w[j] = exp2f(own[i + j] - base);
                    total += w[j];
                }
                unsigned* target = reinterpret_cast<unsigned*>(weights + soft_row * L::WEIGHT_STRIDE + soft_part * 4 + i * 4);
                target[0] = pack_bf16(w[0], w[1]);
                target[1] = pack_bf16(w[2], w[3]);
            }
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            row_sum = row_sum * shrink + total;
            row_max = top;
            if (soft_part == 0) shrink_of[soft_row] = shrink;
        }
        __syncthreads();
        float shrink[2][2];
        bool moved = false;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                shrink[m][half] = shrink_of[row_group + m * 16 + lane / 4 + half * 8];
                moved = moved || shrink[m][half] != 1.0f;
            }
        if (__any_sync(FULL_WARP, moved)) {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 16; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[m][n][i] *= shrink[m][i >> 1];
        }
        // values: 32 rows x 128 columns
#pragma unroll
        for (int group = 0; group < KEYS / 16; ++group) {
            unsigned a[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
                load_matrices<false>(a[m], weights + (row_group + m * 16 + (lane & 15)) * L::WEIGHT_STRIDE + group * 16 + (lane >> 4) * 8);
            const unsigned short* address = tile + (group * 16 + (lane & 15)) * STRIDE + quarter * COLUMNS + (lane >> 4) * 8;
#pragma unroll
            for (int n = 0; n < 16; n += 2) {
                unsigned b[4];
                load_matrices<true>(b, address + n * 8);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma_bf16(sums[m][n], a[m], b[0], b[1]);
                    mma_bf16(sums[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
    copy_wait<0>();
    __syncthreads();  // the last shrink factors are read
    if (soft_part == 0) {
        sum_of[soft_row] = row_sum;
        shrink_of[soft_row] = row_max;
    }
    __syncthreads();
    const bool final = gridDim.y == 1;
    if (!final && thread < ROWS && first_row + thread < query_rows) {
        float* stat = part_stat + (static_cast<long long>(blockIdx.y) * query_rows + first_row + thread) * 2;
        stat[0] = shrink_of[thread];
        stat[1] = sum_of[thread];
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_group + m * 16 + lane / 4 + half * 8;
            if (first_row + row >= query_rows) continue;
            const float inverse = final ? (sum_of[row] > 0.0f ? 1.0f / sum_of[row] : 0.0f) : 1.0f;
            float* target = (final ? out + static_cast<long long>(first_row + row) * RANK
                                   : part_out + (static_cast<long long>(blockIdx.y) * query_rows + first_row + row) * RANK) +
                            quarter * COLUMNS + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < 16; ++n)
                *reinterpret_cast<float2*>(target + n * 8) = make_float2(sums[m][n][2 * half] * inverse, sums[m][n][2 * half + 1] * inverse);
        }
}

}  // namespace paritree

extern "C" __global__ void __launch_bounds__(128)
tree_attention_plain_bf16(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask, int mask_words,
                          int heads, int kv_rank, int width, int prefix_len, int keys, float scale, float* out, const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_plain(query, cache, pages, page_size, mask, mask_words, heads, kv_rank, width, prefix_len, keys, scale, out);
}

extern "C" __global__ void __launch_bounds__(256, 1)
tree_attention_mma_bf16(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, const unsigned* seen,
                        int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out, float* part_stat,
                        const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_mma<16>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys, keys_per_split, scale, out,
                                     part_out, part_stat);
}

extern "C" __global__ void __launch_bounds__(256, 1)
tree_attention_mma32_bf16(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, const unsigned* seen,
                          int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out,
                          float* part_stat, const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_mma<32>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys, keys_per_split, scale, out,
                                     part_out, part_stat);
}

// grid-stride over `count`: float32 -> bfloat16 bits, to nearest even
extern "C" __global__ void cast_bf16(const float* x, unsigned short* out, long long count) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) out[i] = paritree::to_bf16(x[i]);
}
