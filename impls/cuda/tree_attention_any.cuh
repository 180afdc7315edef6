// Absorbed-MLA tree attention of any sizes: answers spec/ops/tree_attention.py, as tree_attention_plain does, with the same scores bit for bit and
// natural exponentials of unfolded scores. Operands and mask as there.
//
//   tree_attention_any_f32, _bf16  the keys of a (row, head) are split over blocks, and the columns of the sum over groups of threads that take
//                                  every GROUPS-th key, where the latent is narrower than the block: plain leaves most of its threads idle there
//   tree_attention_any_merge       joins the parts: the largest maximum is the base
//
// Accumulates in float32. A part that sees nothing has maximum -inf and sum 0. Improves on tree_attention_plain: 362 us for 3 heads, 16 + 8 columns
// and 2,048 keys on an H200 (benchmarks/gpu_round.py), all of it one block's loop over the keys.
#pragma once
#include "common.cuh"
#include "ptx.cuh"
#include "tree_attention_f32.cuh"

namespace paritree {
namespace any_size {
constexpr int THREADS = 128;

// Threads of a group: the columns that a pass takes, a power of two.
PARITREE_INLINE int columns_of(int kv_rank) {
    int columns = 1;
    while (columns < kv_rank && columns < THREADS) columns *= 2;
    return columns;
}
}  // namespace any_size

// grid (rows * heads, splits), block 128; dynamic shared memory: width + 128 weights + 4 + 256 (offsets of the keys) + GROUPS * kv_rank floats, GROUPS =
// 128 / columns_of(kv_rank). With one split `out` is final; else part_out [splits, rows * heads, kv_rank] and part_stat [splits, rows * heads, 2].
template <typename Element>
PARITREE_INLINE void tree_attention_any(const Element* query, const Element* cache, const int* pages, int page_size, const unsigned* mask, int mask_words,
                                        int heads, int kv_rank, int width, int prefix_len, int keys, int keys_per_split, float scale, float* out,
                                        float* part_out, float* part_stat) {
    using namespace any_size;
    PARITREE_SHARED(long long, shared);
    long long* slot = shared;                                  // [128] first element of each key of the round
    float* q = reinterpret_cast<float*>(slot + THREADS);       // [width]
    float* weights = q + width;                                // [128]
    float* partial = weights + THREADS;                        // [4]
    float* sums = partial + 4;                                 // [GROUPS][kv_rank]
    const int thread = threadIdx.x, columns = columns_of(kv_rank), groups = THREADS / columns, group = thread / columns, first = thread % columns;
    const Element* query_row = query + static_cast<long long>(blockIdx.x) * width;
    const unsigned* mask_row = mask + static_cast<long long>(blockIdx.x / heads) * mask_words;
    for (int c = thread; c < width; c += THREADS) q[c] = widened(query_row[c]);
    for (int c = first; c < kv_rank; c += columns) sums[group * kv_rank + c] = 0.0f;
    __syncthreads();

    const int begin = blockIdx.y * keys_per_split, end = min(keys, begin + keys_per_split);
    float row_max = minus_infinity(), row_sum = 0.0f;
    for (int start = begin; start < end; start += THREADS) {
        const int key = start + thread;
        float score = minus_infinity();
        if (key < end && sees(mask_row, prefix_len, key)) {
            const Element* k = cache_row(cache, pages, page_size, width, key);
            slot[thread] = k - cache;
            float dot = 0.0f;
            for (int c = 0; c < width; ++c) dot = fmaf(q[c], widened(k[c]), dot);
            score = dot * scale;
        }
        const float warp_top = warp_max(score);
        if ((thread & 31) == 0) partial[thread >> 5] = warp_top;
        __syncthreads();
        const float top = fmaxf(row_max, fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3])));
        const float base = top == minus_infinity() ? 0.0f : top;  // nothing is seen yet: each weight is exp(-inf) = 0
        const float weight = expf(score - base);
        weights[thread] = weight;
        __syncthreads();
        const float warp_total = warp_sum(weight);
        if ((thread & 31) == 0) partial[thread >> 5] = warp_total;
        __syncthreads();
        const float shrink = expf(row_max - base);
        row_sum = row_sum * shrink + ((partial[0] + partial[1]) + (partial[2] + partial[3]));
        row_max = top;
        const int here = min(THREADS, end - start);
        for (int c = first; c < kv_rank; c += columns) {
            float sum = sums[group * kv_rank + c] * shrink;
#pragma unroll 4
            for (int i = group; i < here; i += groups)  // an invisible row may hold NaN, and has no slot: 0 * NaN must not reach the sum
                if (weights[i] != 0.0f) sum = fmaf(weights[i], widened(cache[slot[i] + c]), sum);
            sums[group * kv_rank + c] = sum;
        }
        __syncthreads();
    }
    const long long rows = gridDim.x;
    const float inverse = part_out != nullptr ? 1.0f : row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
    float* target = part_out != nullptr ? part_out + (blockIdx.y * rows + blockIdx.x) * kv_rank : out + static_cast<long long>(blockIdx.x) * kv_rank;
    for (int c = thread; c < kv_rank; c += THREADS) {
        float sum = 0.0f;
        for (int g = 0; g < groups; ++g) sum += sums[g * kv_rank + c];
        target[c] = sum * inverse;
    }
    if (part_out != nullptr && thread == 0) {
        part_stat[(blockIdx.y * rows + blockIdx.x) * 2] = row_max;
        part_stat[(blockIdx.y * rows + blockIdx.x) * 2 + 1] = row_sum;
    }
}
}  // namespace paritree

extern "C" __global__ void __launch_bounds__(128)
tree_attention_any_f32(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, int heads, int kv_rank,
                       int width, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out, float* part_stat,
                       const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_any(query, cache, pages, page_size, mask, mask_words, heads, kv_rank, width, prefix_len, keys, keys_per_split, scale, out, part_out,
                                 part_stat);
}

extern "C" __global__ void __launch_bounds__(128)
tree_attention_any_bf16(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask, int mask_words,
                        int heads, int kv_rank, int width, int prefix_len, int keys, int keys_per_split, float scale, float* out, float* part_out,
                        float* part_stat, const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_any(query, cache, pages, page_size, mask, mask_words, heads, kv_rank, width, prefix_len, keys, keys_per_split, scale, out, part_out,
                                 part_stat);
}

// grid (rows * heads), block 128
extern "C" __global__ void tree_attention_any_merge(const float* part_out, const float* part_stat, int splits, int query_rows, int kv_rank, float* out) {
    const long long row = blockIdx.x, rows = query_rows;
    float top = paritree::minus_infinity();
    for (int s = 0; s < splits; ++s) top = fmaxf(top, part_stat[(s * rows + row) * 2]);
    const float base = top == paritree::minus_infinity() ? 0.0f : top;
    float total = 0.0f;
    for (int s = 0; s < splits; ++s) total = fmaf(part_stat[(s * rows + row) * 2 + 1], expf(part_stat[(s * rows + row) * 2] - base), total);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    for (int c = threadIdx.x; c < kv_rank; c += blockDim.x) {
        float sum = 0.0f;
        for (int s = 0; s < splits; ++s) sum = fmaf(part_out[(s * rows + row) * kv_rank + c], expf(part_stat[(s * rows + row) * 2] - base), sum);
        out[row * kv_rank + c] = sum * inverse;
    }
}
