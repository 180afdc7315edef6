// Log-softmax and top-k of draft logits: answers spec/ops/draft_table.py (T1, T2, T4, T8).
//
//   logits [depths, vocab] float32 -> ids [depths, width] int32, log_probs [depths, width] float32, width <= min(vocab, 1024)
//
// Candidates by (logit descending, id ascending), exactly: one 64-bit integer per candidate (common.cuh, `ranked`), radix selection,
// then a sort of what is left. logZ = max + log(sum exp(logit - max)) in float32, block sums joined in order of the blocks.
//   draft_table_plain  one block a row: `width` passes of argmax; read this one first
//   draft_table_once   one launch that reads each logit once: many blocks a row filter candidates by a histogram of the 12 upper bits of the keys,
//                      the last block of a row selects among them exactly, sorts, and subtracts logZ
#pragma once
#include "common.cuh"

namespace paritree {
namespace draft {
constexpr int BIN_BITS = 12, BINS = 1 << BIN_BITS;
constexpr int SORT_MAX = 4096;  // candidates sorted at once: 32 KiB
}  // namespace draft

PARITREE_INLINE bool refused_logit(float x) { return x != x || x == -minus_infinity(); }

// logZ of a row from (max, sum) parts
PARITREE_INLINE float join_log_sums(const float* parts, int count) {
    float top = minus_infinity();
    for (int s = 0; s < count; ++s) top = fmaxf(top, parts[2 * s]);
    if (top == minus_infinity()) return top;
    float total = 0.0f;
    for (int s = 0; s < count; ++s) total += parts[2 * s + 1] * expf(parts[2 * s] - top);
    return top + logf(total);
}

PARITREE_INLINE float log_prob(float logit, float log_sum) { return logit == minus_infinity() ? logit : logit - log_sum; }
}  // namespace paritree

// grid (depths), block a multiple of 32
extern "C" __global__ void draft_table_plain(const float* logits, int* ids, float* log_probs, int* status, int vocab, int width) {
    using namespace paritree;
    __shared__ float scratch[32];
    __shared__ unsigned long long ranks[32];
    const float* row = logits + static_cast<long long>(blockIdx.x) * vocab;
    float part[2] = {minus_infinity(), 0.0f};
    for (int v = threadIdx.x; v < vocab; v += blockDim.x) {
        if (refused_logit(row[v])) atomicOr(status, STATUS_NOT_FINITE);
        part[0] = fmaxf(part[0], row[v]);
    }
    part[0] = block_max(part[0], scratch);
    const float base = part[0] == minus_infinity() ? 0.0f : part[0];
    for (int v = threadIdx.x; v < vocab; v += blockDim.x) part[1] += expf(row[v] - base);
    part[1] = block_sum(part[1], scratch);
    const float log_sum = join_log_sums(part, 1);
    unsigned long long last = ~0ull;
    for (int k = 0; k < width; ++k) {
        unsigned long long best = 0;
        for (int v = threadIdx.x; v < vocab; v += blockDim.x) {
            const unsigned long long rank = ranked(ordered(row[v]), v);
            if (rank < last && rank > best) best = rank;
        }
        last = block_max(best, ranks);
        if (threadIdx.x == 0) {
            const int id = index_of(last);
            ids[static_cast<long long>(blockIdx.x) * width + k] = id;
            log_probs[static_cast<long long>(blockIdx.x) * width + k] = log_prob(row[id], log_sum);
        }
    }
}

namespace paritree {
namespace draft {
constexpr int ONCE_THREADS = 512, ONCE_PER_THREAD = 16, ONCE_CHUNK = ONCE_THREADS * ONCE_PER_THREAD;

// The highest bin from which on upwards `bins` holds `wanted` keys; 0 if it holds fewer, BINS if none are wanted. By the whole block; `bins`
// may be counted up by other blocks meanwhile: what is found then is a bin of a part of the row, which is not above that of the row.
PARITREE_INLINE unsigned threshold_bin(const volatile unsigned* bins, unsigned wanted, unsigned* scratch) {
    constexpr int PER = BINS / ONCE_THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, high = BINS - 1 - static_cast<int>(threadIdx.x) * PER;
    unsigned own[PER], sum = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) sum += own[i] = bins[high - i];
    unsigned up_to = sum;
    for (int step = 1; step < 32; step <<= 1) {
        const unsigned before = __shfl_up_sync(FULL_WARP, up_to, step);
        if (lane >= step) up_to += before;
    }
    if (lane == 31) scratch[warp] = up_to;
    if (threadIdx.x == 0) scratch[32] = wanted ? 0u : static_cast<unsigned>(BINS);
    __syncthreads();
    for (int w = 0; w < warp; ++w) up_to += scratch[w];
    unsigned above = up_to - sum;
    if (above < wanted && up_to >= wanted)
        for (int i = 0; i < PER; ++i) {
            above += own[i];
            if (above >= wanted) {
                scratch[32] = static_cast<unsigned>(high - i);
                break;
            }
        }
    __syncthreads();
    const unsigned found = scratch[32];
    __syncthreads();
    return found;
}

// Bitonic, descending; `padded` is a power of two. A thread holds EACH neighbouring places in registers; only partners in another warp are met
// in shared memory.
template <int EACH>
PARITREE_INLINE void sort_descending(unsigned long long* held, unsigned padded) {
    unsigned long long own[EACH];
    const unsigned begin = threadIdx.x * EACH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own[i] = begin + i < padded ? held[begin + i] : 0;
    for (unsigned size = 2; size <= padded; size <<= 1)
        for (unsigned step = size >> 1; step; step >>= 1) {
            if (step < EACH) {
#pragma unroll
                for (int half = EACH / 2; half; half >>= 1) {
                    if (step != half) continue;
#pragma unroll
                    for (int i = 0; i < EACH; ++i) {
                        if (i & half) continue;
                        const unsigned long long a = own[i], b = own[i | half];
                        if ((a < b) == (((begin + i) & size) == 0)) {
                            own[i] = b;
                            own[i | half] = a;
                        }
                    }
                }
                continue;
            }
            const bool far = step >= 32 * EACH;
            if (far) {
                __syncthreads();  // what was written before is read
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    if (begin + i < padded) held[begin + i] = own[i];
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const unsigned place = begin + i;
                const unsigned long long other = far ? held[(place ^ step) & (padded - 1)] : __shfl_xor_sync(FULL_WARP, own[i], static_cast<int>(step / EACH));
                const bool larger = ((place & step) == 0) == ((place & size) == 0);
                if ((other > own[i]) == larger) own[i] = other;
            }
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (begin + i < padded) held[begin + i] = own[i];
    __syncthreads();
}

PARITREE_INLINE void sort_descending(unsigned long long* held, unsigned padded) {
    if (padded <= ONCE_THREADS) sort_descending<1>(held, padded);
    else if (padded <= 2 * ONCE_THREADS) sort_descending<2>(held, padded);
    else if (padded <= 4 * ONCE_THREADS) sort_descending<4>(held, padded);
    else sort_descending<8>(held, padded);
}
}  // namespace draft
}  // namespace paritree

// grid (ceil(vocab / 8192), depths), block 512; dynamic shared memory: 4096 * 8 bytes. `counters` [depths][4098] zero before, and zero again
// after: histogram, candidates, blocks that are done. parts [depths, gridDim.x, 2], candidates [depths, vocab]. `wide`: rows are aligned to 16
// bytes. Every block counts its keys into the histogram of the row, and keeps those that are not below the threshold of what is counted so far:
// a threshold of a part of the row is never too high. The block that finishes a row last selects and sorts.
extern "C" __global__ void __launch_bounds__(512)
draft_table_once(const float* logits, int* ids, float* log_probs, float* parts, unsigned long long* candidates, unsigned* counters, int* status, int vocab,
                 int width, int wide) {
    using namespace paritree;
    using namespace paritree::draft;
    PARITREE_SHARED(unsigned long long, held);  // [SORT_MAX]; the histogram of the block before that
    __shared__ float scratch[32];
    __shared__ unsigned words[33];
    __shared__ unsigned found, first, is_last;
    __shared__ float log_sum;
    unsigned* bins = reinterpret_cast<unsigned*>(held);
    const float* row = logits + static_cast<long long>(blockIdx.y) * vocab;
    unsigned* histogram = counters + blockIdx.y * (BINS + 2);
    unsigned long long* kept = candidates + static_cast<long long>(blockIdx.y) * vocab;
    const int begin = blockIdx.x * ONCE_CHUNK;
    const auto place = [&](int i) { return begin + (i / 4 * ONCE_THREADS + static_cast<int>(threadIdx.x)) * 4 + i % 4; };
    float own[ONCE_PER_THREAD], top = minus_infinity();
#pragma unroll
    for (int i = 0; i < ONCE_PER_THREAD; i += 4) {
        if (wide && place(i) + 3 < vocab) {
            const float4 four = *reinterpret_cast<const float4*>(row + place(i));
            own[i] = four.x;
            own[i + 1] = four.y;
            own[i + 2] = four.z;
            own[i + 3] = four.w;
        } else {
#pragma unroll
            for (int j = i; j < i + 4; ++j) own[j] = place(j) < vocab ? row[place(j)] : minus_infinity();
        }
    }
    if (threadIdx.x == 0) found = 0;
    bool refused = false;
#pragma unroll
    for (int i = 0; i < ONCE_PER_THREAD; ++i) {
        refused = refused || own[i] != own[i] || own[i] == -minus_infinity();
        top = fmaxf(top, own[i]);
    }
    if (refused) atomicOr(status, STATUS_NOT_FINITE);
    // of 64 groups of threads the one with the lowest maximum: keys below that are not counted, and some hundreds are left. A count of a part of the
    // keys gives a threshold that is too low, never one that is too high
    float least = top;
    for (int step = 1; step < 8; step <<= 1) least = fmaxf(least, __shfl_xor_sync(FULL_WARP, least, step));
    top = block_max(top, scratch);
    least = -block_max(-least, scratch);
    const unsigned low_bin = ordered(least) >> (32 - BIN_BITS), high_bin = ordered(top) >> (32 - BIN_BITS);
    for (unsigned b = low_bin + threadIdx.x; b <= high_bin; b += ONCE_THREADS) bins[b] = 0;
    __syncthreads();
    const float base = top == minus_infinity() ? 0.0f : top;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < ONCE_PER_THREAD; ++i) {
        total += expf(own[i] - base);
        const unsigned bin = ordered(own[i]) >> (32 - BIN_BITS);
        if (place(i) < vocab && bin >= low_bin && bin <= high_bin) atomicAdd(&bins[bin], 1u);
    }
    total = block_sum(total, scratch);
    if (threadIdx.x == 0) {
        float* part = parts + (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * 2;
        part[0] = top;
        part[1] = total;
    }
    for (unsigned b = low_bin + threadIdx.x; b <= high_bin; b += ONCE_THREADS)
        if (bins[b]) atomicAdd(&histogram[b], bins[b]);
    __threadfence();
    __syncthreads();
    unsigned threshold = threshold_bin(histogram, static_cast<unsigned>(width), words);
    unsigned places[ONCE_PER_THREAD], mine = 0;
#pragma unroll
    for (int i = 0; i < ONCE_PER_THREAD; ++i) {
        places[i] = place(i) < vocab && ordered(own[i]) >> (32 - BIN_BITS) >= threshold;
        mine += places[i];
    }
    if (mine) {  // places are reserved once a block, so that few blocks meet at a counter
        unsigned at = atomicAdd(&found, mine);
#pragma unroll
        for (int i = 0; i < ONCE_PER_THREAD; ++i)
            if (places[i]) places[i] += at++;
    }
    __syncthreads();
    if (threadIdx.x == 0 && found) first = atomicAdd(&histogram[BINS], found);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ONCE_PER_THREAD; ++i)
        if (places[i]) kept[first + places[i] - 1] = ranked(ordered(own[i]), place(i));
    __threadfence();  // what this block wrote is seen before its arrival is
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&histogram[BINS + 1], 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();

    if (threadIdx.x < 32) {  // logZ: lanes take every 32nd part, then a tree
        const volatile float* row_parts = parts + static_cast<long long>(blockIdx.y) * gridDim.x * 2;
        float highest = minus_infinity(), sum = 0.0f;
        for (int s = threadIdx.x; s < static_cast<int>(gridDim.x); s += 32) highest = fmaxf(highest, row_parts[2 * s]);
        highest = warp_max(highest);
        const float from = highest == minus_infinity() ? 0.0f : highest;
        for (int s = threadIdx.x; s < static_cast<int>(gridDim.x); s += 32) sum += row_parts[2 * s + 1] * expf(row_parts[2 * s] - from);
        sum = warp_sum(sum);
        if (threadIdx.x == 0) log_sum = highest == minus_infinity() ? highest : highest + logf(sum);
    }
    threshold = threshold_bin(histogram, static_cast<unsigned>(width), words);
    const volatile unsigned long long* all = kept;
    unsigned count = *static_cast<const volatile unsigned*>(&histogram[BINS]);
    __syncthreads();
    if (threadIdx.x == 0) found = 0;
    for (int b = threadIdx.x; b < BINS + 2; b += ONCE_THREADS) histogram[b] = 0;  // for the next call
    __syncthreads();
    for (unsigned i = threadIdx.x; i < count; i += ONCE_THREADS) {
        const unsigned long long rank = all[i];
        if (rank >> (64 - BIN_BITS) < threshold) continue;
        const unsigned at = atomicAdd(&found, 1u);
        if (at < SORT_MAX) held[at] = rank;
    }
    __syncthreads();
    if (found <= SORT_MAX) {
        count = found;
    } else {
        // many equal logits: the exact width-th rank, eight bits at a time from above; ranks are unique
        __shared__ unsigned digits[256];
        __shared__ unsigned long long prefix_shared;
        __shared__ unsigned left_shared;
        unsigned long long prefix = 0;
        unsigned left = static_cast<unsigned>(width);
        for (int shift = 56; shift >= 0; shift -= 8) {
            __syncthreads();
            if (threadIdx.x < 256) digits[threadIdx.x] = 0;
            __syncthreads();
            for (unsigned i = threadIdx.x; i < count; i += ONCE_THREADS)
                if (shift == 56 || all[i] >> (shift + 8) == prefix) atomicAdd(&digits[all[i] >> shift & 255u], 1u);
            __syncthreads();
            if (threadIdx.x == 0) {
                int digit = 255;
                for (; digit > 0 && digits[digit] < left; --digit) left -= digits[digit];
                prefix_shared = prefix << 8 | static_cast<unsigned>(digit);
                left_shared = left;
                found = 0;
            }
            __syncthreads();
            prefix = prefix_shared;
            left = left_shared;
        }
        for (unsigned i = threadIdx.x; i < count; i += ONCE_THREADS)
            if (all[i] >= prefix) held[atomicAdd(&found, 1u)] = all[i];
        count = static_cast<unsigned>(width);
    }
    unsigned padded = 2;
    while (padded < count) padded <<= 1;
    for (unsigned i = count + threadIdx.x; i < padded; i += ONCE_THREADS) held[i] = 0;
    __syncthreads();
    sort_descending(held, padded);
    for (int k = threadIdx.x; k < width; k += ONCE_THREADS) {
        const long long at = static_cast<long long>(blockIdx.y) * width + k;
        ids[at] = index_of(held[k]);
        log_probs[at] = log_prob(unordered(static_cast<unsigned>(held[k] >> 32)), log_sum);
    }
}
