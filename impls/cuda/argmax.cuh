// The greedy token of each row: answers spec/ops/argmax.py (A1). logits [rows, vocab] -> ids [rows]: the lowest index among equal maxima
// (both zeros are equal). A NaN anywhere gives the index of the first one. No arithmetic, integer comparisons only.
#pragma once
#include "common.cuh"

// grid (rows), block a multiple of 32; grid (rows, splits) with partial [rows, splits] for long rows, then argmax_join
namespace paritree {
PARITREE_INLINE unsigned long long argmax_rank(float x, int index) { return ranked(x != x ? 0xffffffffu : ordered(x), index); }
}  // namespace paritree

extern "C" __global__ void argmax_f32(const float* logits, int* ids, int vocab) {
    __shared__ unsigned long long scratch[32];
    const float* row = logits + static_cast<long long>(blockIdx.x) * vocab;
    unsigned long long best = 0;
    for (int v = threadIdx.x; v < vocab; v += blockDim.x) {
        const unsigned long long rank = paritree::argmax_rank(row[v], v);
        best = rank > best ? rank : best;
    }
    best = paritree::block_max(best, scratch);
    if (threadIdx.x == 0) ids[blockIdx.x] = paritree::index_of(best);
}

extern "C" __global__ void argmax_split_f32(const float* logits, unsigned long long* partial, int vocab) {
    __shared__ unsigned long long scratch[32];
    const float* row = logits + static_cast<long long>(blockIdx.x) * vocab;
    const int part = (vocab + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * part, end = min(vocab, begin + part);
    unsigned long long best = 0;
    for (int v = begin + threadIdx.x; v < end; v += blockDim.x) {
        const unsigned long long rank = paritree::argmax_rank(row[v], v);
        best = rank > best ? rank : best;
    }
    best = paritree::block_max(best, scratch);
    if (threadIdx.x == 0) partial[static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y] = best;
}

// grid (rows), block 32
extern "C" __global__ void argmax_join(const unsigned long long* partial, int* ids, int splits) {
    unsigned long long best = 0;
    for (int s = threadIdx.x; s < splits; s += 32) {
        const unsigned long long rank = partial[static_cast<long long>(blockIdx.x) * splits + s];
        best = rank > best ? rank : best;
    }
    best = paritree::warp_max(best);
    if (threadIdx.x == 0) ids[blockIdx.x] = paritree::index_of(best);
}
