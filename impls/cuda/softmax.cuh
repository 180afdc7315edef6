// Softmax over visible keys, router scores, and the weighted sum of latents, unfused: answers spec/ops/{softmax,router_scores,o_latent}.py.
// They serve the taps; a forward pass without taps uses the fused tree attention. Accumulates in float32.
#pragma once
#include "common.cuh"

// grid (rows * heads), block a multiple of 32. scores and out [rows * heads, row_stride], visible [rows, visible_stride] bytes: any nonzero
// byte is visible. What stands in hidden columns is not read. Row t of `visible` serves `heads` rows of scores.
extern "C" __global__ void softmax_f32(const float* scores, const unsigned char* visible, float* out, int heads, int keys, int row_stride,
                                       int visible_stride) {
    __shared__ float scratch[32];
    const float* row = scores + static_cast<long long>(blockIdx.x) * row_stride;
    const unsigned char* seen = visible + static_cast<long long>(blockIdx.x / heads) * visible_stride;
    float* target = out + static_cast<long long>(blockIdx.x) * row_stride;
    float top = paritree::minus_infinity();
    for (int s = threadIdx.x; s < keys; s += blockDim.x)
        if (seen[s]) top = fmaxf(top, row[s]);
    top = paritree::block_max(top, scratch);
    const float base = top == paritree::minus_infinity() ? 0.0f : top;
    float total = 0.0f;
    for (int s = threadIdx.x; s < keys; s += blockDim.x)
        if (seen[s]) total += expf(row[s] - base);
    total = paritree::block_sum(total, scratch);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;  // a row that sees nothing is all 0
    for (int s = threadIdx.x; s < keys; s += blockDim.x) target[s] = seen[s] ? expf(row[s] - base) * inverse : 0.0f;
}

// grid (rows), block a multiple of 32. softmax over all experts (V2), or the sigmoid of each logit (V3, K2)
extern "C" __global__ void router_scores_f32(const float* logits, float* out, int experts, int over_all) {
    __shared__ float scratch[32];
    const float* row = logits + static_cast<long long>(blockIdx.x) * experts;
    float* target = out + static_cast<long long>(blockIdx.x) * experts;
    if (!over_all) {
        for (int e = threadIdx.x; e < experts; e += blockDim.x) target[e] = paritree::sigmoid(row[e]);
        return;
    }
    float top = paritree::minus_infinity();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) top = fmaxf(top, row[e]);
    top = paritree::block_max(top, scratch);
    float total = 0.0f;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) total += expf(row[e] - top);
    const float inverse = 1.0f / paritree::block_sum(total, scratch);
    for (int e = threadIdx.x; e < experts; e += blockDim.x) target[e] = expf(row[e] - top) * inverse;
}

// grid (rows * heads), any block. probs [rows * heads, keys], latent row s at latent + slot(s) * width (paged or not), out [rows * heads, rank].
// A weight of 0 is skipped, so that slots that no row sees may hold anything, NaN included.
extern "C" __global__ void o_latent_f32(const float* probs, int probs_stride, const float* latent, const int* pages, int page_size, int width,
                                        float* out, int out_stride, int keys, int rank) {
    const float* weights = probs + static_cast<long long>(blockIdx.x) * probs_stride;
    for (int c = threadIdx.x; c < rank; c += blockDim.x) {
        float sum = 0.0f;
        for (int s = 0; s < keys; ++s) {
            const float weight = weights[s];
            if (weight != 0.0f) sum = fmaf(weight, paritree::cache_row(latent, pages, page_size, width, s)[c], sum);
        }
        out[static_cast<long long>(blockIdx.x) * out_stride + c] = sum;
    }
}
