// Absorbed-MLA tree attention in float32 on tensor cores (mma.sync, sm_80 and later): answers spec/ops/tree_attention.py. Tensors as in
// tree_attention_f32.cuh.
//
//   tree_attention_split16_f32   kv_rank 512, rope_dim 64, 32 query rows and tiles of 16 keys: 96 KiB of shared memory, 8 warps
//   tree_attention_split32_f32   the same with tiles of 32 keys: half as many barriers, and 16 warps hide what the others wait for; 221 KiB (sm_90)
//
// A float32 is the exact sum of three bfloat16: a = a1 + a2 + a3, a1 = bf16(a), a2 = bf16(a - a1), a3 = a - a1 - a2 (24 bits in three times
// eight). A product is six of the nine products of parts, each exact, summed in float32 from the small ones to the large one:
//   a1 b3 + a2 b2 + a3 b1 + a1 b2 + a2 b1 + a1 b1
// Why this stays within the bound of float32 sums (u = 2^-24, rounding to nearest), although tensor cores cut: of an addition of k terms they keep
// two bits more than float32 has and cut the rest, so that it is off by 2 u of its result and u / 2 of the largest term for each term that is not
// zero (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021; seen on an H200 too: beside 1, products of 2^-25 all count, of 2^-26 none.
// tests/impls/test_cuda_kernels.py asks any other GPU).
//   parts    |a2| <= 2^-8, |a3| <= 2^-17 of a's power of two: a2 b3 + a3 b2 + a3 b3, left out, are below (1 + 2^-9) u |ab|
//   scores   each of eight warps sums 72 of the 576 products in 30 additions of 17 terms, joined by 7 that round to nearest: at most
//            (30 * (2 + 17 / 2) + 7 + 1) u = 323 u of sum |q||k|, where the bound allows (576 + 2) u whatever the operands are
//   values   each 16 keys are summed on their own, smallest parts first, and then added to the output, rounding to nearest. Only the last of
//            the six additions meets sums of full size. n visible keys in g groups, at most k of them in one (g + k <= n + 1), give
//            (1 + 2 + (k + 1) / 2 + g - 1) u of sum p|c|, the denominator at most (n - 1) u (adding 0 is exact), its inverse and the product 2 u:
//            together (2 n + 4) u at most. The bound allows 2 n u for these two sums, 3 u for the quotient, and 2 ulp for an exponential (twice) of
//            which exp2f takes 2^-22.5: (2 n + 5.3) u. One visible key gives its latent exactly
//   weights  w <= 1 is split like any operand; the denominator sums the unsplit ones
// Parts below 2^-126 may be lost, and all below 2^-133 are: FLUSH of the bound covers them. The largest finite numbers do not become infinite
// parts (cvt.satfinite); an infinity or NaN that is seen gives NaN.
#pragma once
#include "tree_attention_bf16.cuh"

namespace paritree {
namespace split_tile {
constexpr int RANK = 512, WIDTH = 576, ROWS = 32, SLICES = 8;
constexpr int SLICE = WIDTH / SLICES;  // products of a score that a warp sums: four steps of 16 and one of 8
constexpr int STEPS = SLICE / 16;
constexpr int COLUMNS = RANK / SLICES;  // output columns of a warp
constexpr int UNITS = WIDTH / 4;        // 16 bytes of a float32 key
constexpr int STRIDE = 584;             // of a key row of parts: an odd number of 16-byte units, so that ldmatrix rows fall into different banks
// M: groups of 16 rows of a warp. SHARES: the partial scores lie over the float32 tile, whose loads then start after the softmax.
template <int KEYS, int M, bool SHARES>
struct Layout {
    static constexpr int THREADS = 32 * SLICES * (2 / M);
    static constexpr int TEAM = THREADS / KEYS;  // threads that load and split a key
    static constexpr int PART = KEYS * STRIDE, WEIGHT_STRIDE = KEYS + 8, WEIGHT_PART = ROWS * WEIGHT_STRIDE;  // elements
    static constexpr int TILE_BYTES = 3 * PART * 2, RAW_BYTES = KEYS * WIDTH * 4, SCORE_BYTES = SLICES * ROWS * KEYS * 4, WEIGHT_BYTES = 3 * WEIGHT_PART * 2;
    static constexpr int BYTES = TILE_BYTES + RAW_BYTES + (SHARES ? 0 : SCORE_BYTES) + WEIGHT_BYTES + 2 * ROWS * 4;
    static_assert(!SHARES || SCORE_BYTES <= RAW_BYTES, "the partial scores share the float32 tile");
};
using Small = Layout<16, 2, true>;
using Large = Layout<32, 1, false>;
static_assert(Small::BYTES == 97792 && Small::BYTES <= 101376 && Small::THREADS == 256, "sm_120 grants 99 KiB a block; impls/cuda/kernels.py has the numbers");
static_assert(Large::BYTES == 226560 && Large::BYTES <= 232448 && Large::THREADS == 512, "sm_90 grants 227 KiB a block; impls/cuda/kernels.py has the numbers");

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

// 2 / M groups of 8 warps, each with 16 M rows: for the scores each warp sums 72 of the products of its rows with all keys, and the partial
// sums meet in shared memory; for the values each owns 64 columns. The parts of the query and the output stay in registers.
// grid (ceil(rows * heads / 32), splits), as tree_attention_tiled_f32.
template <int KEYS, int M, bool SHARES>
PARITREE_INLINE void tree_attention_split(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask,
                                          int mask_words, const unsigned* seen, int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale,
                                          float* out, float* part_out, float* part_stat) {
    using namespace split_tile;
    using L = Layout<KEYS, M, SHARES>;
    constexpr int GROUPS = KEYS / 16;  // of 16 keys
    PARITREE_SHARED(unsigned char, memory);
    unsigned short* tile = reinterpret_cast<unsigned short*>(memory);             // [3][KEYS][STRIDE], the parts
    float* raw = reinterpret_cast<float*>(memory + L::TILE_BYTES);                // [KEYS][WIDTH], on its way
    float* scores = SHARES ? raw : raw + L::RAW_BYTES / 4;                        // [SLICES][ROWS][KEYS]
    unsigned short* weights = reinterpret_cast<unsigned short*>(memory + L::BYTES - 2 * ROWS * 4 - L::WEIGHT_BYTES);  // [3][ROWS][WEIGHT_STRIDE]
    float* shrink_of = reinterpret_cast<float*>(memory + L::BYTES - 2 * ROWS * 4);  // [ROWS]
    float* sum_of = shrink_of + ROWS;                                             // [ROWS], at the end

    const int thread = threadIdx.x, slice = thread / 32 % SLICES, lane = thread & 31;
    const int row_group = thread / (32 * SLICES) * 16 * M;
    const int first_row = blockIdx.x * ROWS;
    const int begin = blockIdx.y * keys_per_split, end = min(keys, begin + keys_per_split);
    constexpr int SHARERS = L::THREADS / ROWS, OWN = KEYS / SHARERS;  // threads of a row in the softmax, and keys of each
    const int soft_row = thread / SHARERS, soft_part = thread % SHARERS, soft_query = first_row + soft_row;
    const unsigned* mask_row = mask + static_cast<long long>(min(soft_query, query_rows - 1) / heads) * mask_words;
    const float scale2 = scale * LOG2_E;

    // Each thread splits what it has loaded itself, so that no barrier is needed in between. Where half a warp has two keys, they are four
    // apart: their parts fall into different banks.
    const int team = thread / L::TEAM, unit = thread % L::TEAM;
    const int own_key = L::TEAM == 8 ? (team & 1) * 4 + (team >> 1 & 3) + (team & ~7) : team;
    float* own_raw = raw + own_key * WIDTH + unit * 4;
    unsigned short* own_parts = tile + own_key * STRIDE + unit * 4;
    auto load_tile = [&](int start) {
        const bool valid = start + own_key < end && is_read(seen, prefix_len, start + own_key);
        const float* source = cache_row(cache, pages, page_size, WIDTH, valid ? start + own_key : begin) + unit * 4;
#pragma unroll
        for (int j = 0; j < UNITS; j += L::TEAM)
            if (UNITS % L::TEAM == 0 || unit + j < UNITS) copy16_async(own_raw + j * 4, source + j * 4, valid);
    };
    auto split_own_keys = [&]() {
#pragma unroll
        for (int j = 0; j < UNITS; j += L::TEAM)
            if (UNITS % L::TEAM == 0 || unit + j < UNITS) {
                const float4 x = *reinterpret_cast<const float4*>(own_raw + j * 4);
                uint2 part[3];
                split_pair(x.x, x.y, part[0].x, part[1].x, part[2].x);
                split_pair(x.z, x.w, part[0].y, part[1].y, part[2].y);
#pragma unroll
                for (int p = 0; p < 3; ++p) *reinterpret_cast<uint2*>(own_parts + p * L::PART + j * 4) = part[p];
            }
    };

    if (begin < end) load_tile(begin);
    copy_commit();
    unsigned q[3][M][STEPS][4], q_last[3][M][2];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + row_group + m * 16 + lane / 4 + half * 8;
            const float* source = query + static_cast<long long>(row) * WIDTH + slice * SLICE + 2 * (lane & 3);
            auto pair_at = [&](int column) { return row < query_rows ? *reinterpret_cast<const float2*>(source + column) : make_float2(0.0f, 0.0f); };
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int i = half; i < 4; i += 2) {
                    const float2 x = pair_at(step * 16 + i / 2 * 8);
                    split_pair(x.x, x.y, q[0][m][step][i], q[1][m][step][i], q[2][m][step][i]);
                }
            const float2 x = pair_at(STEPS * 16);
            split_pair(x.x, x.y, q_last[0][m][half], q_last[1][m][half], q_last[2][m][half]);
        }
    float sums[M][COLUMNS / 8][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    float row_max = minus_infinity(), row_sum = 0.0f;

    for (int start = begin; start < end; start += KEYS) {
        copy_wait<0>();
        __syncthreads();  // every warp is done with the parts, the weights and the shrink factors of the tile before
        split_own_keys();
        if (!SHARES && start + KEYS < end) load_tile(start + KEYS);
        if (!SHARES) copy_commit();
        __syncthreads();

        // scores over this warp's slice
        {
            float part[M][2 * GROUPS][4];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < 2 * GROUPS; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) part[m][n][i] = 0.0f;
            const unsigned short* address = tile + ((lane & 7) + (lane >> 4) * 8) * STRIDE + slice * SLICE + ((lane >> 3) & 1) * 8;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                unsigned b[3][GROUPS][4];
#pragma unroll
                for (int p = 0; p < 3; ++p)
#pragma unroll
                    for (int group = 0; group < GROUPS; ++group) load_matrices<false>(b[p][group], address + p * L::PART + group * 16 * STRIDE + step * 16);
#define PARITREE_PRODUCT(of_a, of_b)                                                                                      \
    _Pragma("unroll") for (int m = 0; m < M; ++m) _Pragma("unroll") for (int n = 0; n < 2 * GROUPS; ++n)                  \
        mma_bf16(part[m][n], q[of_a][m][step], b[of_b][n / 2][n % 2 * 2], b[of_b][n / 2][n % 2 * 2 + 1]);
                PARITREE_SPLIT_PRODUCTS(PARITREE_PRODUCT)
#undef PARITREE_PRODUCT
            }
            {  // the last eight columns
                unsigned b[3][4];
                const unsigned short* last = tile + lane % KEYS * STRIDE + slice * SLICE + STEPS * 16;
#pragma unroll
                for (int p = 0; p < 3; ++p) load_matrices<false>(b[p], last + p * L::PART);
#define PARITREE_PRODUCT(of_a, of_b)                                                                                      \
    _Pragma("unroll") for (int m = 0; m < M; ++m) _Pragma("unroll") for (int n = 0; n < 2 * GROUPS; ++n)                  \
        mma_bf16(part[m][n], q_last[of_a][m], b[of_b][n]);
                PARITREE_SPLIT_PRODUCTS(PARITREE_PRODUCT)
#undef PARITREE_PRODUCT
            }
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = row_group + m * 16 + half * 8 + lane / 4;
                    float* target = scores + (slice * ROWS + row) * KEYS;
#pragma unroll
                    for (int n = 0; n < 2 * GROUPS; ++n)
                        *reinterpret_cast<float2*>(target + banked<KEYS>(row, n * 8 + 2 * (lane & 3))) =
                            make_float2(part[m][n][2 * half], part[m][n][2 * half + 1]);
                }
        }
        __syncthreads();
        {
            const bool whole = start + KEYS <= min(end, prefix_len);  // every key of the tile is visible to every row
            float own[OWN], top = row_max;
            const float* source = scores + soft_row * KEYS + banked<KEYS>(soft_row, soft_part * OWN);
#pragma unroll
            for (int i = 0; i < OWN; ++i) own[i] = 0.0f;
#pragma unroll
            for (int s = 0; s < SLICES; ++s) {
                const float* more = source + s * ROWS * KEYS;
                if constexpr (OWN == 4) {
                    const float4 x = *reinterpret_cast<const float4*>(more);
                    own[0] += x.x;
                    own[1] += x.y;
                    own[2] += x.z;
                    own[3] += x.w;
                } else if constexpr (OWN == 2) {
                    const float2 x = *reinterpret_cast<const float2*>(more);
                    own[0] += x.x;
                    own[1] += x.y;
                } else {
                    own[0] += *more;
                }
            }
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const int at = start + soft_part * OWN + i;
                own[i] = whole || (at < end && soft_query < query_rows && sees(mask_row, prefix_len, at)) ? own[i] * scale2 : minus_infinity();
                top = fmaxf(top, own[i]);
            }
#pragma unroll
            for (int step = 1; step < SHARERS; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
            const float base = top == minus_infinity() ? 0.0f : top;  // nothing visible so far
            const float shrink = exp2f(row_max - base);
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < OWN; i += 2) {
                const float x = exp2f(own[i] - base), y = OWN > 1 ? exp2f(own[OWN > 1 ? i + 1 : i] - base) : 0.0f;
                total += x + y;
                unsigned part[3];
                split_pair(x, y, part[0], part[1], part[2]);
#pragma unroll
                for (int p = 0; p < 3; ++p) {
                    unsigned short* target = weights + p * L::WEIGHT_PART + soft_row * L::WEIGHT_STRIDE + soft_part * OWN + i;
                    if constexpr (OWN > 1) *reinterpret_cast<unsigned*>(target) = part[p];
                    else *target = static_cast<unsigned short>(part[p]);
                }
            }
#pragma unroll
            for (int step = 1; step < SHARERS; step *= 2) total += __shfl_xor_sync(FULL_WARP, total, step);
            row_sum = row_sum * shrink + total;
            row_max = top;
            if (soft_part == 0) shrink_of[soft_row] = shrink;
        }
        __syncthreads();
        if (SHARES && start + KEYS < end) load_tile(start + KEYS);
        if (SHARES) copy_commit();
        float shrink[M][2];
        bool moved = false;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                shrink[m][half] = shrink_of[row_group + m * 16 + lane / 4 + half * 8];
                moved = moved || shrink[m][half] != 1.0f;
            }
        if (__any_sync(FULL_WARP, moved)) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[m][n][i] *= shrink[m][i >> 1];
        }
        // values: 64 columns
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            unsigned a[M][3][4];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int p = 0; p < 3; ++p)
                    load_matrices<false>(a[m][p], weights + p * L::WEIGHT_PART + (row_group + m * 16 + (lane & 15)) * L::WEIGHT_STRIDE + group * 16 + (lane >> 4) * 8);
            const unsigned short* address = tile + (group * 16 + (lane & 15)) * STRIDE + slice * COLUMNS + (lane >> 4) * 8;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n += 2) {
                unsigned b[3][4];
#pragma unroll
                for (int p = 0; p < 3; ++p) load_matrices<true>(b[p], address + p * L::PART + n * 8);
                float fresh[M][2][4];
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
#pragma unroll
                        for (int i = 0; i < 4; ++i) fresh[m][j][i] = 0.0f;
#define PARITREE_PRODUCT(of_a, of_b)                                                                           \
    _Pragma("unroll") for (int m = 0; m < M; ++m) _Pragma("unroll") for (int j = 0; j < 2; ++j)                \
        mma_bf16(fresh[m][j], a[m][of_a], b[of_b][j * 2], b[of_b][j * 2 + 1]);
                PARITREE_SPLIT_PRODUCTS(PARITREE_PRODUCT)
#undef PARITREE_PRODUCT
#pragma unroll
                for (int m = 0; m < M; ++m)
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
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_group + m * 16 + lane / 4 + half * 8;
            if (first_row + row >= query_rows) continue;
            const float inverse = final ? (sum_of[row] > 0.0f ? 1.0f / sum_of[row] : 0.0f) : 1.0f;
            float* target = (final ? out + static_cast<long long>(first_row + row) * RANK
                                   : part_out + (static_cast<long long>(blockIdx.y) * query_rows + first_row + row) * RANK) +
                            slice * COLUMNS + 2 * (lane & 3);
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
    paritree::tree_attention_split<16, 2, true>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys, keys_per_split, scale,
                                                out, part_out, part_stat);
}

extern "C" __global__ void __launch_bounds__(512, 1)
tree_attention_split32_f32(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, const unsigned* seen, int heads,
                           int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out, float* part_stat,
                           const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_split<32, 1, false>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys, keys_per_split, scale,
                                                out, part_out, part_stat);
}
