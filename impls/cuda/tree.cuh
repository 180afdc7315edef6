// The draft tree on the device: answers spec/ops/{best_first_tree,tree_mask,accept}.py (T2-T8, C2, C3, V1, A1, A3, T6).
//
// No decision is left to rounding or to the order of threads: a path score is the exact sum of its float32 log-probabilities, and equal
// scores fall back on the rank path, kept as digits of rank + 1 in big-endian words, so that a prefix comes before its extensions.
// Two forms of the builder; the kernel takes the second one wherever its sums fit:
//   pop_wide    scores as two doubles (106 bits); a table that needs more raises STATUS_INEXACT instead of guessing
//   pop_units   scores as integers of 31 or 63 bits in units of the largest power of two that divides every log-probability
#pragma once
#include "common.cuh"

namespace paritree {
namespace tree {
constexpr int DEPTH_MAX = 20, BUDGET_MAX = 1024;                      // digits of 11 bits, five to a word, four words
constexpr int DIGIT_BITS = 11, DIGITS_PER_WORD = 5, PATH_WORDS = 4;

struct Score {  // high + low exactly, |low| at most half an ulp of high
    double high, low;
};

// score + x; `exact` is cleared where two doubles cannot hold it. FMA cannot enter: there are no products.
PARITREE_INLINE Score plus(Score score, float x, bool& exact) {
    const double term = static_cast<double>(x);
    const double sum = score.high + term, back = sum - score.high;
    const double error = (score.high - (sum - back)) + (term - back);
    const double low = score.low + error, low_back = low - score.low;
    if ((score.low - (low - low_back)) + (error - low_back) != 0.0) exact = false;
    const double high = sum + low;
    return {high, low - (high - sum)};
}

// Integers in the order of finite doubles; 0 is below all of them.
PARITREE_INLINE unsigned long long ordered_double(double x) {
    const unsigned long long bits = static_cast<unsigned long long>(__double_as_longlong(x + 0.0));
    return bits >> 63 ? ~bits : bits | (1ull << 63);
}

// The frontier: candidates waiting, `capacity` slots of shared memory.
struct Frontier {
    unsigned long long* high;  // [capacity] ordered, 0: empty
    unsigned long long* low;   // [capacity]
    unsigned long long* path;  // [capacity][PATH_WORDS]
    int* parent;               // [capacity]
    int* place;                // [capacity] depth << 16 | rank
};

// Whether slot a comes before slot b in order T3.
PARITREE_INLINE bool before(const Frontier& f, int a, int b) {
    if (f.high[a] != f.high[b]) return f.high[a] > f.high[b];
    if (f.low[a] != f.low[b]) return f.low[a] > f.low[b];
    for (int w = 0; w < PATH_WORDS; ++w) {
        const unsigned long long x = f.path[a * PATH_WORDS + w], y = f.path[b * PATH_WORDS + w];
        if (x != y) return x < y;
    }
    return false;
}
}  // namespace tree
}  // namespace paritree

namespace paritree {
namespace tree {

// What a builder reads and writes. The table is [depth_max, width]; widths [depth_max] counts the finite candidates of a depth.
struct Build {
    const int* ids;
    const float* log_probs;
    int depth_max, width, budget, root;
    int *tokens, *parents, *depths;
    const int* widths;
};

// By the first warp. Each lane keeps the best of its slots (slot % 32 == lane); a pop is a maximum over the lanes, a search through the
// slots of one lane, and at most two insertions. Returns the number of nodes; `exact` is cleared where two doubles do not suffice.
PARITREE_INLINE int pop_wide(const Build& build, unsigned long long* memory, bool& exact) {
    const int *ids = build.ids, *widths = build.widths;
    const float* log_probs = build.log_probs;
    const int depth_max = build.depth_max, width = build.width, budget = build.budget;
    int *tokens = build.tokens, *parents = build.parents, *depths = build.depths;
    const int capacity = budget + 1;
    Frontier f;
    f.high = memory;
    f.low = f.high + capacity;
    f.path = f.low + capacity;
    double* node_high = reinterpret_cast<double*>(f.path + capacity * PATH_WORDS);  // [budget + 1], by node number
    double* node_low = node_high + capacity;
    f.parent = reinterpret_cast<int*>(node_low + capacity);
    f.place = f.parent + capacity;
    const int lane = threadIdx.x;
    int used = 0, number = 0;
    int own_slot = -1;  // the best of this lane's slots
    if (lane == 0) {
        node_high[0] = node_low[0] = 0.0;
    }
    if (depth_max > 0 && width > 0 && widths[0] > 0 && budget > 0) {
        used = 1;
        if (lane == 0) {
            f.high[0] = ordered_double(static_cast<double>(log_probs[0]));
            f.low[0] = ordered_double(0.0);
            f.path[0] = 1ull << (DIGIT_BITS * (DIGITS_PER_WORD - 1));
            for (int w = 1; w < PATH_WORDS; ++w) f.path[w] = 0;
            f.parent[0] = 0;
            f.place[0] = 1 << 16;
            own_slot = 0;
        }
    }
    __syncwarp();
    while (number < budget) {
        // the winner: highest score, by halves of the ordered integer; whatever is still equal is compared in full
        const unsigned long long own_high = own_slot < 0 ? 0 : f.high[own_slot];
        const unsigned upper = static_cast<unsigned>(own_high >> 32), lower = static_cast<unsigned>(own_high);
        const unsigned best_upper = __reduce_max_sync(FULL_WARP, upper);
        if (best_upper == 0) break;  // nothing waits
        const unsigned best_lower = __reduce_max_sync(FULL_WARP, upper == best_upper ? lower : 0);
        unsigned equal = __ballot_sync(FULL_WARP, upper == best_upper && lower == best_lower);
        int slot = __shfl_sync(FULL_WARP, own_slot, __ffs(static_cast<int>(equal)) - 1);
        while (equal &= equal - 1) {
            const int rival = __shfl_sync(FULL_WARP, own_slot, __ffs(static_cast<int>(equal)) - 1);
            if (before(f, rival, slot)) slot = rival;
        }
        const int parent = f.parent[slot], depth = f.place[slot] >> 16, rank = f.place[slot] & 0xffff;
        const unsigned long long path_word = f.path[slot * PATH_WORDS + lane % PATH_WORDS];
        const Score above = {node_high[parent], node_low[parent]};
        const Score score = plus(above, log_probs[(depth - 1) * width + rank], exact);
        const bool sibling = rank + 1 < widths[depth - 1];
        const bool child = depth < depth_max && widths[depth] > 0;
        ++number;
        __syncwarp();  // every lane has read the slot
        const int child_slot = sibling ? used : slot;
        if (lane == 0) {
            tokens[number] = ids[(depth - 1) * width + rank];
            parents[number] = parent;
            depths[number] = depth;
            node_high[number] = score.high;
            node_low[number] = score.low;
            if (!sibling && !child) f.high[slot] = 0;
        }
        if (sibling) {
            const Score next = plus(above, log_probs[(depth - 1) * width + rank + 1], exact);
            if (lane < PATH_WORDS) {
                const int word = (depth - 1) / DIGITS_PER_WORD, shift = DIGIT_BITS * (DIGITS_PER_WORD - 1 - (depth - 1) % DIGITS_PER_WORD);
                f.path[slot * PATH_WORDS + lane] = path_word + (lane == word ? 1ull << shift : 0ull);
            }
            if (lane == 0) {
                f.high[slot] = ordered_double(next.high);
                f.low[slot] = ordered_double(next.low);
                f.parent[slot] = parent;
                f.place[slot] = depth << 16 | (rank + 1);
            }
        }
        if (child) {
            const Score next = plus(score, log_probs[depth * width], exact);
            if (lane < PATH_WORDS) {
                const int word = depth / DIGITS_PER_WORD, shift = DIGIT_BITS * (DIGITS_PER_WORD - 1 - depth % DIGITS_PER_WORD);
                f.path[child_slot * PATH_WORDS + lane] = path_word + (lane == word ? 1ull << shift : 0ull);
            }
            if (lane == 0) {
                f.high[child_slot] = ordered_double(next.high);
                f.low[child_slot] = ordered_double(next.low);
                f.parent[child_slot] = number;
                f.place[child_slot] = (depth + 1) << 16;
            }
            if (sibling) ++used;
        }
        __syncwarp();
        // the lane of the popped slot looks at all of its slots again, that of a new slot at one
        if (slot % 32 == lane) {
            own_slot = -1;
            for (int s = lane; s < used; s += 32)
                if (f.high[s] && (own_slot < 0 || before(f, s, own_slot))) own_slot = s;
        } else if (child && child_slot % 32 == lane && (own_slot < 0 || before(f, child_slot, own_slot))) {
            own_slot = child_slot;
        }
        __syncwarp();
    }
    return number;
}

// The same with integers of `unit` = 2^-exponent, and the frontier in 32 groups of up to 32 neighbouring slots: a new best of a group is one
// look by the whole warp.
PARITREE_INLINE long long in_units(float x, int exponent) {
    const unsigned bits = __float_as_uint(x), field = bits >> 23 & 0xffu;
    const long long mantissa = static_cast<long long>(field ? (bits & 0x7fffffu) | 0x800000u : bits & 0x7fffffu);
    const int shift = static_cast<int>(field ? field : 1u) - 150 + exponent;  // below 0 only over zero bits
    const long long size = shift >= 0 ? mantissa << shift : mantissa >> -shift;
    return bits >> 31 ? -size : size;
}

// A signed score as an unsigned key of the same order; 0 is never a score, as scores leave the highest bit but one free.
template <typename Integer>
struct Key;
template <>
struct Key<int> {
    using Type = unsigned;
    static constexpr unsigned BIAS = 0x80000000u;
    static PARITREE_INLINE unsigned upper(unsigned key) { return key; }
};
template <>
struct Key<long long> {
    using Type = unsigned long long;
    static constexpr unsigned long long BIAS = 1ull << 63;
    static PARITREE_INLINE unsigned upper(unsigned long long key) { return static_cast<unsigned>(key >> 32); }
};

// Where digit `index` of a rank path stands: its word, and its value there.
PARITREE_INLINE int word_of(int index) { return index / DIGITS_PER_WORD; }
PARITREE_INLINE unsigned long long digit_in_word(int index, int rank) {
    return static_cast<unsigned long long>(rank + 1) << (DIGIT_BITS * (DIGITS_PER_WORD - 1 - index % DIGITS_PER_WORD));
}

// What decides between equal scores: the path of a waiting candidate is that of its parent and one more digit.
struct Waiting {
    const unsigned long long* node_path;  // [budget][PATH_WORDS], by node number
    const int* parent_of;                 // [capacity], by slot
    const int* place_of;                  // [capacity] depth << 16 | rank
};

PARITREE_INLINE bool path_before(const Waiting& waiting, int a, int b) {
    const int depth_a = waiting.place_of[a] >> 16, depth_b = waiting.place_of[b] >> 16;
    const unsigned long long digit_a = digit_in_word(depth_a - 1, waiting.place_of[a] & 0xffff);
    const unsigned long long digit_b = digit_in_word(depth_b - 1, waiting.place_of[b] & 0xffff);
    for (int w = 0; w < PATH_WORDS; ++w) {
        const unsigned long long x = waiting.node_path[waiting.parent_of[a] * PATH_WORDS + w] + (w == word_of(depth_a - 1) ? digit_a : 0ull);
        const unsigned long long y = waiting.node_path[waiting.parent_of[b] * PATH_WORDS + w] + (w == word_of(depth_b - 1) ? digit_b : 0ull);
        if (x != y) return x < y;
    }
    return false;
}

// The lane with the largest key, the first rank path among equals; -1: all keys are 0. The same answer in every lane.
template <typename Integer>
PARITREE_INLINE int best_lane(typename Key<Integer>::Type key, int slot, const Waiting& waiting) {
    __syncwarp();  // lanes come from branches of their own, and a reduction over a part of the warp would be a wrong maximum
    const unsigned upper = Key<Integer>::upper(key), best_upper = __reduce_max_sync(FULL_WARP, upper);
    if (best_upper == 0) return -1;
    bool best = upper == best_upper;
    if constexpr (sizeof(Integer) == 8) {
        const unsigned lower = static_cast<unsigned>(key), best_lower = __reduce_max_sync(FULL_WARP, best ? lower : 0u);
        best = best && lower == best_lower;
    }
    unsigned equal = __ballot_sync(FULL_WARP, best);
    int winner = __ffs(static_cast<int>(equal)) - 1;
    if (equal & (equal - 1)) {
        int winner_slot = __shfl_sync(FULL_WARP, slot, winner);
        while (equal &= equal - 1) {
            const int rival = __ffs(static_cast<int>(equal)) - 1, rival_slot = __shfl_sync(FULL_WARP, slot, rival);
            if (path_before(waiting, rival_slot, winner_slot)) {
                winner = rival;
                winner_slot = rival_slot;
            }
        }
    }
    return winner;
}

// `table` [depth_max][width] in units, or null: converted where it is read. The frontier is 32 groups of up to 32 neighbouring slots; lane g
// keeps the best of group g. What the next maximum needs comes first in an iteration, what only ties and the output need comes last.
template <typename Integer>
PARITREE_INLINE int pop_units(const Build& build, unsigned long long* memory, const Integer* table, int exponent) {
    using Unsigned = typename Key<Integer>::Type;
    const int width = build.width, budget = build.budget, per_group = (budget + 31) / 32, capacity = 32 * per_group;
    unsigned long long* node_path = memory;                                              // [capacity][PATH_WORDS], by node number below the budget
    Unsigned* keys = reinterpret_cast<Unsigned*>(node_path + capacity * PATH_WORDS);     // [capacity], by slot; 0: empty
    Integer* node_score = reinterpret_cast<Integer*>(keys + capacity);                   // [capacity], by node number
    int* parent_of = reinterpret_cast<int*>(node_score + capacity);                      // [capacity], by slot
    int* place_of = parent_of + capacity;                                                // [capacity]
    const Waiting waiting = {node_path, parent_of, place_of};
    const int lane = threadIdx.x;
    const auto units_at = [&](int at) {
        return table != nullptr ? table[at] : static_cast<Integer>(in_units(build.log_probs[at], exponent));
    };
    for (int s = lane; s < capacity; s += 32) keys[s] = 0;
    if (budget == 0 || build.depth_max == 0 || width == 0 || build.widths[0] == 0) return 0;
    Unsigned own_key = 0;  // the best of group `lane`
    int own_slot = lane * per_group, used = 1, number = 0;
    __syncwarp();
    if (lane < PATH_WORDS) node_path[lane] = 0;
    if (lane == 0) {
        own_key = static_cast<Unsigned>(units_at(0)) ^ Key<Integer>::BIAS;
        keys[0] = own_key;
        node_score[0] = 0;
        parent_of[0] = 0;
        place_of[0] = 1 << 16;
    }
    const bool as_child = lane == 1;  // lane 1 makes the child, lane 0 the sibling
    while (true) {
        const int group = best_lane<Integer>(own_key, own_slot, waiting);
        if (group < 0) break;
        const int slot = __shfl_sync(FULL_WARP, own_slot, group);
        const Integer score = static_cast<Integer>(__shfl_sync(FULL_WARP, own_key, group) ^ Key<Integer>::BIAS);
        const int parent = parent_of[slot], place = place_of[slot], depth = place >> 16, rank = place & 0xffff;
        ++number;
        const int row = (depth - 1) * width;
        const bool sibling = rank + 1 < build.widths[depth - 1], child = build.widths[depth] > 0;  // widths past the last depth are 0
        const bool wanted = as_child ? child : sibling;
        const Integer above = as_child ? score : node_score[parent];
        const Unsigned key = wanted ? static_cast<Unsigned>(above + units_at(as_child ? row + width : row + rank + 1)) ^ Key<Integer>::BIAS : Unsigned{0};
        if (number < budget) {
            const int fresh = used % 32 * per_group + used / 32;
            const int target = as_child && sibling ? fresh : slot;
            __syncwarp();  // the slot is read
            if (lane < 2 && wanted) {
                keys[target] = key;
                parent_of[target] = as_child ? number : parent;
                place_of[target] = as_child ? (depth + 1) << 16 : place + 1;
            }
            if (lane == 0 && !sibling && !child) keys[slot] = 0;
            if (lane == 2) node_score[number] = score;
            if (lane >= 4 && lane < 4 + PATH_WORDS) {
                const int word = lane - 4;
                node_path[number * PATH_WORDS + word] = node_path[parent * PATH_WORDS + word] + (word == word_of(depth - 1) ? digit_in_word(depth - 1, rank) : 0ull);
            }
            const Unsigned child_key = __shfl_sync(FULL_WARP, key, 1);
            __syncwarp();  // what is written is seen
            const Unsigned in_group = lane < per_group ? keys[group * per_group + lane] : Unsigned{0};
            const int best = best_lane<Integer>(in_group, group * per_group + lane, waiting);
            const Unsigned best_key = __shfl_sync(FULL_WARP, in_group, best < 0 ? 0 : best);
            if (lane == group) {
                own_key = best < 0 ? Unsigned{0} : best_key;
                own_slot = group * per_group + (best < 0 ? 0 : best);
            }
            if (child && sibling) {
                if (lane == used % 32 && lane != group && (child_key > own_key || (child_key == own_key && path_before(waiting, fresh, own_slot)))) {
                    own_key = child_key;
                    own_slot = fresh;
                }
                ++used;
            }
        }
        if (lane == 8) {
            build.tokens[number] = build.ids[row + rank];
            build.parents[number] = parent;
            build.depths[number] = depth;
        }
        if (number == budget) break;
    }
    return number;
}

}  // namespace tree
}  // namespace paritree

// Shared memory in bytes: 72 * (budget + 1 rounded up to a multiple of 32), 76,032 for 1,024 nodes; where `held` is not 0, as many words
// more for the table in units.
//
// One block, 256 threads: all of them check the table, find its unit and bring it near; then the first warp pops.
// tokens, parents, depths [budget + 1], count [1]; ids and log_probs [depth_max, width].
extern "C" __global__ void __launch_bounds__(256)
best_first_tree(const int* ids, const float* log_probs, int depth_max, int width, int budget, int root, int* tokens, int* parents, int* depths,
                int* count, int* status, int held, const int* root_at) {
    using namespace paritree;
    if (root_at != nullptr) root = *root_at;
    using namespace paritree::tree;
    PARITREE_SHARED(unsigned long long, memory);
    __shared__ int widths[DEPTH_MAX + 1];  // finite candidates of a depth; 0 past the last one
    __shared__ float largest[DEPTH_MAX];
    __shared__ int problems, exponent_low;

    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        problems = 0;
        exponent_low = 1 << 20;
        widths[depth_max] = 0;
    }
    for (int i = threadIdx.x; i <= budget; i += blockDim.x) {
        tokens[i] = i ? -1 : root;
        parents[i] = -1;
        depths[i] = i ? -1 : 0;
    }
    __syncthreads();
    for (int depth = threadIdx.x / 32; depth < depth_max; depth += blockDim.x / 32) {
        const float* row = log_probs + depth * width;
        int finite = 0, problem = 0, low = 1 << 20;
        float size = 0.0f;
        for (int k = lane; k < width; k += 32) {
            const float own = row[k];
            if (own != own || own == -minus_infinity()) problem |= STATUS_NOT_FINITE;
            if (k && !(own <= row[k - 1])) problem |= STATUS_ASCENDS;
            if (own > minus_infinity()) {
                ++finite;
                size = fmaxf(size, fabsf(own));
                const unsigned bits = __float_as_uint(own), field = bits >> 23 & 0xffu;
                const unsigned mantissa = field ? (bits & 0x7fffffu) | 0x800000u : bits & 0x7fffffu;
                if (mantissa) low = min(low, static_cast<int>(field ? field : 1u) - 150 + __ffs(static_cast<int>(mantissa)) - 1);
            }
        }
        size = warp_max(size);
        const int whole = static_cast<int>(__reduce_add_sync(FULL_WARP, static_cast<unsigned>(finite)));
        if (lane == 0) {
            widths[depth] = whole;
            largest[depth] = size;
        }
        if (problem) atomicOr(&problems, problem);
        atomicMin(&exponent_low, low);
    }
    __syncthreads();
    if (problems) {
        if (threadIdx.x == 0) {
            atomicOr(status, problems);
            *count = 0;
        }
        return;
    }
    const Build build = {ids, log_probs, depth_max, width, budget, root, tokens, parents, depths, widths};
    double bound = 0.0;  // no sum is larger
    for (int depth = 0; depth < depth_max; ++depth) bound += static_cast<double>(largest[depth]);
    const int high = static_cast<int>(static_cast<unsigned long long>(__double_as_longlong(bound)) >> 52 & 0x7ffu) - 1022;  // bound < 2^high
    const int low = bound == 0.0 ? 0 : exponent_low, bits = bound == 0.0 ? 0 : high + 1 - low;
    bool exact = true;
    int number = 0;
    if (bits <= 30) {
        int* table = held ? reinterpret_cast<int*>(memory + 9 * ((budget + 32) / 32 * 32)) : nullptr;
        if (held) {
            for (int i = threadIdx.x; i < depth_max * width; i += blockDim.x) table[i] = log_probs[i] > minus_infinity() ? static_cast<int>(in_units(log_probs[i], -low)) : 0;
            __syncthreads();
        }
        if (threadIdx.x >= 32) return;
        number = pop_units<int>(build, memory, table, -low);
    } else {
        if (threadIdx.x >= 32) return;
        number = bits <= 62 ? pop_units<long long>(build, memory, static_cast<const long long*>(nullptr), -low) : pop_wide(build, memory, exact);
    }
    if (lane == 0) {
        *count = number;
        if (!exact) atomicOr(status, STATUS_INEXACT);
    }
}

// Positions, visibility bits and bytes of a tree. grid (rows), block a multiple of 32; bits [rows, ceil(rows / 32)]; visible
// [rows, prefix_len + rows] bytes, or null. Rows past *count (padding, C4) see themselves only; count may be null. status null: any forest.
// Dynamic shared memory: ceil(rows / 32) words.
extern "C" __global__ void tree_mask(const int* parents, const int* count, int rows, int prefix_len, int* positions, unsigned* bits,
                                     unsigned char* visible, int* status, const int* prefix_at) {
    using namespace paritree;
    if (prefix_at != nullptr) prefix_len = *prefix_at;
    PARITREE_SHARED(unsigned, row_bits);
    const int words = (rows + 31) / 32, row = blockIdx.x;
    for (int w = threadIdx.x; w < words; w += blockDim.x) row_bits[w] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool padding = count != nullptr && row > *count;
        int depth = 0, node = row;
        row_bits[node >> 5] |= 1u << (node & 31);
        if (!padding) {
            const int parent = parents[row];
            if (status != nullptr && (row == 0 ? parent != -1 : parent < 0 || parent >= row)) atomicOr(status, STATUS_STRUCTURE);
            for (int up = parent; up >= 0 && up < node; up = parents[node]) {  // a malformed tree ends the walk too
                node = up;
                row_bits[node >> 5] |= 1u << (node & 31);
                ++depth;
            }
        }
        positions[row] = prefix_len + depth;
    }
    __syncthreads();
    for (int w = threadIdx.x; w < words; w += blockDim.x) bits[static_cast<long long>(row) * words + w] = row_bits[w];
    if (visible == nullptr) return;
    unsigned char* target = visible + static_cast<long long>(row) * (prefix_len + rows);
    for (int s = threadIdx.x; s < prefix_len; s += blockDim.x) target[s] = 1;
    for (int j = threadIdx.x; j < rows; j += blockDim.x) target[prefix_len + j] = row_bits[j >> 5] >> (j & 31) & 1u;
}

// Bytes to bits: visible [rows, keys], any nonzero byte is visible; bits [rows, ceil(keys / 32)]; seen [ceil(keys / 32)], zero before: keys that
// some row sees. grid (rows), block a multiple of 32
extern "C" __global__ void pack_mask(const unsigned char* visible, unsigned* bits, unsigned* seen, int keys) {
    const unsigned char* row = visible + static_cast<long long>(blockIdx.x) * keys;
    const int words = (keys + 31) / 32;
    for (int w = threadIdx.x / 32; w < words; w += blockDim.x / 32) {
        const int s = w * 32 + static_cast<int>(threadIdx.x % 32);
        const unsigned word = __ballot_sync(paritree::FULL_WARP, s < keys && row[s] != 0);
        if (threadIdx.x % 32 == 0) {
            bits[static_cast<long long>(blockIdx.x) * words + w] = word;
            if (word) atomicOr(&seen[w], word);
        }
    }
}

// Greedy acceptance. One block, a multiple of 32 threads; dynamic shared memory: rows words. count (nodes without the root) may be null.
// Every node tells its parent whether it is the parent's choice (siblings differ, so at most one is); then one walk from the root.
// `check`: refuse a malformed tree (T6), which a tree of our own builder is not.
extern "C" __global__ void accept_greedy(const int* tokens, const int* parents, const int* target, const int* count, int rows, int check, int* path,
                                         int* length, int* bonus, int* status) {
    using namespace paritree;
    PARITREE_SHARED(int, chosen);  // [rows] the child that the target chose, -1: none
    __shared__ int accepted;
    const int nodes = count == nullptr ? rows : *count + 1;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) chosen[i] = -1;
    __syncthreads();
    if (check) {
        for (int i = threadIdx.x; i < nodes; i += blockDim.x) {
            const int parent = parents[i];
            if (i == 0 ? parent != -1 : parent < 0 || parent >= i) {
                atomicOr(status, STATUS_STRUCTURE);
                continue;
            }
            for (int j = 1; j < i; ++j)
                if (parents[j] == parent && tokens[j] == tokens[i]) atomicOr(status, STATUS_DUPLICATE);
        }
    }
    for (int i = 1 + threadIdx.x; i < nodes; i += blockDim.x) {
        const int parent = parents[i];
        if (parent >= 0 && parent < i && tokens[i] == target[parent]) chosen[parent] = i;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int node = 0, steps = 1;
        path[0] = 0;
        while (chosen[node] >= 0) {
            node = chosen[node];
            path[steps++] = node;
        }
        accepted = steps;
        *length = steps;
        *bonus = target[node];
    }
    __syncthreads();
    for (int i = accepted + threadIdx.x; i < rows; i += blockDim.x) path[i] = -1;
}
