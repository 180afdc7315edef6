// Absorbed-MLA tree attention in float32: answers spec/ops/tree_attention.py.
//
//   query  [rows, heads, kv_rank + rope_dim] float32     cache  [keys, kv_rank + rope_dim] float32, or paged
//   mask   [rows, mask_words] bits over the last keys - prefix_len keys (bit j of word j/32: key prefix_len + j is visible)
//   out    [rows, heads, kv_rank] float32  = sum over visible keys of softmax(scale * query . key) * key[:kv_rank]
//
// Accumulates in float32 (FMA), exp2 with log2(e) folded into the scale, online softmax, split over keys with a
// log-sum-exp merge. A row that sees nothing gives zeros. Two forms:
//   tree_attention_plain_f32   one block per (row, head), any sizes: read this one first (also on bfloat16 operands)
//   tree_attention_tiled_f32   kv_rank 512, rope_dim 64: all heads of a row share the keys (one KV head), so rows x heads are
//                              flattened into query rows of a matrix product and nothing of size rows x keys reaches global memory
//   tree_attention_resident_f32  the same with the whole query in shared memory: a quarter of the barriers, 226 KiB (sm_90)
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace paritree {

// ---- plain ------------------------------------------------------------------------------------------------------
// exp of score - maximum, with nothing folded into the score: a weight is as good as the difference of two scores, however large they are.
// grid (rows * heads), block 128; dynamic shared memory: (width + 4 * 4 + 128) floats.
PARITREE_INLINE float widened(float x) { return x; }
PARITREE_INLINE float widened(unsigned short bits) { return of_bf16(bits); }

template <typename Element>
PARITREE_INLINE void tree_attention_plain(const Element* query, const Element* cache, const int* pages, int page_size, const unsigned* mask,
                                          int mask_words, int heads, int kv_rank, int width, int prefix_len, int keys, float scale, float* out) {
    PARITREE_SHARED(float, shared);
    float* q = shared;                 // [width]
    float* weights = q + width;        // [128], one key per thread and round
    float* partial = weights + 128;    // [4], one per warp
    const int row = blockIdx.x / heads;
    const Element* query_row = query + static_cast<long long>(blockIdx.x) * width;
    const unsigned* mask_row = mask + static_cast<long long>(row) * mask_words;
    for (int c = threadIdx.x; c < width; c += blockDim.x) q[c] = widened(query_row[c]);
    __syncthreads();

    float row_max = minus_infinity(), row_sum = 0.0f;
    float* out_row = out + static_cast<long long>(blockIdx.x) * kv_rank;
    for (int c = threadIdx.x; c < kv_rank; c += blockDim.x) out_row[c] = 0.0f;
    for (int start = 0; start < keys; start += blockDim.x) {
        const int key = start + threadIdx.x;
        float score = minus_infinity();
        if (key < keys && sees(mask_row, prefix_len, key)) {
            const Element* k = cache_row(cache, pages, page_size, width, key);
            float dot = 0.0f;
            for (int c = 0; c < width; ++c) dot = fmaf(q[c], widened(k[c]), dot);
            score = dot * scale;
        }
        const float warp_top = warp_max(score);
        if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = warp_top;
        __syncthreads();
        const float top = fmaxf(row_max, fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3])));
        const float base = top == minus_infinity() ? 0.0f : top;  // nothing visible yet: every weight is exp(-inf) = 0
        const float weight = expf(score - base);
        weights[threadIdx.x] = weight;
        __syncthreads();
        const float warp_total = warp_sum(weight);
        if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = warp_total;
        __syncthreads();
        const float shrink = expf(row_max - base);
        row_sum = row_sum * shrink + ((partial[0] + partial[1]) + (partial[2] + partial[3]));
        row_max = top;
        const int seen = min(static_cast<int>(blockDim.x), keys - start);
        for (int c = threadIdx.x; c < kv_rank; c += blockDim.x) {
            float sum = out_row[c] * shrink;
            for (int i = 0; i < seen; ++i)  // invisible rows may hold NaN: 0 * NaN must not reach the sum
                if (weights[i] != 0.0f) sum = fmaf(weights[i], widened(cache_row(cache, pages, page_size, width, start + i)[c]), sum);
            out_row[c] = sum;
        }
        __syncthreads();
    }
    const float inverse = row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
    for (int c = threadIdx.x; c < kv_rank; c += blockDim.x) out_row[c] *= inverse;
}

// ---- tiled ------------------------------------------------------------------------------------------------------
// 256 threads own 64 query rows x 512 output columns: warp w rows 8w..8w+7, lane columns 4*lane + 128*j. Per tile of 32 keys:
//   scores  8 x 4 outputs a thread, the 576 products of each split over four lanes and joined by shuffles
//   softmax 4 threads a row
//   values  8 x 16 outputs a thread, 128 FMA a key
namespace tiled_f32 {
constexpr int RANK = 512, WIDTH = 576, ROWS = 64, KEYS = 32, THREADS = 256;
constexpr int CHUNK = 32;          // columns of the query held at a time, where it is not resident
constexpr int CHUNKS = WIDTH / CHUNK;
constexpr int CHUNK_STRIDE = 48;   // 16 mod 32
constexpr int WEIGHT_STRIDE = 68;
constexpr int CHUNK_FLOATS = ROWS * CHUNK_STRIDE, WEIGHT_FLOATS = KEYS * WEIGHT_STRIDE;
constexpr int STAT_FLOATS = 2 * ROWS;
// Row strides, and which rows the lanes of a warp take, go together: the float4 loads of a warp have to fall into different banks. A stride
// of 16 mod 32 wants neighbouring rows, one of 4 mod 32 rows that are four apart.
template <bool RESIDENT>
struct Layout {
    static constexpr int KEY_STRIDE = RESIDENT ? 580 : 592, QUERY_STRIDE = RESIDENT ? 580 : CHUNK_STRIDE;
    static constexpr int KEY_FLOATS = KEYS * KEY_STRIDE, QUERY_FLOATS = RESIDENT ? ROWS * QUERY_STRIDE : 2 * CHUNK_FLOATS;
    static constexpr int BYTES = 4 * (KEY_FLOATS + QUERY_FLOATS + (RESIDENT ? WEIGHT_FLOATS : 0) + STAT_FLOATS);
};
constexpr int SHARED_BYTES = Layout<false>::BYTES, SHARED_BYTES_RESIDENT = Layout<true>::BYTES;
static_assert(SHARED_BYTES == 100864 && SHARED_BYTES <= 101376, "sm_120 grants 99 KiB a block; impls/cuda/kernels.py has the number");
static_assert(SHARED_BYTES_RESIDENT == 231936 && SHARED_BYTES_RESIDENT <= 232448, "sm_90 grants 227 KiB a block; impls/cuda/kernels.py has the number");
static_assert(WEIGHT_FLOATS <= CHUNK_FLOATS, "the weights share the second query buffer");
}  // namespace tiled_f32

// grid (ceil(rows * heads / 64), splits). With one split `out` is final; else part_out [splits, rows * heads, 512] holds unnormalised
// sums and part_stat [splits, rows * heads, 2] the running maximum (base 2) and sum, for tree_attention_merge.
template <bool RESIDENT>
PARITREE_INLINE void tree_attention_tiled(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask,
                                          int mask_words, const unsigned* seen, int heads, int query_rows, int prefix_len, int keys, int keys_per_split, float scale,
                                          float* out, float* part_out, float* part_stat) {
    using namespace tiled_f32;
    using L = Layout<RESIDENT>;
    constexpr int KEY_STRIDE = L::KEY_STRIDE, QUERY_STRIDE = L::QUERY_STRIDE;
    PARITREE_SHARED(float, shared);
    float* key_tile = shared;                            // [KEYS][KEY_STRIDE]
    float* chunk0 = key_tile + L::KEY_FLOATS;            // [ROWS][QUERY_STRIDE], the whole query or a chunk of it
    float* chunk1 = chunk0 + CHUNK_FLOATS;
    float* weights = RESIDENT ? chunk0 + L::QUERY_FLOATS : chunk1;  // [KEYS][WEIGHT_STRIDE], while no query chunk is in use
    float* shrink_of = shared + L::BYTES / 4 - STAT_FLOATS;  // [ROWS]
    float* sum_of = shrink_of + ROWS;                    // [ROWS], at the end

    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int first_row = blockIdx.x * ROWS;
    const int begin = blockIdx.y * keys_per_split, end = min(keys, begin + keys_per_split);
    // scores: lane & 3 picks every fourth group of four columns; the rest of the lane picks the tile
    const int quarter = lane & 3;
    const int row_tile = RESIDENT ? (warp & 3) + ((lane >> 2) & 1) * 4 : (warp & 3) * 2 + ((lane >> 2) & 1);
    const int key_tile_of = RESIDENT ? (warp >> 2) * 2 + ((lane >> 3) & 1) * 4 + (lane >> 4) : (warp >> 2) * 4 + (lane >> 3);
    // softmax: four threads a row
    const int soft_row = thread >> 2, soft_part = thread & 3;
    const int soft_query = first_row + soft_row;
    const unsigned* mask_row = mask + static_cast<long long>(min(soft_query, query_rows - 1) / heads) * mask_words;
    const float scale2 = scale * LOG2_E;

    float sums[8][16];
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 16; ++j) sums[i][j] = 0.0f;
    float row_max = minus_infinity(), row_sum = 0.0f;

    auto load_keys = [&](int start, int from, int count) {
        for (int key = from + warp; key < from + count; key += THREADS / 32) {  // a warp a key
            const bool valid = start + key < end && is_read(seen, prefix_len, start + key);
            const float* source = cache_row(cache, pages, page_size, WIDTH, valid ? start + key : begin);
#pragma unroll
            for (int column = lane * 4; column < WIDTH; column += 128) copy16_async(key_tile + key * KEY_STRIDE + column, source + column, valid);
        }
    };
    auto load_chunk = [&](float* target, int chunk) {
        constexpr int UNITS = (RESIDENT ? WIDTH : CHUNK) / 4;
        for (int i = thread; i < ROWS * UNITS; i += THREADS) {
            const int row = i / UNITS, column = (i % UNITS) * 4;
            const bool valid = first_row + row < query_rows;
            const float* source = query + static_cast<long long>(valid ? first_row + row : first_row) * WIDTH + chunk * CHUNK + column;
            copy16_async(target + row * QUERY_STRIDE + column, source, valid);
        }
    };

    if (begin < end) load_keys(begin, 0, KEYS);
    load_chunk(chunk0, 0);
    copy_commit();
    for (int start = begin; start < end; start += KEYS) {
        float score[8][4];
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < 4; ++j) score[i][j] = 0.0f;
        if constexpr (RESIDENT) {
            copy_wait<0>();
            __syncthreads();  // the keys (and at the first tile the query) have arrived
        }
#pragma unroll(RESIDENT ? 3 : 1)
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if constexpr (!RESIDENT) {
                copy_wait<0>();
                __syncthreads();  // the chunk (and at chunk 0 the keys) has arrived, and the other buffer is free
                if (chunk + 1 < CHUNKS) {
                    load_chunk(chunk & 1 ? chunk0 : chunk1, chunk + 1);
                    copy_commit();
                }
            }
            const float* q = (RESIDENT ? chunk0 + chunk * CHUNK : chunk & 1 ? chunk1 : chunk0) + row_tile * QUERY_STRIDE + quarter * 4;
            const float* k = key_tile + key_tile_of * KEY_STRIDE + chunk * CHUNK + quarter * 4;
#pragma unroll
            for (int step = 0; step < CHUNK / 16; ++step) {
                float4 kv[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) kv[j] = *reinterpret_cast<const float4*>(k + j * 8 * KEY_STRIDE + step * 16);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float4 qv = *reinterpret_cast<const float4*>(q + i * 8 * QUERY_STRIDE + step * 16);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        score[i][j] = fmaf(qv.x, kv[j].x, score[i][j]);
                        score[i][j] = fmaf(qv.y, kv[j].y, score[i][j]);
                        score[i][j] = fmaf(qv.z, kv[j].z, score[i][j]);
                        score[i][j] = fmaf(qv.w, kv[j].w, score[i][j]);
                    }
                }
            }
        }
        // join the four quarters: first halve the rows (lanes 2 apart), then again (lanes 1 apart); two rows a lane remain
        float half[4][4], joined[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float mine = quarter & 2 ? score[i + 4][j] : score[i][j];
                const float theirs = quarter & 2 ? score[i][j] : score[i + 4][j];
                half[i][j] = mine + __shfl_xor_sync(FULL_WARP, theirs, 2);
            }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float mine = quarter & 1 ? half[i + 2][j] : half[i][j];
                const float theirs = quarter & 1 ? half[i][j] : half[i + 2][j];
                joined[i][j] = mine + __shfl_xor_sync(FULL_WARP, theirs, 1);
            }
        if constexpr (!RESIDENT) __syncthreads();  // the last query chunk (in chunk1, as CHUNKS is even) is read; the weights go over it
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = ((quarter & 2) * 2 + (quarter & 1) * 2 + i) * 8 + row_tile;
                weights[(j * 8 + key_tile_of) * WEIGHT_STRIDE + row] = joined[i][j] * scale2;
            }
        __syncthreads();
        {
            const bool whole = start + KEYS <= min(end, prefix_len);  // every key of the tile is visible to every row
            float own[8], top = row_max;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int key = i * 4 + soft_part;
                const bool visible = whole || (start + key < end && soft_query < query_rows && sees(mask_row, prefix_len, start + key));
                own[i] = visible ? weights[key * WEIGHT_STRIDE + soft_row] : minus_infinity();
                top = fmaxf(top, own[i]);
            }
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
            const float base = top == minus_infinity() ? 0.0f : top;
            const float shrink = exp2f(row_max - base);
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float weight = exp2f(own[i] - base);
                weights[(i * 4 + soft_part) * WEIGHT_STRIDE + soft_row] = weight;
                total += weight;
            }
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            row_sum = row_sum * shrink + total;
            row_max = top;
            if (soft_part == 0) shrink_of[soft_row] = shrink;
        }
        __syncthreads();
        const int next = start + KEYS;
        if (!RESIDENT && next < end) load_chunk(chunk0, 0);
        const float lane_shrink = shrink_of[warp * 8 + (lane & 7)];
        if (__any_sync(FULL_WARP, lane_shrink != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float shrink = __shfl_sync(FULL_WARP, lane_shrink, i);
#pragma unroll
                for (int j = 0; j < 16; ++j) sums[i][j] *= shrink;
            }
        }
        // values; keys already used by every warp make room for the next tile, eight at a time
        for (int group = 0; group < KEYS; group += 8) {
#pragma unroll 4
            for (int key = group; key < group + 8; ++key) {
                const float4 low = *reinterpret_cast<const float4*>(weights + key * WEIGHT_STRIDE + warp * 8);
                const float4 high = *reinterpret_cast<const float4*>(weights + key * WEIGHT_STRIDE + warp * 8 + 4);
                const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float4 v = *reinterpret_cast<const float4*>(key_tile + key * KEY_STRIDE + lane * 4 + j * 128);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        sums[i][4 * j] = fmaf(w[i], v.x, sums[i][4 * j]);
                        sums[i][4 * j + 1] = fmaf(w[i], v.y, sums[i][4 * j + 1]);
                        sums[i][4 * j + 2] = fmaf(w[i], v.z, sums[i][4 * j + 2]);
                        sums[i][4 * j + 3] = fmaf(w[i], v.w, sums[i][4 * j + 3]);
                    }
                }
            }
            __syncthreads();
            if (next < end) load_keys(next, group, 8);
        }
        copy_commit();
    }
    copy_wait<0>();

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
    for (int i = 0; i < 8; ++i) {
        const int row = warp * 8 + i;
        if (first_row + row >= query_rows) break;
        const float inverse = final ? (sum_of[row] > 0.0f ? 1.0f / sum_of[row] : 0.0f) : 1.0f;
        float* target = final ? out + static_cast<long long>(first_row + row) * RANK
                              : part_out + (static_cast<long long>(blockIdx.y) * query_rows + first_row + row) * RANK;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            *reinterpret_cast<float4*>(target + lane * 4 + j * 128) =
                make_float4(sums[i][4 * j] * inverse, sums[i][4 * j + 1] * inverse, sums[i][4 * j + 2] * inverse, sums[i][4 * j + 3] * inverse);
    }
}

// ---- merge ------------------------------------------------------------------------------------------------------
// grid (query_rows), block 128: out = sum_s part_out[s] * 2^(max_s - max) / sum_s sum_s * 2^(max_s - max). Four columns a thread; the first parts
// are on their way while the maxima are.
PARITREE_INLINE void tree_attention_merge(const float* part_out, const float* part_stat, int splits, int query_rows, int kv_rank, float* out) {
    constexpr int AHEAD = 4;
    const long long row = blockIdx.x, part_floats = static_cast<long long>(query_rows) * kv_rank;
    const float2* stat = reinterpret_cast<const float2*>(part_stat) + row;  // [splits], query_rows apart
    for (int c = threadIdx.x * 4; c < kv_rank; c += blockDim.x * 4) {
        const float* part = part_out + row * kv_rank + c;
        float4 held[AHEAD];
#pragma unroll
        for (int s = 0; s < AHEAD; ++s)
            if (s < splits) held[s] = *reinterpret_cast<const float4*>(part + s * part_floats);
        float top = minus_infinity();
#pragma unroll 4
        for (int s = 0; s < splits; ++s) top = fmaxf(top, stat[static_cast<long long>(s) * query_rows].x);
        const float base = top == minus_infinity() ? 0.0f : top;
        float total = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        auto add = [&](int s, const float4& x) {
            const float2 own = stat[static_cast<long long>(s) * query_rows];
            const float factor = exp2f(own.x - base);
            total = fmaf(own.y, factor, total);
            sum = make_float4(fmaf(x.x, factor, sum.x), fmaf(x.y, factor, sum.y), fmaf(x.z, factor, sum.z), fmaf(x.w, factor, sum.w));
        };
#pragma unroll
        for (int s = 0; s < AHEAD; ++s)
            if (s < splits) add(s, held[s]);
#pragma unroll 4
        for (int s = AHEAD; s < splits; ++s) add(s, *reinterpret_cast<const float4*>(part + s * part_floats));
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        *reinterpret_cast<float4*>(out + row * kv_rank + c) = make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
    }
}

}  // namespace paritree

extern "C" __global__ void __launch_bounds__(128)
tree_attention_plain_f32(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, int heads,
                         int kv_rank, int width, int prefix_len, int keys, float scale, float* out, const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_plain(query, cache, pages, page_size, mask, mask_words, heads, kv_rank, width, prefix_len, keys, scale, out);
}

extern "C" __global__ void __launch_bounds__(256, 1)
tree_attention_tiled_f32(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, const unsigned* seen, int heads,
                         int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out, float* part_stat,
                         const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_tiled<false>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys, keys_per_split, scale, out,
                                   part_out, part_stat);
}

extern "C" __global__ void __launch_bounds__(256, 1)
tree_attention_resident_f32(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, const unsigned* seen, int heads,
                         int query_rows, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out, float* part_stat,
                         const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_tiled<true>(query, cache, pages, page_size, mask, mask_words, seen, heads, query_rows, prefix_len, keys, keys_per_split, scale, out,
                                   part_out, part_stat);
}

extern "C" __global__ void __launch_bounds__(128)
tree_attention_merge_f32(const float* part_out, const float* part_stat, int splits, int query_rows, int kv_rank, float* out) {
    paritree::tree_attention_merge(part_out, part_stat, splits, query_rows, kv_rank, out);
}
