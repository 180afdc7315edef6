// Absorbed-MLA tree attention in float32 on tensor cores (mma.sync, sm_80 and later): answers spec/ops/tree_attention.py. Tensors as in
// tree_attention_f32.cuh.
//
//   tree_attention_split16_f32   kv_rank 512, rope_dim 64, 32 query rows and tiles of 16 keys: 99 KiB of shared memory
//   tree_attention_split32_f32   the same with tiles of 32 keys: half as many barriers, 220 KiB (sm_90)
//
// A float32 is the exact sum of three bfloat16: a = a1 + a2 + a3, a1 = bf16(a), a2 = bf16(a - a1), a3 = a - a1 - a2 (24 bits in three times
// eight). A product is six of the nine products of parts, each exact, summed in float32 from the small ones to the large one:
//   a1 b3 + a2 b2 + a3 b1 + a1 b2 + a2 b1 + a1 b1
// Why this stays within the bound of float32 sums (u = 2^-24, rounding to nearest), although tensor cores cut: an addition there is off by up
// to 2u of its result.
//   parts    |a2| <= 2^-8, |a3| <= 2^-17 of a's power of two: a2 b3 + a3 b2 + a3 b3, left out, are below (1 + 2^-9) u |ab|
//   scores   each of eight warps sums 72 of the 576 products in 27 or 33 additions that cut, joined by 7 that round: at most
//            (2 * 30 + 7 + 1) u sum |q||k|, where the bound allows (576 + 2) u whatever the operands are
//   values   each 16 keys are summed on their own, smallest parts first, and then added to the output, rounding to nearest. Only the last of
//            the six additions meets sums of full size, so that n visible keys in b <= n groups give at most
//            (2 + 1 + b - 1) u sum p|c| plus terms of 2^-8 u. The bound allows n u for this sum and n u for the denominator
//   weights  w <= 1 is split like any operand; the denominator sums the unsplit ones
// Operands whose parts underflow (below 2^-110) lose less than 2^-133 of their value's unit: FLUSH of the bound covers it. The largest
// finite numbers do not become infinite parts (cvt.satfinite); infinities and NaN give NaN.
#pragma once
#include "tree_attention_bf16.cuh"

namespace paritree {
namespace split_tile {
constexpr int RANK = 512, WIDTH = 576, ROWS = 32, THREADS = 256, WARPS = 8;
constexpr int SLICE = WIDTH / WARPS;   // products of a score that a warp sums: four steps of 16 and one of 8
constexpr int STEPS = SLICE / 16;
constexpr int COLUMNS = RANK / WARPS;  // output columns of a warp
constexpr int STRIDE = 584;            // of a key row of parts: an odd number of 16-byte units, so that ldmatrix rows fall into different banks
template <int KEYS>
struct Layout {
    static constexpr int PART = KEYS * STRIDE, WEIGHT_STRIDE = KEYS + 8, WEIGHT_PART = ROWS * WEIGHT_STRIDE;  // elements
    static constexpr bool SHARES = KEYS == 16;  // the partial scores lie over the float32 tile, whose loads then start after the softmax
    static constexpr int TILE_BYTES = 3 * PART * 2, RAW_BYTES = KEYS * WIDTH * 4, SCORE_BYTES = WARPS * ROWS * KEYS * 4, WEIGHT_BYTES = 3 * WEIGHT_PART * 2;
    static constexpr int BYTES = TILE_BYTES + RAW_BYTES + (SHARES ? 0 : SCORE_BYTES) + WEIGHT_BYTES + 2 * ROWS * 4;
};
static_assert(Layout<16>::BYTES == 97792 && Layout<16>::BYTES <= 101376, "sm_120 grants 99 KiB a block; impls/cuda/kernels.py has the number");
static_assert(Layout<32>::BYTES == 226560 && Layout<32>::BYTES <= 232448, "sm_90 grants 227 KiB a block; impls/cuda/kernels.py has the number");
static_assert(Layout<16>::SCORE_BYTES <= Layout<16>::RAW_BYTES, "the partial scores share the float32 tile");

PARITREE_INLINE float low_of(unsigned pair) { return __uint_as_float(pair << 16); }
PARITREE_INLINE float high_of(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// (x, y) as three pairs of bfloat16 whose sums are x and y exactly
PARITREE_INLINE void split_pair(float x, float y, unsigned& first, unsigned& second, unsigned& third) {
    first = pack_bf16_finite(x, y);
    x -= low_of(first);
    y -= high_of(first);
    second = pack_bf16(x, y);
    third = pack_bf16(x - low_of(second), y - high_of(second));
}
}  // namespace split_tile

// The part of a (first index) and of b (second) of each product, from the smallest to the largest
#define PARITREE_SPLIT_PRODUCTS(X) X(0, 2) X(1, 1) X(2, 0) X(0, 1) X(1, 0) X(0, 0)

// 8 warps: for the scores each sums 72 of the products of all rows and keys, and the partial sums meet in shared memory; for the values each
// owns 64 columns. The query (72 registers a thread) and the output (64) stay in registers.
// grid (ceil(rows * heads / 32), splits), as tree_attention_tiled_f32.
template <int KEYS>
PARITREE_INLINE void tree_attention_split(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask,
                                          int mask_words, const unsigned* seen, int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale,
                                          float* out, float* part_out, float* part_stat) {
    using namespace split_tile;
    using L = Layout<KEYS>;
    constexpr int GROUPS = KEYS / 16;  // of 16 keys
    PARITREE_SHARED(unsigned char, memory);
    unsigned short* tile = reinterpret_cast<unsigned short*>(memory);             // [3][KEYS][STRIDE], the parts
    float* raw = reinterpret_cast<float*>(memory + L::TILE_BYTES);                // [KEYS][WIDTH], on its way
    float* scores = L::SHARES ? raw : raw + L::RAW_BYTES / 4;                     // [WARPS][ROWS][KEYS]
    unsigned short* weights = reinterpret_cast<unsigned short*>(memory + L::BYTES - 2 * ROWS * 4 - L::WEIGHT_BYTES);  // [3][ROWS][WEIGHT_STRIDE]
    float* shrink_of = reinterpret_cast<float*>(memory + L::BYTES - 2 * ROWS * 4);  // [ROWS]
    float* sum_of = shrink_of + ROWS;                                             // [ROWS], at the end

    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int first_row = blockIdx.x * ROWS;
    const int begin = blockIdx.y * keys_per_split, end = min(keys, begin + keys_per_split);
    const int soft_row = thread >> 3, soft_part = thread & 7, soft_query = first_row + soft_row;
    const unsigned* mask_row = mask + static_cast<long long>(min(soft_query, query_rows - 1) / heads) * mask_words;
    const float scale2 = scale * LOG2_E;

    // Each thread splits what it has loaded itself, so that no barrier is needed in between.
    constexpr int UNITS = WIDTH / 4;  // of 16 bytes
    auto load_tile = [&](int start) {
        int key = thread / UNITS, unit = thread % UNITS;
        for (int i = thread; i < KEYS * UNITS; i += THREADS) {
            const bool valid = start + key < end && is_read(seen, prefix_len, start + key);
            copy16_async(raw + i * 4, cache_row(cache, pages, page_size, WIDTH, valid ? start + key : begin) + unit * 4, valid);
            unit += THREADS - UNITS;
            key += 1;
            if (unit >= UNITS) {
                unit -= UNITS;
                key += 1;
            }
        }
    };
    auto split_tile_of_keys = [&]() {
        int key = thread / UNITS, unit = thread % UNITS;
#pragma unroll
        for (int i = thread; i < KEYS * UNITS; i += THREADS) {
            const float4 x = *reinterpret_cast<const float4*>(raw + i * 4);
            uint2 part[3];
            split_pair(x.x, x.y, part[0].x, part[1].x, part[2].x);
            split_pair(x.z, x.w, part[0].y, part[1].y, part[2].y);
#pragma unroll
            for (int p = 0; p < 3; ++p) *reinterpret_cast<uint2*>(tile + p * L::PART + key * STRIDE + unit * 4) = part[p];
            unit += THREADS - UNITS;
            key += 1;
            if (unit >= UNITS) {
                unit -= UNITS;
                key += 1;
            }
        }
    };

    if (begin < end) load_tile(begin);
    copy_commit();
    float2 q[2][STEPS][4], q_last[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + m * 16 + lane / 4 + half * 8;
            const float* source = query + static_cast<long long>(row) * WIDTH + warp * SLICE + 2 * (lane & 3);
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    q[m][step][i * 2 + half] = row < query_rows ? *reinterpret_cast<const float2*>(source + step * 16 + i * 8) : make_float2(0.0f, 0.0f);
            q_last[m][half] = row < query_rows ? *reinterpret_cast<const float2*>(source + STEPS * 16) : make_float2(0.0f, 0.0f);
        }
    float sums[2][COLUMNS / 8][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    float row_max = minus_infinity(), row_sum = 0.0f;

    for (int start = begin; start < end; start += KEYS) {
        copy_wait<0>();
        __syncthreads();  // every warp is done with the parts, the weights and the shrink factors of the tile before
        split_tile_of_keys();
        if (!L::SHARES && start + KEYS < end) load_tile(start + KEYS);
        if (!L::SHARES) copy_commit();
        __syncthreads();

        // scores of 32 rows over this warp's slice
        {
            float part[2][2 * GROUPS][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 2 * GROUPS; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) part[m][n][i] = 0.0f;
            const unsigned short* address = tile + ((lane & 7) + (lane >> 4) * 8) * STRIDE + warp * SLICE + ((lane >> 3) & 1) * 8;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                unsigned a[2][3][4], b[3][GROUPS][4];
#pragma unroll
                for (int p = 0; p < 3; ++p)
#pragma unroll
                    for (int group = 0; group < GROUPS; ++group) load_matrices<false>(b[p][group], address + p * L::PART + group * 16 * STRIDE + step * 16);
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) split_pair(q[m][step][i].x, q[m][step][i].y, a[m][0][i], a[m][1][i], a[m][2][i]);
#define PARITREE_PRODUCT(of_a, of_b)                                                                                      \
    _Pragma("unroll") for (int m = 0; m < 2; ++m) _Pragma("unroll") for (int n = 0; n < 2 * GROUPS; ++n)                  \
        mma_bf16(part[m][n], a[m][of_a], b[of_b][n / 2][n % 2 * 2], b[of_b][n / 2][n % 2 * 2 + 1]);
                PARITREE_SPLIT_PRODUCTS(PARITREE_PRODUCT)
#undef PARITREE_PRODUCT
            }
            {  // the last eight columns
                unsigned a[2][3][2], b[3][4];
                const unsigned short* last = tile + lane % KEYS * STRIDE + warp * SLICE + STEPS * 16;
#pragma unroll
                for (int p = 0; p < 3; ++p) load_matrices<false>(b[p], last + p * L::PART);
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) split_pair(q_last[m][i].x, q_last[m][i].y, a[m][0][i], a[m][1][i], a[m][2][i]);
#define PARITREE_PRODUCT(of_a, of_b)                                                                                      \
    _Pragma("unroll") for (int m = 0; m < 2; ++m) _Pragma("unroll") for (int n = 0; n < 2 * GROUPS; ++n)                  \
        mma_bf16(part[m][n], a[m][of_a], b[of_b][n]);
                PARITREE_SPLIT_PRODUCTS(PARITREE_PRODUCT)
#undef PARITREE_PRODUCT
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = m * 16 + half * 8 + lane / 4;
                    float* target = scores + (warp * ROWS + row) * KEYS;
#pragma unroll
                    for (int n = 0; n < 2 * GROUPS; ++n)
                        *reinterpret_cast<float2*>(target + banked<KEYS>(row, n * 8 + 2 * (lane & 3))) =
                            make_float2(part[m][n][2 * half], part[m][n][2 * half + 1]);
                }
        }
        __syncthreads();
        {  // eight threads a row
            constexpr int OWN = KEYS / 8;
            float own[OWN], top = row_max;
            const float* source = scores + soft_row * KEYS + banked<KEYS>(soft_row, soft_part * OWN);
#pragma unroll
            for (int i = 0; i < OWN; ++i) own[i] = 0.0f;
#pragma unroll
            for (int s = 0; s < WARPS; ++s) {
                if constexpr (OWN == 4) {
                    const float4 more = *reinterpret_cast<const float4*>(source + s * ROWS * KEYS);
                    own[0] += more.x;
                    own[1] += more.y;
                    own[2] += more.z;
                    own[3] += more.w;
                } else {
                    const float2 more = *reinterpret_cast<const float2*>(source + s * ROWS * KEYS);
                    own[0] += more.x;
                    own[1] += more.y;
                }
            }
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const int at = start + soft_part * OWN + i;
                own[i] = at < end && soft_query < query_rows && sees(mask_row, prefix_len, at) ? own[i] * scale2 : minus_infinity();
                top = fmaxf(top, own[i]);
            }
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 4));
            const float base = top == minus_infinity() ? 0.0f : top;  // nothing visible so far
            const float shrink = exp2f(row_max - base);
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < OWN; i += 2) {
                const float x = exp2f(own[i] - base), y = exp2f(own[i + 1] - base);
                total += x + y;
                unsigned part[3];
                split_pair(x, y, part[0], part[1], part[2]);
#pragma unroll
                for (int p = 0; p < 3; ++p)
                    *reinterpret_cast<unsigned*>(weights + p * L::WEIGHT_PART + soft_row * L::WEIGHT_STRIDE + soft_part * OWN + i) = part[p];
            }
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            total += __shfl_xor_sync(FULL_WARP, total, 4);
            row_sum = row_sum * shrink + total;
            row_max = top;
            if (soft_part == 0) shrink_of[soft_row] = shrink;
        }
        __syncthreads();
        if (L::SHARES && start + KEYS < end) load_tile(start + KEYS);
        if (L::SHARES) copy_commit();
        float shrink[2][2];
        bool moved = false;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                shrink[m][half] = shrink_of[m * 16 + lane / 4 + half * 8];
                moved = moved || shrink[m][half] != 1.0f;
            }
        if (__any_sync(FULL_WARP, moved)) {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[m][n][i] *= shrink[m][i >> 1];
        }
        // values: 32 rows x 64 columns
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            unsigned a[2][3][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int p = 0; p < 3; ++p)
                    load_matrices<false>(a[m][p], weights + p * L::WEIGHT_PART + (m * 16 + (lane & 15)) * L::WEIGHT_STRIDE + group * 16 + (lane >> 4) * 8);
            const unsigned short* address = tile + (group * 16 + (lane & 15)) * STRIDE + warp * COLUMNS + (lane >> 4) * 8;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n += 2) {
                unsigned b[3][4];
#pragma unroll
                for (int p = 0; p < 3; ++p) load_matrices<true>(b[p], address + p * L::PART + n * 8);
                float fresh[2][2][4];
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
#pragma unroll
                        for (int i = 0; i < 4; ++i) fresh[m][j][i] = 0.0f;
#define PARITREE_PRODUCT(of_a, of_b)                                                                           \
    _Pragma("unroll") for (int m = 0; m < 2; ++m) _Pragma("unroll") for (int j = 0; j < 2; ++j)                \
        mma_bf16(fresh[m][j], a[m][of_a], b[of_b][j * 2], b[of_b][j * 2 + 1]);
                PARITREE_SPLIT_PRODUCTS(PARITREE_PRODUCT)
#undef PARITREE_PRODUCT
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[m][n + j][i] += fresh[m][j][i];
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
            const int row = m * 16 + lane / 4 + half * 8;
            if (first_row + row >= query_rows) continue;
            const float inverse = final ? (sum_of[row] > 0.0f ? 1.0f / sum_of[row] : 0.0f) : 1.0f;
            float* target = (final ? out + static_cast<long long>(first_row + row) * RANK
                                   : part_out + (static_cast<long long>(blockIdx.y) * query_rows + first_row + row) * RANK) +
                            warp * COLUMNS + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n)
                *reinterpret_cast<float2*>(target + n * 8) = make_float2(sums[m][n][2 * half] * inverse, sums[m][n][2 * half + 1] * inverse);
        }
}

}  // namespace paritree

extern "C" __global__ void __launch_bounds__(256, 1)
tree_attention_split16_f32(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, const unsigned* seen, int heads,
                           int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out, float* part_stat,
                           const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_split<16>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys, keys_per_split, scale, out,
                                       part_out, part_stat);
}

extern "C" __global__ void __launch_bounds__(256, 1)
tree_attention_split32_f32(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, const unsigned* seen, int heads,
                           int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out, float* part_stat,
                           const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_split<32>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys, keys_per_split, scale, out,
                                       part_out, part_stat);
}
