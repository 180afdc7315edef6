// The scores inside tree_attention_plain_* and tree_attention_any_*, for taps: the same sum over the same operands in the same order, so that their
// weights are the exponentials of exactly these numbers. What a row does not see is 0. The tiled forms have other orders of summation, and no such kernel.
#pragma once
#include "tree_attention_bf16.cuh"
#include "tree_attention_f32.cuh"

namespace paritree {
// grid (rows * heads), block 128; dynamic shared memory: width floats. out [rows * heads, out_row], columns past `keys` are 0, too.
template <typename Element>
PARITREE_INLINE void tree_attention_scores(const Element* query, const Element* cache, const int* pages, int page_size, const unsigned* mask, int mask_words,
                                           int heads, int width, int prefix_len, int keys, float scale, float* out, int out_row) {
    PARITREE_SHARED(float, q);  // [width]
    const Element* query_row = query + static_cast<long long>(blockIdx.x) * width;
    const unsigned* mask_row = mask + static_cast<long long>(blockIdx.x / heads) * mask_words;
    for (int c = threadIdx.x; c < width; c += blockDim.x) q[c] = widened(query_row[c]);
    __syncthreads();
    for (int key = threadIdx.x; key < out_row; key += blockDim.x) {
        float score = 0.0f;
        if (key < keys && sees(mask_row, prefix_len, key)) {
            const Element* k = cache_row(cache, pages, page_size, width, key);
            float dot = 0.0f;
            for (int c = 0; c < width; ++c) dot = fmaf(q[c], widened(k[c]), dot);
            score = dot * scale;
        }
        out[static_cast<long long>(blockIdx.x) * out_row + key] = score;
    }
}
}  // namespace paritree

extern "C" __global__ void __launch_bounds__(128)
tree_attention_scores_f32(const float* query, const float* cache, const int* pages, int page_size, const unsigned* mask, int mask_words, int heads, int width,
                          int prefix_len, int keys, float scale, float* out, int out_row, const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_scores(query, cache, pages, page_size, mask, mask_words, heads, width, prefix_len, keys, scale, out, out_row);
}

extern "C" __global__ void __launch_bounds__(128)
tree_attention_scores_bf16(const unsigned short* query, const unsigned short* cache, const int* pages, int page_size, const unsigned* mask, int mask_words,
                           int heads, int width, int prefix_len, int keys, float scale, float* out, int out_row, const int* prefix_at) {
    paritree::on_device(prefix_at, prefix_len, keys);
    paritree::tree_attention_scores(query, cache, pages, page_size, mask, mask_words, heads, width, prefix_len, keys, scale, out, out_row);
}
