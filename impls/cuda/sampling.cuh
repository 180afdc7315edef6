// The token drawn from each row: answers spec/sampling.py (`scaled_logits`, `keyed_uniforms`, `gumbel_argmax`; S1-S3, A6, and A1 at
// temperature 0).
//
//   logits [rows, vocab] float32, one Rule, histories -> ids [rows] int32
//
// z is made by the float64 operations of S1, each rounded once, so that it has the bits of the specification. The noise is
// -log(-log u) with u from Philox4x64-10, integers, bit for bit. The drawn token is that of the exact real numbers: float64 decides where
// its error cannot matter, pairs of doubles (about 100 bits) decide the rest, equal keys leave the lowest index, and keys that even those
// cannot part raise STATUS_UNDECIDED instead of a guess.
//
// What min-p, top-k and top-p keep is a head of the tokens in the order (z descending, id ascending). A head of top-k is selected as the
// candidates of a draft tree are, and everything else happens within it. Without top-k nothing is sorted: one pass tells whether a given token
// is kept, by the tokens before it, their number and their mass; a winner of the race that is not kept takes everything behind it out, and
// the race is run again before it.
//   sample_plain   one block a row, float64 for every token; read this one first
//   sample_race    the race before truncation by many blocks a row: a float32 bound from above leaves a few tokens to float64
//   sample_finish  one block a row: the best of the race, and what truncation asks
#pragma once
#include "common.cuh"
#include "draft_table.cuh"

namespace paritree {
namespace sampling {
constexpr int STATUS_NO_DISTRIBUTION = 32;  // S1: NaN, +inf, or nothing finite in a row after penalties or temperature
constexpr int STATUS_UNDECIDED = 64;        // S3: two numbers agree to about 85 bits

constexpr int THREADS = 512, CHUNK = 4096;  // tokens whose counts a block holds at once
constexpr int HEAD_MAX = 2048;              // candidates of top-k that a block sorts
static_assert(THREADS == draft::ONCE_THREADS && CHUNK == draft::BINS, "selection as in draft_table.cuh");
constexpr unsigned SEEN = 1u << 31, BIASED = 1u << 30, COUNT_MASK = BIASED - 1;

// Fields of spec.sampling.Sampling, on the device, so that a captured graph reads those of its replay.
struct Rule {
    double temperature, top_p, min_p, repetition, presence, frequency;
    long long top_k;
    unsigned long long seed;
    long long ties_all, bias_count;
};

// What the rows follow. Row r belongs to stream r / nodes, and is node r % nodes of its tree. `streams` [streams][4]: first word of
// `history`, length, length of the prompt, number of the request. Node i of stream s has the token and the parent at s * stride + i; null
// parents: every row stands right behind its history. `count` (at s * stride): nodes without the root; later rows are padding.
struct Rows {
    const int* history;
    const int* streams;
    const int* tokens;
    const int* parents;
    const int* count;
    int nodes, stride;
};

// ---- pairs of doubles ------------------------------------------------------------------------------------------------

struct Pair {
    double high, low;  // |low| at most half an ulp of high
};

PARITREE_INLINE Pair two_sum(double a, double b) {  // exact; FMA cannot enter: there are no products
    const double sum = a + b, back = sum - a;
    return {sum, (a - (sum - back)) + (b - back)};
}

PARITREE_INLINE Pair quick_sum(double a, double b) {  // exact where |a| >= |b|
    const double sum = a + b;
    return {sum, b - (sum - a)};
}

PARITREE_INLINE Pair plus(Pair a, Pair b) {
    const Pair high = two_sum(a.high, b.high), low = two_sum(a.low, b.low);
    const Pair part = quick_sum(high.high, high.low + low.high);
    return quick_sum(part.high, part.low + low.low);
}

PARITREE_INLINE Pair minus(Pair a, Pair b) { return plus(a, {-b.high, -b.low}); }

PARITREE_INLINE Pair times(Pair a, Pair b) {
    const double product = __dmul_rn(a.high, b.high);
    return quick_sum(product, fma(a.high, b.high, -product) + (a.high * b.low + a.low * b.high));
}

PARITREE_INLINE Pair over(Pair a, Pair b) {
    const double first = a.high / b.high;
    const Pair rest = minus(a, times(b, {first, 0.0}));
    const double second = rest.high / b.high;
    const Pair last = minus(rest, times(b, {second, 0.0}));
    return plus(quick_sum(first, second), {last.high / b.high, 0.0});
}

PARITREE_INLINE double power_of_two(int exponent) { return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52); }
PARITREE_INLINE int exponent_of(double x) { return static_cast<int>(static_cast<unsigned long long>(__double_as_longlong(x)) >> 52 & 0x7ffu) - 1023; }

PARITREE_INLINE Pair ln2() { return {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56}; }

PARITREE_INLINE Pair reciprocal(int n) {
    const double first = 1.0 / n;
    return {first, fma(-first, static_cast<double>(n), 1.0) / n};
}

// log x, x > 0 and normal: within 2^-95 of the size of the result or of 1, whichever is smaller in effect: near 1 the logarithm keeps its leading
// bits, because x - 1 does. e ln 2 + 2 artanh((m - 1) / (m + 1)), m between 0.7 and 1.42, so that the 23rd term is below 2^-110.
PARITREE_INLINE Pair log_pair(Pair x) {
    int exponent = exponent_of(x.high);
    if (x.high * power_of_two(-exponent) > 1.4142135623730951) ++exponent;
    const double scale = power_of_two(-exponent);
    const Pair m = {x.high * scale, x.low * scale};
    const Pair s = over(plus(m, {-1.0, 0.0}), plus(m, {1.0, 0.0})), square = times(s, s);
    Pair sum = reciprocal(45);
    for (int k = 21; k >= 0; --k) sum = plus(times(sum, square), reciprocal(2 * k + 1));
    sum = times(sum, s);
    return plus(times(ln2(), {static_cast<double>(exponent), 0.0}), {2.0 * sum.high, 2.0 * sum.low});
}

// e^x, -700 < x <= 0: within 2^-90 of its size. 2^n (e^(r / 512))^512, r at most half of ln 2: the 10th power of r / 512 is below 2^-105.
PARITREE_INLINE Pair exp_pair(Pair x) {
    const int n = static_cast<int>(x.high * 1.4426950408889634 - 0.5);
    Pair r = minus(x, times(ln2(), {static_cast<double>(n), 0.0}));
    r = {r.high * 0x1p-9, r.low * 0x1p-9};
    Pair sum = reciprocal(10);
    for (int k = 9; k >= 1; --k) sum = times(plus(times(sum, r), {1.0, 0.0}), reciprocal(k));  // (e^r - 1) / r
    sum = times(sum, r);
    for (int i = 0; i < 9; ++i) sum = plus({2.0 * sum.high, 2.0 * sum.low}, times(sum, sum));  // e^2r - 1 = 2 (e^r - 1) + (e^r - 1)^2
    sum = plus(sum, {1.0, 0.0});
    const double scale = power_of_two(n);
    return {sum.high * scale, sum.low * scale};
}

// ---- the noise -------------------------------------------------------------------------------------------------------

// One block of Philox4x64-10: words 4 * index .. 4 * index + 3 of the stream of one token (S3).
struct Noise {
    unsigned long long seed, position, sequence;
};

PARITREE_INLINE void philox(const Noise& noise, unsigned index, unsigned long long (&word)[4]) {
    unsigned long long c0 = index + 1ull, c1 = noise.sequence, c2 = 0, c3 = 0, k0 = noise.seed, k1 = noise.position;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        constexpr unsigned long long M0 = 0xD2E7470EE14C6C93ull, M1 = 0xCA5A826395121157ull;
        const unsigned long long high0 = __umul64hi(M0, c0), high1 = __umul64hi(M1, c2);
        const unsigned long long low0 = M0 * c0, low1 = M1 * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B97F4A7C15ull;
        k1 += 0xBB67AE8584CAA73Bull;
    }
    word[0] = c0;
    word[1] = c1;
    word[2] = c2;
    word[3] = c3;
}

PARITREE_INLINE double uniform(unsigned long long word) { return static_cast<double>(static_cast<long long>(word >> 11 | 1)) * 0x1p-53; }

// ---- the race --------------------------------------------------------------------------------------------------------

// A candidate: key = z - log(-log u) as rounded, where u > 0. u = 0: no noise (temperature 0), and the key is z. index -1: none.
struct Entry {
    double key, z, u;
    int index;
};

PARITREE_INLINE Entry nobody() { return {0.0, 0.0, 0.0, -1}; }

// log and log again: the inner one is off by an ulp, which is as much of the outer one, that by an ulp of its own; one addition. Twice over.
PARITREE_INLINE double key_error(const Entry& a) { return 0x1p-51 * (2.0 + 2.0 * fabs(a.key - a.z) + fabs(a.z) + fabs(a.key)); }

PARITREE_INLINE Entry entry(double z, double u, int index) { return {u > 0.0 ? z - log(-log(u)) : z, z, u, index}; }

// Whether a comes before b, exactly; lowest index first among equals. Sets `undecided` where nothing here can tell.
PARITREE_INLINE bool beats(const Entry& a, const Entry& b, bool& undecided) {
    if (b.index < 0 || a.index < 0) return a.index >= 0;
    const double gap = a.key - b.key;
    if (a.u == 0.0) return gap != 0.0 ? gap > 0.0 : a.index < b.index;
    const double error = key_error(a) + key_error(b);
    if (gap > error) return true;
    if (gap < -error) return false;
    if (a.z == b.z && a.u == b.u) return a.index < b.index;
    if (a.z == b.z || a.u == b.u) return a.z > b.z || (a.z == b.z && a.u > b.u);
    const Pair inner_a = log_pair({a.u, 0.0}), inner_b = log_pair({b.u, 0.0});
    const Pair outer = minus(log_pair({-inner_b.high, -inner_b.low}), log_pair({-inner_a.high, -inner_a.low}));
    const Pair difference = plus(two_sum(a.z, -b.z), outer);
    if (fabs(difference.high) <= 0x1p-85 * (64.0 + fabs(a.z) + fabs(b.z))) undecided = true;
    return difference.high > 0.0;
}

PARITREE_INLINE Entry shuffled(const Entry& a, int step) {
    return {__shfl_xor_sync(FULL_WARP, a.key, step), __shfl_xor_sync(FULL_WARP, a.z, step), __shfl_xor_sync(FULL_WARP, a.u, step),
            __shfl_xor_sync(FULL_WARP, a.index, step)};
}

PARITREE_INLINE Entry warp_best(Entry best, bool& undecided) {
    for (int step = 16; step; step >>= 1) {
        const Entry other = shuffled(best, step);
        __syncwarp();
        if (beats(other, best, undecided)) best = other;
        __syncwarp();
    }
    return best;
}

// The first entry of the block, in every thread. `scratch`: one entry a warp, free again on return.
PARITREE_INLINE Entry block_best(Entry best, Entry* scratch, bool& undecided) {
    best = warp_best(best, undecided);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = best;
    __syncthreads();
    best = threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : nobody();
    best = warp_best(best, undecided);
    __syncthreads();
    return best;
}

PARITREE_INLINE double block_sum(double x, double* scratch) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += scratch[w];
    __syncthreads();
    return sum;
}

PARITREE_INLINE Pair block_sum(Pair x, Pair* scratch) {
    for (int step = 16; step; step >>= 1) x = plus(x, {__shfl_xor_sync(FULL_WARP, x.high, step), __shfl_xor_sync(FULL_WARP, x.low, step)});
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    Pair sum = {0.0, 0.0};
    for (unsigned w = 0; w < blockDim.x / 32; ++w) sum = plus(sum, scratch[w]);
    __syncthreads();
    return sum;
}

PARITREE_INLINE double minus_infinity_double() { return -static_cast<double>(__int_as_float(0x7f800000)); }

PARITREE_INLINE double block_max(double x, double* scratch) {
    for (int step = 16; step; step >>= 1) x = fmax(x, __shfl_xor_sync(FULL_WARP, x, step));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    double top = minus_infinity_double();
    for (unsigned w = 0; w < blockDim.x / 32; ++w) top = fmax(top, scratch[w]);
    __syncthreads();
    return top;
}

// ---- z ---------------------------------------------------------------------------------------------------------------

// One row: what its z is made of.
struct Source {
    const float* logits;
    const Rule* rule;
    const int* bias_tokens;
    const double* biases;
    const int* history;  // of the stream
    const int *tokens, *parents;
    int vocab, length, prompt_len, node;
    bool marked;         // some token's z is not just its logit over the temperature
};

PARITREE_INLINE Source source_of(const float* logits, const Rule* rule, const int* bias_tokens, const double* biases, const Rows& rows, int vocab, int row,
                                 Noise& noise) {
    const int stream = row / rows.nodes, node = row % rows.nodes;
    const int* own = rows.streams + 4 * stream;
    Source source = {logits + static_cast<long long>(row) * vocab, rule, bias_tokens, biases, rows.history + own[0], nullptr, nullptr, vocab, own[1], own[2], node,
                     false};
    int depth = 0;
    if (rows.parents != nullptr) {
        source.tokens = rows.tokens + static_cast<long long>(stream) * rows.stride;
        source.parents = rows.parents + static_cast<long long>(stream) * rows.stride;
        for (int up = node; up > 0 && depth <= node; up = source.parents[up]) ++depth;
    }
    source.marked = rule->bias_count > 0 || rule->repetition != 1.0 || rule->presence != 0.0 || rule->frequency != 0.0;
    noise = {rule->seed, static_cast<unsigned long long>(source.length + depth), static_cast<unsigned long long>(static_cast<unsigned>(own[3]))};
    return source;
}

PARITREE_INLINE bool is_padding(const Rows& rows, int row) {
    return rows.count != nullptr && row % rows.nodes > rows.count[static_cast<long long>(row / rows.nodes) * rows.stride];
}

// Counts of the tokens begin .. begin + CHUNK - 1 in the history and on the path of the node (A6). By the whole block; `marks` [CHUNK].
PARITREE_INLINE void mark_chunk(const Source& source, int begin, unsigned* marks) {
    if (!source.marked) return;
    __syncthreads();  // the marks before are read
    for (int i = threadIdx.x; i < CHUNK; i += blockDim.x) marks[i] = 0;
    __syncthreads();
    const auto count = [&](int token, bool generated) {
        const int at = token - begin;
        if (at < 0 || at >= CHUNK) return;
        atomicOr(&marks[at], SEEN);
        if (generated) atomicAdd(&marks[at], 1u);
    };
    for (int i = threadIdx.x; i < source.length; i += blockDim.x) count(source.history[i], i >= source.prompt_len);
    if (threadIdx.x == 0 && source.parents != nullptr)
        for (int up = source.node, steps = 0; up > 0 && steps <= source.node; up = source.parents[up], ++steps) count(source.tokens[up], true);
    for (int i = threadIdx.x; i < static_cast<int>(source.rule->bias_count); i += blockDim.x) {
        const int at = source.bias_tokens[i] - begin;
        if (at >= 0 && at < CHUNK) atomicOr(&marks[at], BIASED);
    }
    __syncthreads();
}

// z of a token before truncation (S1); `penalised`: before the temperature. Every operation is rounded once: no contraction.
PARITREE_INLINE double scaled(const Source& source, int token, unsigned mark, double& penalised) {
    const Rule& rule = *source.rule;
    double z = static_cast<double>(source.logits[token]);
    if (mark & BIASED)
        for (int i = 0; i < static_cast<int>(rule.bias_count); ++i)
            if (source.bias_tokens[i] == token) z = __dadd_rn(z, source.biases[i]);
    if (mark & SEEN) z = z > 0.0 ? z / rule.repetition : __dmul_rn(z, rule.repetition);
    if (mark & COUNT_MASK) {
        z = __dadd_rn(z, -__dmul_rn(rule.frequency, static_cast<double>(mark & COUNT_MASK)));
        z = __dadd_rn(z, -rule.presence);
    }
    penalised = z;
    return rule.temperature == 0.0 || rule.temperature == 1.0 ? z : z / rule.temperature;
}

// Every token of the row through `visit(token, z, penalised)`, four neighbours a thread, so that they share a block of noise.
template <typename Visit>
PARITREE_INLINE void over_tokens(const Source& source, unsigned* marks, Visit visit) {
    for (int begin = 0; begin < source.vocab; begin += CHUNK) {
        mark_chunk(source, begin, marks);
        const int end = min(source.vocab, begin + CHUNK);
        for (int first = begin + 4 * static_cast<int>(threadIdx.x); first < end; first += 4 * static_cast<int>(blockDim.x)) {
            double z[4], penalised[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + i < end) z[i] = scaled(source, first + i, source.marked ? marks[first + i - begin] : 0u, penalised[i]);
            visit(first, min(4, end - first), z, penalised);
        }
    }
}

// The order of truncation: z descending, id ascending.
PARITREE_INLINE bool precedes(double z, int index, double other_z, int other_index) { return z > other_z || (z == other_z && index < other_index); }

// Where a token stands in that order. Where z is the logit over an ordinary temperature, logits are in the same order, ties included: distinct
// float32 numbers have distinct quotients in float64.
struct Bound {
    double z;
    int index;
    float logit;
    bool by_logit;
};

PARITREE_INLINE Bound everything(const Source& source) { return {minus_infinity_double(), source.vocab, 0.0f, false}; }

PARITREE_INLINE bool is_ordinary(const Source& source) {
    return !source.marked && source.rule->temperature > 0x1p-100 && source.rule->temperature < 0x1p100;
}

PARITREE_INLINE Bound bound_of(const Source& source, const Entry& token) {
    const bool by_logit = is_ordinary(source);
    return {token.z, token.index, by_logit ? source.logits[token.index] : 0.0f, by_logit};
}

// Every logit of a row without marks through `visit(first, size, logit)`, four neighbours a thread.
template <typename Visit>
PARITREE_INLINE void over_logits(const Source& source, Visit visit) {
    const bool wide = source.vocab % 4 == 0;
    for (int first = 4 * static_cast<int>(threadIdx.x); first < source.vocab; first += 4 * static_cast<int>(blockDim.x)) {
        const int size = min(4, source.vocab - first);
        float logit[4];
        if (wide) {
            const float4 four = *reinterpret_cast<const float4*>(source.logits + first);
            logit[0] = four.x;
            logit[1] = four.y;
            logit[2] = four.z;
            logit[3] = four.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) logit[i] = i < size ? source.logits[first + i] : minus_infinity();
        }
        visit(first, size, logit);
    }
}

PARITREE_INLINE bool logit_precedes(float logit, int index, const Bound& bound) { return logit > bound.logit || (logit == bound.logit && index < bound.index); }

// Not below z + noise. -log u >= 1 - u, so that the noise is at most -log(1 - u); the upper 32 bits of u give a lower bound of 1 - u. The last
// term covers two roundings of z, that of 1 - u, __logf and the sums: relative 2^-22 and absolute 2^-20, several times over.
PARITREE_INLINE float key_ceiling(float z, unsigned long long word) {
    const float noise = -__logf(static_cast<float>(~static_cast<unsigned>(word >> 32)) * 0x1p-32f);
    return z + noise + 0x1p-17f * (1.0f + fabsf(z) + fabsf(noise));
}

// A float32 that is not above the key of `own`.
PARITREE_INLINE float key_floor(const Entry& own) {
    const float near = static_cast<float>(own.key - key_error(own));
    return near - 0x1p-22f * fabsf(near) - 0x1p-126f;
}

// The first of the race among the tokens before `bound`.
PARITREE_INLINE Entry race(const Source& source, const Noise& noise, const Bound& bound, unsigned* marks, Entry* scratch, bool& undecided) {
    Entry best = nobody();
    const bool greedy = source.rule->temperature == 0.0;
    const double bound_z = bound.z;
    const int bound_index = bound.index;
    if (bound.by_logit) {
        // as in sample_race: `least` is `ordered` of a float32 that is not above the best key, in a word that a row without marks has to spare
        volatile unsigned* least = marks;
        __syncthreads();
        if (threadIdx.x == 0) *least = 0;
        __syncthreads();
        const float inverse = static_cast<float>(1.0 / source.rule->temperature);
        over_logits(source, [&](int first, int size, const float(&logit)[4]) {
            bool any = false;
            for (int i = 0; i < size; ++i) any = any || logit_precedes(logit[i], first + i, bound);
            if (!any) return;
            unsigned long long word[4] = {};
            if (!greedy) philox(noise, static_cast<unsigned>(first) / 4, word);
            for (int i = 0; i < size; ++i) {
                if (!logit_precedes(logit[i], first + i, bound)) continue;
                const unsigned known = *least;
                if (known && key_ceiling(logit[i] * inverse, word[i]) < unordered(known)) continue;
                double penalised;
                const Entry own = entry(scaled(source, first + i, 0, penalised), greedy ? 0.0 : uniform(word[i]), first + i);
                if (!beats(own, best, undecided)) continue;
                best = own;
                atomicMax(&marks[0], ordered(key_floor(own)));
            }
        });
        __syncthreads();  // the word is a mark again
        return block_best(best, scratch, undecided);
    }
    over_tokens(source, marks, [&](int first, int size, const double(&z)[4], const double(&)[4]) {
        bool any = false;
        for (int i = 0; i < size; ++i) any = any || (z[i] > minus_infinity_double() && precedes(z[i], first + i, bound_z, bound_index));
        if (!any) return;
        unsigned long long word[4] = {};
        if (!greedy) philox(noise, static_cast<unsigned>(first) / 4, word);
        for (int i = 0; i < size; ++i) {
            if (!(z[i] > minus_infinity_double()) || !precedes(z[i], first + i, bound_z, bound_index)) continue;
            const Entry own = entry(z[i], greedy ? 0.0 : uniform(word[i]), first + i);
            if (beats(own, best, undecided)) best = own;
        }
    });
    return block_best(best, scratch, undecided);
}

// ---- truncation ------------------------------------------------------------------------------------------------------

// What the steps before top-p keep: tokens whose z is at least `least` exactly (min-p), and that precede (end_z, end_index) or are it (top-k).
struct Head {
    double top;              // the largest z
    double log_min_p;        // -inf: no min-p
    Pair log_min_p_pair;
    double end_z;
    int end_index;
};

// z - top >= log(min_p): equal only for z = top (a rational power of e is rational for the exponent 0 only).
PARITREE_INLINE bool reaches_share(const Head& head, double z, bool& undecided) {
    if (z == head.top || head.log_min_p == minus_infinity_double()) return true;
    if (head.log_min_p == 0.0) return false;
    const double gap = z - head.top, margin = gap - head.log_min_p;
    if (fabs(margin) > 0x1p-50 * (fabs(gap) + fabs(head.log_min_p))) return margin > 0.0;
    const Pair exact = minus(two_sum(z, -head.top), head.log_min_p_pair);
    if (fabs(exact.high) <= 0x1p-85 * fabs(head.log_min_p)) undecided = true;
    return exact.high > 0.0;
}

PARITREE_INLINE bool in_head(const Head& head, double z, int index, bool& undecided) {
    return z > minus_infinity_double() && !precedes(head.end_z, head.end_index, z, index) && reaches_share(head, z, undecided);
}

// Ordered bits of z: larger is larger, both zeros are one number, minus infinity is above 0.
PARITREE_INLINE unsigned long long ordered_bits(double z) {
    const unsigned long long bits = static_cast<unsigned long long>(__double_as_longlong(z + 0.0));
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

PARITREE_INLINE double of_ordered_bits(unsigned long long bits) {
    return __longlong_as_double(static_cast<long long>(bits >> 63 ? bits & ~(1ull << 63) : ~bits));
}

// Place `wanted` (from 1) in the order of truncation: z by eight bits at a time from above, then the index in the same way.
PARITREE_INLINE void place_in_order(const Source& source, long long wanted, unsigned* marks, unsigned* digits, double& z_found, int& index_found) {
    unsigned long long prefix = 0;
    __shared__ unsigned long long prefix_shared;
    __shared__ long long left_shared;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) digits[i] = 0;
        __syncthreads();
        over_tokens(source, marks, [&](int, int size, const double(&z)[4], const double(&)[4]) {
            for (int i = 0; i < size; ++i) {
                const unsigned long long bits = ordered_bits(z[i]);
                if (shift == 56 || bits >> (shift + 8) == prefix) atomicAdd(&digits[bits >> shift & 255u], 1u);
            }
        });
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            for (; digit > 0 && digits[digit] < wanted; --digit) wanted -= digits[digit];
            prefix_shared = prefix << 8 | static_cast<unsigned>(digit);
            left_shared = wanted;
        }
        __syncthreads();
        prefix = prefix_shared;
        wanted = left_shared;
        __syncthreads();
    }
    z_found = of_ordered_bits(prefix);
    unsigned at = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) digits[i] = 0;
        __syncthreads();
        over_tokens(source, marks, [&](int first, int size, const double(&z)[4], const double(&)[4]) {
            for (int i = 0; i < size; ++i) {
                const unsigned index = static_cast<unsigned>(first + i);
                if (ordered_bits(z[i]) == prefix && (shift == 24 || index >> (shift + 8) == at)) atomicAdd(&digits[index >> shift & 255u], 1u);
            }
        });
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 0;
            for (; digit < 255 && digits[digit] < wanted; ++digit) wanted -= digits[digit];
            prefix_shared = at << 8 | static_cast<unsigned>(digit);
            left_shared = wanted;
        }
        __syncthreads();
        at = static_cast<unsigned>(prefix_shared);
        wanted = left_shared;
        __syncthreads();
    }
    index_found = static_cast<int>(at);
}

// Shared memory of one block a row.
struct Scratch {
    unsigned long long held[HEAD_MAX];
    unsigned marks[CHUNK];  // of a row without marks: a histogram of its logits
    unsigned digits[256];
    Entry entries[THREADS / 32];
    double doubles[THREADS / 32];
    Pair pairs[THREADS / 32];
};

// The masses before `bound` and of the whole row in float32, and what their difference may be off by: z and the gap by 2^-21 of the sizes of the
// numbers in them, the exponential by 2 ulp, sums of four by 2 ulp; twice over.
PARITREE_INLINE void estimated_masses(const Source& source, double top, const Bound& bound, Scratch& scratch, double& before, double& total, double& doubt) {
    const float inverse = static_cast<float>(1.0 / source.rule->temperature), top_near = static_cast<float>(top), size_of_top = fabsf(top_near) + 4.0f;
    before = total = doubt = 0.0;
    over_logits(source, [&](int first, int, const float(&logit)[4]) {
        float early = 0.0f, all = 0.0f, off = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(logit[i] > minus_infinity())) continue;
            const float gap = fmaxf(top_near - logit[i] * inverse, 0.0f), weight = expf(-gap);
            all += weight;
            off += weight * (size_of_top + gap);
            if (logit_precedes(logit[i], first + i, bound)) early += weight;
        }
        before += static_cast<double>(early);
        total += static_cast<double>(all);
        doubt += static_cast<double>(off);
    });
    before = block_sum(before, scratch.doubles);
    total = block_sum(total, scratch.doubles);
    doubt = 0x1p-19 * block_sum(doubt, scratch.doubles);
}

// Whether top-p keeps `token`: the mass of what stands before it in the head is below top_p of the mass of the head.
PARITREE_INLINE bool mass_keeps(const Source& source, const Head& head, const Entry& token, Scratch& scratch, bool& undecided) {
    const double top_p = source.rule->top_p;
    double before = 0.0, total = 0.0, doubt = 0.0, number = 0.0, rank = 0.0, highest = 0.0;  // highest: how many have the largest z
    const Bound bound = bound_of(source, token);
    if (bound.by_logit && head.log_min_p == minus_infinity_double() && head.end_z == minus_infinity_double()) {
        estimated_masses(source, head.top, bound, scratch, before, total, doubt);
        if (fabs(before - top_p * total) > doubt) return before < top_p * total;
        before = total = doubt = 0.0;
    }
    over_tokens(source, scratch.marks, [&](int first, int size, const double(&z)[4], const double(&)[4]) {
        for (int i = 0; i < size; ++i) {
            if (!in_head(head, z[i], first + i, undecided)) continue;
            const double gap = head.top - z[i], weight = exp(-gap);
            const bool earlier = precedes(z[i], first + i, token.z, token.index);
            total += weight;
            doubt += weight * (1.0 + gap);
            number += 1.0;
            if (earlier) {
                before += weight;
                rank += 1.0;
            }
            if (gap == 0.0) highest += 1.0;
        }
    });
    before = block_sum(before, scratch.doubles);
    total = block_sum(total, scratch.doubles);
    doubt = block_sum(doubt, scratch.doubles);
    number = block_sum(number, scratch.doubles);
    rank = block_sum(rank, scratch.doubles);
    highest = block_sum(highest, scratch.doubles);
    if (token.z == head.top) {  // rank < top_p * highest, exactly; where the two are equal, whatever else is in the head decides
        const double product = __dmul_rn(top_p, highest), excess = rank - product, rest = fma(top_p, highest, -product);
        if (highest == number) return excess < rest;
        if (excess <= rest) return true;
    }
    // per weight: an ulp of exp, and the rounding of its argument; sums by half an ulp a term. Twice over.
    const double error = 0x1p-51 * doubt + 0x1p-51 * (number + 2.0) * total;
    const double margin = before - top_p * total;
    if (fabs(margin) > error) return margin < 0.0;
    Pair before_pair = {0.0, 0.0}, total_pair = {0.0, 0.0};
    over_tokens(source, scratch.marks, [&](int first, int size, const double(&z)[4], const double(&)[4]) {
        for (int i = 0; i < size; ++i) {
            if (!in_head(head, z[i], first + i, undecided) || z[i] - head.top < -700.0) continue;  // below 2^-1000
            const Pair weight = exp_pair(two_sum(z[i], -head.top));
            total_pair = plus(total_pair, weight);
            if (precedes(z[i], first + i, token.z, token.index)) before_pair = plus(before_pair, weight);
        }
    });
    before_pair = block_sum(before_pair, scratch.pairs);
    total_pair = block_sum(total_pair, scratch.pairs);
    const Pair exact = minus(before_pair, times(total_pair, {top_p, 0.0}));
    if (fabs(exact.high) <= 0x1p-80 * total_pair.high) undecided = true;  // n <= 2^18 sums of pairs, each within 2^-90
    return exact.high < 0.0;
}

// The first candidates of an ordinary row in the order of truncation, `wanted` of them and whatever shares the last bin, as ranks in scratch.held;
// their number, or -1 where there are more than fit. Selection as in draft_table.cuh: of all threads' maxima the lowest bounds what is counted.
PARITREE_INLINE int gather_head(const Source& source, long long wanted, Scratch& scratch) {
    float own = minus_infinity();
    over_logits(source, [&](int, int, const float(&logit)[4]) { own = fmaxf(own, fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]))); });
    const float least = static_cast<float>(-block_max(-static_cast<double>(own), scratch.doubles));
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) scratch.marks[i] = 0;
    unsigned* size = &scratch.digits[64];
    if (threadIdx.x == 0) *size = 0;
    __syncthreads();
    constexpr int SHIFT = 32 - draft::BIN_BITS;
    over_logits(source, [&](int, int, const float(&logit)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (logit[i] >= least && logit[i] > minus_infinity()) atomicAdd(&scratch.marks[ordered(logit[i]) >> SHIFT], 1u);
    });
    __syncthreads();
    const unsigned threshold = draft::threshold_bin(scratch.marks, static_cast<unsigned>(wanted), scratch.digits);
    over_logits(source, [&](int first, int, const float(&logit)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(logit[i] > minus_infinity()) || ordered(logit[i]) >> SHIFT < threshold) continue;
            const unsigned at = atomicAdd(size, 1u);
            if (at < HEAD_MAX) scratch.held[at] = ranked(ordered(logit[i]), first + i);
        }
    });
    __syncthreads();
    const unsigned found = *size;
    __syncthreads();
    if (found > HEAD_MAX) return -1;
    unsigned padded = 2;
    while (padded < found) padded <<= 1;
    for (unsigned i = found + threadIdx.x; i < padded; i += THREADS) scratch.held[i] = 0;
    __syncthreads();
    draft::sort_descending(scratch.held, padded);
    return static_cast<int>(found);
}

// The draw of an ordinary row with top-k, from its head alone; -1 where float64 cannot tell what top-p keeps. `end`: the last one that top-k keeps.
PARITREE_INLINE int drawn_from_head(const Source& source, const Noise& noise, Head& head, int size, Scratch& scratch, bool& undecided) {
    const Rule& rule = *source.rule;
    const auto z_at = [&](int place) {
        double penalised;
        return scaled(source, index_of(scratch.held[place]), 0, penalised);
    };
    int kept = static_cast<int>(min(static_cast<long long>(size), rule.top_k));
    if (rule.ties_all) {
        const unsigned last = static_cast<unsigned>(scratch.held[kept - 1] >> 32);
        double equal = 0.0;
        for (int i = kept + threadIdx.x; i < size; i += THREADS) equal += static_cast<unsigned>(scratch.held[i] >> 32) == last;
        kept += static_cast<int>(block_sum(equal, scratch.doubles));
    }
    head.end_z = z_at(kept - 1);
    head.end_index = index_of(scratch.held[kept - 1]);
    if (rule.min_p > 0.0) {
        double reaching = 0.0;
        for (int i = threadIdx.x; i < kept; i += THREADS) reaching += reaches_share(head, z_at(i), undecided);
        kept = static_cast<int>(block_sum(reaching, scratch.doubles));
    }
    if (rule.top_p < 1.0) {
        const int each = (kept + THREADS - 1) / THREADS, begin = min(kept, each * static_cast<int>(threadIdx.x)), end = min(kept, begin + each);
        double own = 0.0, doubt = 0.0;
        for (int i = begin; i < end; ++i) {
            const double gap = head.top - z_at(i), weight = exp(-gap);
            own += weight;
            doubt += weight * (1.0 + gap);
        }
        double up_to = own;
        for (int step = 1; step < 32; step <<= 1) {
            const double before = __shfl_up_sync(FULL_WARP, up_to, static_cast<unsigned>(step));
            if (static_cast<int>(threadIdx.x % 32) >= step) up_to += before;
        }
        if (threadIdx.x % 32 == 31) scratch.doubles[threadIdx.x / 32] = up_to;
        __syncthreads();
        double total = 0.0, base = 0.0;
        for (unsigned w = 0; w < THREADS / 32; ++w) {
            if (w == threadIdx.x / 32) base = total;
            total += scratch.doubles[w];
        }
        __syncthreads();
        double before = base + up_to - own, below = 0.0, unclear = 0.0;
        // as in mass_keeps, and once more for sums that are taken back
        const double error = 0x1p-50 * block_sum(doubt, scratch.doubles) + 0x1p-50 * (static_cast<double>(kept) + 2.0) * total;
        for (int i = begin; i < end; ++i) {
            const double margin = before - rule.top_p * total;
            unclear += i > 0 && fabs(margin) <= error;
            below += i == 0 || margin < 0.0;
            before += exp(z_at(i) - head.top);
        }
        if (block_sum(unclear, scratch.doubles) > 0.0) return -1;
        kept = static_cast<int>(block_sum(below, scratch.doubles));
    }
    Entry best = nobody();
    for (int i = threadIdx.x; i < kept; i += THREADS) {
        const int token = index_of(scratch.held[i]);
        unsigned long long word[4];
        philox(noise, static_cast<unsigned>(token) / 4, word);
        const int lane = token % 4;
        const Entry own = entry(z_at(i), uniform(lane < 2 ? (lane == 0 ? word[0] : word[1]) : lane == 2 ? word[2] : word[3]), token);
        if (beats(own, best, undecided)) best = own;
    }
    __syncwarp();
    return block_best(best, scratch.entries, undecided).index;
}

// The token of a row, given the first of the race over everything; -1 and a status where there is none.
PARITREE_INLINE int truncated(const Source& source, const Noise& noise, Entry winner, double top, Scratch& scratch, bool& undecided) {
    const Rule& rule = *source.rule;
    Head head = {top, minus_infinity_double(), {0.0, 0.0}, minus_infinity_double(), source.vocab};
    if (rule.min_p > 0.0) {
        head.log_min_p = log(rule.min_p);
        head.log_min_p_pair = rule.min_p < 1.0 && exponent_of(rule.min_p) > -1022 ? log_pair({rule.min_p, 0.0}) : Pair{head.log_min_p, 0.0};
    }
    const bool cut_k = rule.top_k > 0 && rule.top_k < source.vocab;
    if (cut_k && rule.top_k <= HEAD_MAX / 2 && is_ordinary(source)) {
        const int size = gather_head(source, rule.top_k, scratch);
        const int found = size > 0 ? drawn_from_head(source, noise, head, size, scratch, undecided) : -1;
        if (found >= 0) return found;
    }
    if (cut_k && rule.top_p < 1.0 && head.end_z == minus_infinity_double()) {  // top-p asks for the mass of the whole head
        place_in_order(source, rule.top_k, scratch.marks, scratch.digits, head.end_z, head.end_index);
        if (rule.ties_all) head.end_index = source.vocab;
    }
    while (true) {
        bool kept = winner.index >= 0 && in_head(head, winner.z, winner.index, undecided);
        if (kept && cut_k && !(rule.top_p < 1.0)) {
            double before = 0.0;
            const Bound bound = bound_of(source, winner);
            if (bound.by_logit) {
                over_logits(source, [&](int first, int size, const float(&logit)[4]) {
                    int number = 0;
                    for (int i = 0; i < size; ++i) number += rule.ties_all ? logit[i] > bound.logit : logit_precedes(logit[i], first + i, bound);
                    before += number;
                });
            } else {
                over_tokens(source, scratch.marks, [&](int first, int size, const double(&z)[4], const double(&)[4]) {
                    for (int i = 0; i < size; ++i) before += rule.ties_all ? z[i] > winner.z : precedes(z[i], first + i, winner.z, winner.index);
                });
            }
            kept = block_sum(before, scratch.doubles) < static_cast<double>(rule.top_k);
        }
        if (kept && rule.top_p < 1.0) kept = mass_keeps(source, head, winner, scratch, undecided);
        if (kept || winner.index < 0) return winner.index;  // the first token of all is always kept, so that somebody is left
        winner = race(source, noise, bound_of(source, winner), scratch.marks, scratch.entries, undecided);
    }
}

PARITREE_INLINE bool truncates(const Rule& rule, int vocab) {
    return rule.temperature != 0.0 && (rule.min_p > 0.0 || (rule.top_k > 0 && rule.top_k < vocab) || rule.top_p < 1.0);
}
}  // namespace sampling
}  // namespace paritree

// grid (rows), block 512; dynamic shared memory: a Scratch
extern "C" __global__ void __launch_bounds__(512, 1)
sample_plain(const float* logits, const paritree::sampling::Rule* rule, const int* bias_tokens, const double* biases, const int* history, const int* streams,
             const int* tokens, const int* parents, const int* count, int nodes, int stride, int vocab, int* ids, int* status) {
    using namespace paritree;
    using namespace paritree::sampling;
    PARITREE_SHARED(unsigned char, memory);
    Scratch& scratch = *reinterpret_cast<Scratch*>(memory);
    const Rows rows = {history, streams, tokens, parents, count, nodes, stride};
    const int row = blockIdx.x;
    if (is_padding(rows, row)) {
        if (threadIdx.x == 0) ids[row] = -1;
        return;
    }
    Noise noise;
    const Source source = source_of(logits, rule, bias_tokens, biases, rows, vocab, row, noise);
    bool undecided = false, refused = false;
    double top = minus_infinity_double();
    over_tokens(source, scratch.marks, [&](int, int size, const double(&z)[4], const double(&penalised)[4]) {
        for (int i = 0; i < size; ++i) {
            refused = refused || z[i] != z[i] || penalised[i] != penalised[i] || z[i] == -minus_infinity_double();
            top = fmax(top, z[i]);
        }
    });
    top = block_max(top, scratch.doubles);
    if (block_sum(refused ? 1.0 : 0.0, scratch.doubles) > 0.0 || top == minus_infinity_double()) {
        if (threadIdx.x == 0) {
            atomicOr(status, STATUS_NO_DISTRIBUTION);
            ids[row] = -1;
        }
        return;
    }
    const Entry winner = race(source, noise, everything(source), scratch.marks, scratch.entries, undecided);
    const int found = truncates(*rule, vocab) ? truncated(source, noise, winner, top, scratch, undecided) : winner.index;
    if (undecided) atomicOr(status, STATUS_UNDECIDED);
    if (threadIdx.x == 0) ids[row] = found;
}

// ---- many blocks a row -----------------------------------------------------------------------------------------------

namespace paritree {
namespace sampling {
constexpr int RACE_THREADS = 256, RACE_GROUPS = 4;
static_assert(RACE_THREADS * RACE_GROUPS * 4 == CHUNK, "a block of sample_race goes through a chunk in RACE_GROUPS steps");

// What a block of sample_race found.
struct Part {
    Entry best;
    double top;  // the largest z
    int refused, undecided;
};
static_assert(sizeof(Part) == 48 && sizeof(Scratch) == 34688 && sizeof(Rule) == 80, "impls/cuda/kernels.py and host/launch.cu have these sizes");

}  // namespace sampling
}  // namespace paritree

// grid (blocks, rows), block 256; parts [rows, gridDim.x]. A block takes every gridDim.x-th chunk of 4,096 tokens. What float32 proves to be behind the
// best key that the block has met is left there; the rest, a few tokens, is judged in float64.
extern "C" __global__ void __launch_bounds__(256)
sample_race(const float* logits, const paritree::sampling::Rule* rule, const int* bias_tokens, const double* biases, const int* history, const int* streams,
            const int* tokens, const int* parents, const int* count, int nodes, int stride, int vocab, paritree::sampling::Part* parts) {
    using namespace paritree;
    using namespace paritree::sampling;
    __shared__ unsigned marks[CHUNK];
    __shared__ Entry entries[RACE_THREADS / 32];
    __shared__ double doubles[RACE_THREADS / 32];
    __shared__ unsigned least;  // `ordered` of a float32 that is not above the best key; 0: none. Only rises, so that a stale look costs time only
    const Rows rows = {history, streams, tokens, parents, count, nodes, stride};
    const int row = blockIdx.y;
    if (is_padding(rows, row)) return;
    Noise noise;
    const Source source = source_of(logits, rule, bias_tokens, biases, rows, vocab, row, noise);
    const bool greedy = rule->temperature == 0.0, wide = vocab % 4 == 0;
    const float inverse = greedy ? 1.0f : static_cast<float>(1.0 / rule->temperature);
    float top_logit = minus_infinity();
    double top = minus_infinity_double();
    bool refused = false, undecided = false;
    Entry best = nobody();
    if (threadIdx.x == 0) least = 0;
    __syncthreads();
    for (int begin = blockIdx.x * CHUNK; begin < vocab; begin += gridDim.x * CHUNK) {
        mark_chunk(source, begin, marks);
        for (int group = 0; group < RACE_GROUPS; ++group) {
            const int first = begin + (group * RACE_THREADS + static_cast<int>(threadIdx.x)) * 4;
            if (first >= vocab) break;
            float four[4];
            if (wide) {
                const float4 loaded = *reinterpret_cast<const float4*>(source.logits + first);
                four[0] = loaded.x;
                four[1] = loaded.y;
                four[2] = loaded.z;
                four[3] = loaded.w;
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) four[i] = first + i < vocab ? source.logits[first + i] : minus_infinity();
            }
            unsigned long long word[4] = {};
            if (!greedy) philox(noise, static_cast<unsigned>(first) / 4, word);
            const unsigned known = *static_cast<volatile unsigned*>(&least);
            const float behind = known ? unordered(known) : minus_infinity();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned mark = source.marked && first + i < vocab ? marks[first + i - begin] : 0u;
                refused = refused || four[i] != four[i] || four[i] == -minus_infinity();
                float near = four[i] * inverse;
                if (mark) {
                    double penalised;
                    const double z = scaled(source, first + i, mark, penalised);
                    refused = refused || z != z || penalised != penalised || z == -minus_infinity_double();
                    top = fmax(top, z);
                    near = static_cast<float>(z);
                } else {
                    top_logit = fmaxf(top_logit, four[i]);
                }
                const float ceiling = greedy ? near + 0x1p-20f * fabsf(near) + 0x1p-126f : key_ceiling(near, word[i]);
                if (four[i] == minus_infinity() || ceiling < behind) continue;  // NaN and infinity, beyond float32, go on
                double penalised;
                const double z = scaled(source, first + i, mark, penalised);
                if (!(z > minus_infinity_double())) continue;
                const Entry own = entry(z, greedy ? 0.0 : uniform(word[i]), first + i);
                if (!beats(own, best, undecided)) continue;
                best = own;
                atomicMax(&least, ordered(key_floor(own)));
            }
        }
    }
    if (top_logit > minus_infinity()) {
        const double logit = static_cast<double>(top_logit);
        top = fmax(top, greedy || rule->temperature == 1.0 ? logit : logit / rule->temperature);
    }
    __syncwarp();
    best = block_best(best, entries, undecided);
    top = block_max(top, doubles);
    const double any_refused = sampling::block_sum(refused ? 1.0 : 0.0, doubles), any_undecided = sampling::block_sum(undecided ? 1.0 : 0.0, doubles);
    if (threadIdx.x == 0) parts[static_cast<long long>(row) * gridDim.x + blockIdx.x] = {best, top, any_refused > 0.0, any_undecided > 0.0};
}

// grid (rows), block 512; dynamic shared memory: a Scratch; `parts_count`: blocks a row of sample_race
extern "C" __global__ void __launch_bounds__(512, 1)
sample_finish(const float* logits, const paritree::sampling::Rule* rule, const int* bias_tokens, const double* biases, const int* history, const int* streams,
              const int* tokens, const int* parents, const int* count, int nodes, int stride, int vocab, const paritree::sampling::Part* parts, int parts_count,
              int* ids, int* status) {
    using namespace paritree;
    using namespace paritree::sampling;
    PARITREE_SHARED(unsigned char, memory);
    Scratch& scratch = *reinterpret_cast<Scratch*>(memory);
    const Rows rows = {history, streams, tokens, parents, count, nodes, stride};
    const int row = blockIdx.x;
    if (is_padding(rows, row)) {
        if (threadIdx.x == 0) ids[row] = -1;
        return;
    }
    const Part* own = parts + static_cast<long long>(row) * parts_count;
    Entry winner = nobody();
    double top = minus_infinity_double();
    bool undecided = false, refused = false;
    for (int i = threadIdx.x; i < parts_count; i += THREADS) {
        if (beats(own[i].best, winner, undecided)) winner = own[i].best;
        top = fmax(top, own[i].top);
        refused = refused || own[i].refused;
        undecided = undecided || own[i].undecided;
    }
    __syncwarp();
    winner = block_best(winner, scratch.entries, undecided);
    top = block_max(top, scratch.doubles);
    const bool any_refused = sampling::block_sum(refused ? 1.0 : 0.0, scratch.doubles) > 0.0;
    if (any_refused || top == minus_infinity_double() || top == -minus_infinity_double()) {
        if (threadIdx.x == 0) {
            atomicOr(status, STATUS_NO_DISTRIBUTION);
            ids[row] = -1;
        }
        return;
    }
    int found = winner.index;
    if (truncates(*rule, vocab)) {
        Noise noise;
        const Source source = source_of(logits, rule, bias_tokens, biases, rows, vocab, row, noise);
        found = truncated(source, noise, winner, top, scratch, undecided);
    }
    if (undecided) atomicOr(status, STATUS_UNDECIDED);
    if (threadIdx.x == 0) ids[row] = found;
}
