// Element-wise operations in float32: answers spec/ops/{embed,add,swiglu,rope,combine}.py. One thread an element, one launch each.
//
//   embed    out [rows, width] = table[ids]; a negative id is padding (C4) and gives zeros
//   scatter  out[slots] = rows [rows, width]; a negative slot is padding and writes nothing
//   add      out = a + b, one rounding
//   swiglu   out = gate * sigmoid(gate) * up
//   rope     pairs (2i, 2i+1), or (i, i + half) with half_layout, of each head; strides in elements, so that parts of wider rows work
//   combine  out [rows, width] = sum_k weights[row, k] * experts[row, k] + shared[row]; FMA in order of k, the shared expert first
#pragma once
#include "common.cuh"

// grid (rows), any block
extern "C" __global__ void embed_f32(const float* table, const int* ids, float* out, int width) {
    const int id = ids[blockIdx.x];
    const float* row = table + static_cast<long long>(id < 0 ? 0 : id) * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[static_cast<long long>(blockIdx.x) * width + c] = id < 0 ? 0.0f : row[c];
}

extern "C" __global__ void scatter_f32(const float* rows, const int* slots, float* out, int width) {
    const int slot = slots[blockIdx.x];
    if (slot < 0) return;
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        out[static_cast<long long>(slot) * width + c] = rows[static_cast<long long>(blockIdx.x) * width + c];
}

// The next three: grid-stride over `count` elements
extern "C" __global__ void add_f32(const float* a, const float* b, float* out, long long count) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) out[i] = a[i] + b[i];
}

extern "C" __global__ void swiglu_f32(const float* gate, const float* up, float* out, long long count) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride)
        out[i] = gate[i] * paritree::sigmoid(gate[i]) * up[i];
}

extern "C" __global__ void rope_f32(const float* x, int x_row, int x_head, const float* cos, const float* sin, float* out, int out_row, int out_head,
                                    int rows, int heads, int half, int half_layout) {
    const long long count = static_cast<long long>(rows) * heads * half, stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        const int pair = static_cast<int>(i % half), head = static_cast<int>(i / half % heads);
        const long long row = i / half / heads;
        const int first = half_layout ? pair : 2 * pair, second = half_layout ? pair + half : 2 * pair + 1;
        const float* from = x + row * x_row + static_cast<long long>(head) * x_head;
        float* to = out + row * out_row + static_cast<long long>(head) * out_head;
        const float a = from[first], b = from[second], c = cos[row * half + pair], s = sin[row * half + pair];
        to[first] = fmaf(a, c, -(b * s));
        to[second] = fmaf(b, c, a * s);
    }
}

// grid (rows), any block; `shared` may be null
extern "C" __global__ void combine_f32(const float* weights, const float* experts, const float* shared_expert, float* out, int chosen, int width) {
    const long long row = blockIdx.x;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = shared_expert == nullptr ? 0.0f : shared_expert[row * width + c];
        for (int k = 0; k < chosen; ++k) sum = fmaf(weights[row * chosen + k], experts[(row * chosen + k) * width + c], sum);
        out[row * width + c] = sum;
    }
}
