#pragma once

#include <cstdint>

namespace paritree {

float sigmoid(float x);

void add(const float* a, const float* b, float* out, int64_t count);

// out = gate * sigmoid(gate) * up.
void swiglu(const float* gate, const float* up, float* out, int64_t count);

// Copies table[ids[t]]; ids must be below vocab, which the caller has checked.
void embed(const float* table, const int32_t* ids, float* out, int64_t rows, int64_t columns);

// out[t,:] += bias, row by row.
void add_bias(const float* bias, float* out, int64_t rows, int64_t columns);

// Rounds in place to a format of the cache, to nearest even (spec/formats.py).
using Rounding = void (*)(float* values, int64_t count);
void round_nothing(float* values, int64_t count);
void round_bfloat16(float* values, int64_t count);
void round_float16(float* values, int64_t count);

// The lowest index among equal maxima (A1); the first NaN if there is one.
int32_t argmax(const float* logits, int64_t count);

}  // namespace paritree
