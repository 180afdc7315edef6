// Commit of an accepted path: answers spec/ops/compact.py (K1-K4, K7). dst(P + j) = src(P + path[j]), bit for bit, nothing below P changes.
//
//   compact_copy    out of place: out [prefix_len + kept, width], every row copied
//   compact_layers  in place, all layers of a cache at once, contiguous or paged: layer l, slot s at cache + l * layer_stride + s * width
//
// In place is safe because path ascends: path[j] >= j, so that a batch of rows read together never holds the target of a later batch's
// source, and each thread moves its own columns of every row, so that no other thread writes what it still has to read.
#pragma once
#include "common.cuh"

// grid (prefix_len + kept), any block
extern "C" __global__ void compact_copy(const float* cache, const int* path, float* out, int prefix_len, int width) {
    const int row = blockIdx.x, from = row < prefix_len ? row : prefix_len + path[row - prefix_len];
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        out[static_cast<long long>(row) * width + c] = cache[static_cast<long long>(from) * width + c];
}

// grid (ceil(width / 64), layers), block 64; `kept` points to the number of rows on the device, so that no host has to know it.
extern "C" __global__ void compact_layers(unsigned* cache, long long layer_stride, const int* pages, int page_size, const int* path, const int* kept,
                                          int prefix_len, int width, const int* prefix_at) {
    constexpr int BATCH = 8;
    if (prefix_at != nullptr) prefix_len = *prefix_at;
    const int column = blockIdx.x * blockDim.x + threadIdx.x, rows = *kept;
    if (column >= width) return;
    unsigned* layer = cache + blockIdx.y * layer_stride;
    for (int start = 0; start < rows; start += BATCH) {
        unsigned held[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (start + i < rows) held[i] = paritree::cache_row(layer, pages, page_size, width, prefix_len + path[start + i])[column];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (start + i < rows) const_cast<unsigned*>(paritree::cache_row(layer, pages, page_size, width, prefix_len + start + i))[column] = held[i];
    }
}
