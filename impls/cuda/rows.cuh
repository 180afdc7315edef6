// What a session of the native engine does to rows beside the operations: casts, biases, rounding on the way into the cache, masks of a sliding window.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

// Float32 to bfloat16, to nearest even: what attention on bfloat16 operands reads (tree_attention_bf16.cuh). grid (rows), any block. x rows are
// x_row floats apart, out rows out_row elements; columns from `width` to out_row become zero.
extern "C" __global__ void cast_rows_bf16(const float* x, int x_row, unsigned short* out, int out_row, int width) {
    const float* from = x + static_cast<long long>(blockIdx.x) * x_row;
    unsigned short* to = out + static_cast<long long>(blockIdx.x) * out_row;
    for (int c = threadIdx.x; c < out_row; c += blockDim.x) to[c] = c < width ? paritree::to_bf16(from[c]) : static_cast<unsigned short>(0);
}

// x [count / width, width] += bias [width]: attention_bias. Grid-stride over `count`.
extern "C" __global__ void add_bias_f32(float* x, const float* bias, long long count, int width) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) x[i] += bias[i % width];
}

// To the nearest number of a 16-bit cache format, in place (spec/formats.py, M11): float16 where `half`, else bfloat16. Grid-stride over `count`.
extern "C" __global__ void round_cache_f32(float* x, long long count, int half) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        const float value = x[i];
        if (value != value) continue;
        if (!half) {
            x[i] = paritree::of_bf16(paritree::to_bf16(value));
            continue;
        }
        const float size = fabsf(value);
        // adding and taking away 2^23 steps of float16's spacing rounds to nearest even: the step of size = m 2^e, 1 <= m < 2, is 2^(e - 10)
        const int exponent = static_cast<int>(__float_as_uint(size) >> 23) - 127;
        const float steps = __uint_as_float(static_cast<unsigned>((exponent < -14 ? -14 : exponent) - 10 + 23 + 127) << 23);
        const float rounded = size < 65520.0f ? (size + steps) - steps : -paritree::minus_infinity();  // beyond the midpoint above the largest number
        x[i] = value < 0.0f ? -rounded : rounded;
    }
}

// A sliding window as bits over all keys, prefix and own: row t sees key s iff it sees it in the tree and position(s) > position(t) - window (C2, C3).
// grid (rows), block a multiple of 32. tree_bits [rows, tree_words] over the own keys; key_positions [prefix_len], null: key s is at position s;
// positions [rows]; bits [rows, words], words of at least prefix_len + rows; seen [words], zero before: keys that some row sees.
extern "C" __global__ void window_mask(const unsigned* tree_bits, int tree_words, const int* key_positions, const int* positions, int prefix_len, int rows,
                                       int window, unsigned* bits, int words, unsigned* seen, const int* prefix_at) {
    using namespace paritree;
    if (prefix_at != nullptr) prefix_len = *prefix_at;
    const unsigned* own = tree_bits + static_cast<long long>(blockIdx.x) * tree_words;
    const long long last_hidden = static_cast<long long>(positions[blockIdx.x]) - window;
    for (int w = threadIdx.x / 32; w < words; w += blockDim.x / 32) {
        const int s = w * 32 + static_cast<int>(threadIdx.x % 32), j = s - prefix_len;
        bool visible = false;
        if (j < 0) visible = (key_positions == nullptr ? s : key_positions[s]) > last_hidden;
        else if (j < rows) visible = ((own[j >> 5] >> (j & 31)) & 1u) && positions[j] > last_hidden;
        const unsigned word = __ballot_sync(FULL_WARP, visible);
        if (threadIdx.x % 32 == 0) {
            bits[static_cast<long long>(blockIdx.x) * words + w] = word;
            if (word != 0u) atomicOr(&seen[w], word);
        }
    }
}
