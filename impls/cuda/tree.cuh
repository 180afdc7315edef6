// The draft tree on the device: answers spec/ops/{best_first_tree,tree_mask,accept}.py (T2-T8, C2, C3, V1, A1, A3, T6).
//
// No decision is left to rounding or to the order of threads: a path score is the exact sum of its float32 log-probabilities, and equal
// scores fall back on the rank path. The builder is a ladder; each form hands what it cannot hold to the one before it:
//   pop_wide           one node after the other by one warp; scores as two doubles (106 bits); a table that needs more raises
//                      STATUS_INEXACT instead of guessing; rank paths as digits of rank + 1 in big-endian words, so that a prefix comes first
//   pop_units          the same with scores as integers of 31 or 63 bits in units of the largest power of two that divides every log-probability
//   best_first_select  all nodes at once: a limit, all paths within it, and a sort, by 512 threads
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

namespace paritree {
namespace tree {

// What a builder has to know about its table, found by the whole block.
struct Examined {
    int widths[DEPTH_MAX + 1];  // finite candidates of a depth; 0 past the last one
    float largest[DEPTH_MAX];   // magnitude
    int problems, exponent_low, above_zero;
};

PARITREE_INLINE void examine(const float* table, int depth_max, int width, Examined& found) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        found.problems = found.above_zero = 0;
        found.exponent_low = 1 << 20;
        found.widths[depth_max] = 0;
    }
    __syncthreads();
    for (int depth = threadIdx.x / 32; depth < depth_max; depth += blockDim.x / 32) {
        const float* row = table + depth * width;
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
            found.widths[depth] = whole;
            found.largest[depth] = size;
            if (width && row[0] > 0.0f) found.above_zero = 1;
        }
        if (problem) atomicOr(&found.problems, problem);
        if (low < 1 << 20) atomicMin(&found.exponent_low, low);
    }
    __syncthreads();
}

// Bits of an integer that holds every sum in units of 2^exponent_low; 0: all entries are 0.
PARITREE_INLINE int bits_of_sums(const Examined& found, int depth_max) {
    double bound = 0.0;  // no sum is larger
    for (int depth = 0; depth < depth_max; ++depth) bound += static_cast<double>(found.largest[depth]);
    const int high = static_cast<int>(static_cast<unsigned long long>(__double_as_longlong(bound)) >> 52 & 0x7ffu) - 1022;  // bound < 2^high
    return bound == 0.0 ? 0 : high + 1 - found.exponent_low;
}

PARITREE_INLINE void clear_nodes(int budget, int root, int* tokens, int* parents, int* depths) {
    for (int i = threadIdx.x; i <= budget; i += blockDim.x) {
        tokens[i] = i ? -1 : root;
        parents[i] = -1;
        depths[i] = i ? -1 : 0;
    }
}

// By the first warp, the form that holds the sums.
PARITREE_INLINE void pop_all(const Build& build, unsigned long long* memory, int* table, int bits, int exponent_low, int* count, int* status) {
    const int exponent = bits == 0 ? 0 : -exponent_low;
    bool exact = true;
    int number;
    if (bits <= 30) number = pop_units<int>(build, memory, table, exponent);
    else if (bits <= 62) number = pop_units<long long>(build, memory, static_cast<const long long*>(nullptr), exponent);
    else number = pop_wide(build, memory, exact);
    if (threadIdx.x == 0) {
        *count = number;
        if (!exact) atomicOr(status, STATUS_INEXACT);
    }
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
    using namespace paritree::tree;
    if (root_at != nullptr) root = *root_at;  // a captured graph has other roots at each replay
    PARITREE_SHARED(unsigned long long, memory);
    __shared__ Examined examined;
    clear_nodes(budget, root, tokens, parents, depths);
    examine(log_probs, depth_max, width, examined);
    if (examined.problems) {
        if (threadIdx.x == 0) {
            atomicOr(status, examined.problems);
            *count = 0;
        }
        return;
    }
    const int bits = bits_of_sums(examined, depth_max), exponent = bits == 0 ? 0 : -examined.exponent_low;
    int* table = nullptr;
    if (held && bits <= 30) {
        table = reinterpret_cast<int*>(memory + 9 * ((budget + 32) / 32 * 32));
        for (int i = threadIdx.x; i < depth_max * width; i += blockDim.x)
            table[i] = log_probs[i] > minus_infinity() ? static_cast<int>(in_units(log_probs[i], exponent)) : 0;
        __syncthreads();
    }
    if (threadIdx.x >= 32) return;
    pop_all({ids, log_probs, depth_max, width, budget, root, tokens, parents, depths, examined.widths}, memory, table, bits, examined.exponent_low, count, status);
}

// ---- the builder in parallel -----------------------------------------------------------------------------------------
//
// Where no log-probability is above 0, the tree is simply the first `budget` rank paths in the order (score descending, path ascending):
// every prefix and every better sibling of a path comes before it. So nothing has to be popped:
//   1. a limit of the cost (-score) that at least `budget` paths keep, from counts of paths by rounded-up cost (one convolution a depth);
//   2. all paths within the limit, depth by depth, by all threads; sums in float32 only choose, and the limit has room for their rounding;
//   3. a sort by exact cost, equal costs by path.
// More paths than `capacity` within the limit (many equal costs), sums beyond 62 bits, or an entry above 0: the form that pops takes over.
namespace paritree {
namespace tree {
constexpr int SELECT_THREADS = 512, CELLS = 64, ROUNDS = 2;  // the second round, in finer cells, only where the first limit lets too many in
// float32 sums of at most DEPTH_MAX terms that do not differ in sign, each term and each sum rounded once: below (1 + 2^-24)^42; twice over
constexpr float LIMIT_ROOM = 1.0f + 0x1p-17f;

// Paths found so far, depth by depth, and within a depth in the order of their rank paths. Index 0 is the root.
struct Found {
    unsigned long long* cost;  // [capacity] in units; from the sort on by place, not by path
    unsigned short* parent;    // [capacity]
    unsigned short* rank;      // [capacity]
    unsigned short* order;     // [capacity] offsets of children, then the path at each place
    unsigned short* number;    // [capacity] node number by path
    unsigned char* depth;      // [capacity]
};

PARITREE_INLINE bool path_before(const Found& found, int a, int b) {
    const int depth_a = found.depth[a], depth_b = found.depth[b];
    while (found.depth[a] > depth_b) a = found.parent[a];
    while (found.depth[b] > depth_a) b = found.parent[b];
    return a == b ? depth_a < depth_b : a < b;  // a prefix comes first
}

// Exclusive sum over the block and, by reference, the total. `scratch`: SELECT_THREADS / 32 words, free again on return.
PARITREE_INLINE int block_offset(int own, int& total, int* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = own;
    for (int step = 1; step < 32; step <<= 1) {
        const int before = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    int base = 0;
    total = 0;
    for (int w = 0; w < SELECT_THREADS / 32; ++w) {
        const int part = scratch[w];
        base += w < warp ? part : 0;
        total += part;
    }
    __syncthreads();
    return base + sum - own;
}

// A cost that at least `budget` paths do not exceed, as a float32; infinite where there are fewer paths. By the whole block; `counts`
// [DEPTH_MAX + 2][CELLS] floats of shared memory. A path whose rounded-up terms sum to C costs at most C / scale. `limit`: what is known before.
PARITREE_INLINE float cost_limit(const float* table, const int* widths, int depth_max, int width, int budget, float limit, float* counts, float* shared_limit) {
    const int lane = threadIdx.x % 32;
    const float scale = static_cast<float>(CELLS - 1) / limit * (1.0f - 0x1p-20f);
    if (!(limit > 0.0f) || !(scale < 1e30f)) return limit;
    int* entries = reinterpret_cast<int*>(counts);
    for (int i = threadIdx.x; i < depth_max * CELLS; i += SELECT_THREADS) entries[i] = 0;
    __syncthreads();
    const auto cell_of = [&](float log_prob) { return static_cast<int>(fminf(ceilf(-log_prob * scale * (1.0f + 0x1p-20f)), static_cast<float>(CELLS))); };
    for (int depth = threadIdx.x / 32; depth < depth_max; depth += SELECT_THREADS / 32) {
        const float* row = table + depth * width;
        int* own = entries + depth * CELLS;
        for (int r = lane; r < widths[depth]; r += 32) {  // cells ascend along a row, so that only the ends of a run count: end - begin
            const int cell = cell_of(row[r]);
            if (cell == CELLS) continue;
            if (r == 0 || cell_of(row[r - 1]) != cell) atomicAdd(&own[cell], -r);
            if (r + 1 == widths[depth] || cell_of(row[r + 1]) != cell) atomicAdd(&own[cell], r + 1);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < depth_max * CELLS; i += SELECT_THREADS) counts[i] = static_cast<float>(entries[i]);
    __syncthreads();
    if (threadIdx.x < 32) {  // paths of a depth by cell: those of the depth before, convolved; a lane has two cells
        float* now = counts + DEPTH_MAX * CELLS;  // [2][CELLS]: counts saturate, so that no infinity meets a zero
        now[lane] = lane == 0 ? 1.0f : 0.0f;
        now[lane + 32] = 0.0f;
        float low_total = 0.0f, high_total = 0.0f;
        for (int depth = 0; depth < depth_max; ++depth) {
            __syncwarp();
            const float* own = counts + depth * CELLS;
            float low = 0.0f, high = 0.0f;
#pragma unroll 8
            for (int y = 0; y < 32; ++y) {
                const float here = own[y];
                if (lane >= y) low = fmaf(here, now[lane - y], low);
                high = fmaf(here, now[lane + 32 - y], high);
            }
#pragma unroll 8
            for (int y = 32; y < CELLS; ++y)
                if (lane + 32 >= y) high = fmaf(own[y], now[lane + 32 - y], high);
            low = fminf(low, 1e6f);
            high = fminf(high, 1e6f);
            low_total += low;
            high_total += high;
            __syncwarp();
            now[lane] = low;
            now[lane + 32] = high;
            if (!__any_sync(FULL_WARP, low + high > 0.0f)) break;
        }
        for (int step = 1; step < 32; step <<= 1) {  // counts up to a cell
            const float a = __shfl_up_sync(FULL_WARP, low_total, step), b = __shfl_up_sync(FULL_WARP, high_total, step);
            if (lane >= step) {
                low_total += a;
                high_total += b;
            }
        }
        high_total += __shfl_sync(FULL_WARP, low_total, 31);
        const unsigned lows = __ballot_sync(FULL_WARP, low_total >= static_cast<float>(budget));
        const unsigned highs = __ballot_sync(FULL_WARP, high_total >= static_cast<float>(budget));
        const int cell = lows ? __ffs(static_cast<int>(lows)) - 1 : highs ? 31 + __ffs(static_cast<int>(highs)) : CELLS;
        if (lane == 0) *shared_limit = cell == CELLS ? limit : fminf(limit, static_cast<float>(cell) / scale * (1.0f + 0x1p-20f));
    }
    __syncthreads();
    limit = *shared_limit;
    __syncthreads();
    return limit;
}

// Number of candidates of a depth that a path of cost `above` may be continued by: rows descend, so they are the first ones.
PARITREE_INLINE int within(const float* row, int width, float above, float limit) {
    int low = 0, high = width;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (above - row[middle] <= limit) low = middle + 1;
        else high = middle;
    }
    return low;
}

// All paths within the limit. Returns how many, the root not counted; -1: more than `capacity`.
PARITREE_INLINE int enumerate(const Build& build, const Found& found, const float* table, float limit, int exponent, int capacity, int* scratch) {
    const float unit = ldexpf(1.0f, -exponent);
    if (threadIdx.x == 0) {
        found.cost[0] = 0;
        found.depth[0] = 0;
        found.parent[0] = found.rank[0] = 0;
    }
    int first = 0, last = 1;  // the paths of the depth before
    for (int depth = 0; depth < build.depth_max && first < last; ++depth) {
        __syncthreads();
        const float* row = table + depth * build.width;
        int next = last;
        for (int begin = first; begin < last; begin += SELECT_THREADS) {
            const int own = begin + static_cast<int>(threadIdx.x), parents = min(last - begin, SELECT_THREADS);
            const float above = own < last ? static_cast<float>(found.cost[own]) * unit : 0.0f;
            int total;
            const int count = own < last ? within(row, build.widths[depth], above, limit) : 0;
            const int offset = block_offset(count, total, scratch);
            if (next + total > capacity) return -1;  // the same in every thread
            found.order[threadIdx.x] = static_cast<unsigned short>(offset);
            __syncthreads();
            for (int child = threadIdx.x; child < total; child += SELECT_THREADS) {
                int low = 0, high = parents;  // the last parent whose offset is not above `child`; those without children share theirs with the next
                while (high - low > 1) {
                    const int middle = (low + high) / 2;
                    if (found.order[middle] <= child) low = middle;
                    else high = middle;
                }
                const int parent = begin + low, rank = child - found.order[low], at = next + child;
                found.cost[at] = found.cost[parent] + static_cast<unsigned long long>(in_units(-row[rank], exponent));
                found.parent[at] = static_cast<unsigned short>(parent);
                found.rank[at] = static_cast<unsigned short>(rank);
                found.depth[at] = static_cast<unsigned char>(depth + 1);
            }
            __syncthreads();
            next += total;
        }
        first = last;
        last = next;
    }
    __syncthreads();
    return last - 1;
}

// By cost, equal costs by path: place i of `order` for i < count. Bitonic over the next power of two, the root and padding last. A thread
// holds EACH neighbouring places in registers; only partners in another warp are met in shared memory.
template <int EACH>
PARITREE_INLINE void sort_paths(const Found& found, int count, int padded) {
    unsigned long long cost[EACH];
    int path[EACH];
    const int begin = static_cast<int>(threadIdx.x) * EACH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        path[i] = begin + i;
        cost[i] = begin + i == 0 || begin + i > count ? ~0ull : found.cost[begin + i];
    }
    const auto comes_first = [&](unsigned long long a, int path_a, unsigned long long b, int path_b) {
        if (a != b) return a < b;
        return a == ~0ull ? path_a < path_b : path_before(found, path_a, path_b);
    };
    __syncthreads();
    for (int size = 2; size <= padded; size <<= 1)
        for (int step = size >> 1; step; step >>= 1) {
            if (step < EACH) {
#pragma unroll
                for (int half = EACH / 2; half; half >>= 1) {
                    if (step != half) continue;
#pragma unroll
                    for (int i = 0; i < EACH; ++i) {
                        if (i & half) continue;
                        const bool swapped = comes_first(cost[i | half], path[i | half], cost[i], path[i]);
                        if (swapped == (((begin + i) & size) == 0)) {
                            const unsigned long long held = cost[i];
                            const int held_path = path[i];
                            cost[i] = cost[i | half];
                            path[i] = path[i | half];
                            cost[i | half] = held;
                            path[i | half] = held_path;
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
                    if (begin + i < padded) {
                        found.cost[begin + i] = cost[i];
                        found.order[begin + i] = static_cast<unsigned short>(path[i]);
                    }
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int place = begin + i, partner = (place ^ step) & (padded - 1);
                unsigned long long other = far ? found.cost[partner] : __shfl_xor_sync(FULL_WARP, cost[i], step / EACH);
                const int other_path = far ? static_cast<int>(found.order[partner]) : __shfl_xor_sync(FULL_WARP, path[i], step / EACH);
                const bool wants_first = ((place & step) == 0) == ((place & size) == 0);
                if (comes_first(other, other_path, cost[i], path[i]) == wants_first) {
                    cost[i] = other;
                    path[i] = other_path;
                }
            }
            if (!far) __syncwarp();
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (begin + i < padded) found.order[begin + i] = static_cast<unsigned short>(path[i]);
    __syncthreads();
}

PARITREE_INLINE void sort_paths(const Found& found, int count) {
    int padded = 2;
    while (padded < count + 1) padded <<= 1;
    if (padded <= SELECT_THREADS) sort_paths<1>(found, count, padded);
    else if (padded <= 2 * SELECT_THREADS) sort_paths<2>(found, count, padded);
    else sort_paths<4>(found, count, padded);
}
}  // namespace tree
}  // namespace paritree

// The same by all threads at once. One block, 512 threads. Shared memory in bytes: 17 * capacity for the paths, capacity a power of two and at
// least 1,024 and 2 * budget; 4 * depth_max * width for the table where `held` is not 0; at least what best_first_tree wants without its table.
extern "C" __global__ void __launch_bounds__(512)
best_first_select(const int* ids, const float* log_probs, int depth_max, int width, int budget, int root, int* tokens, int* parents, int* depths,
                  int* count, int* status, int held, int capacity, const int* root_at) {
    using namespace paritree;
    using namespace paritree::tree;
    if (root_at != nullptr) root = *root_at;  // a captured graph has other roots at each replay
    PARITREE_SHARED(unsigned long long, memory);
    __shared__ Examined examined;
    __shared__ int scratch[SELECT_THREADS / 32];
    __shared__ float shared_limit;
    Found found;
    found.cost = memory;
    found.parent = reinterpret_cast<unsigned short*>(memory + capacity);
    found.rank = found.parent + capacity;
    found.order = found.rank + capacity;
    found.number = found.order + capacity;
    found.depth = reinterpret_cast<unsigned char*>(found.number + capacity);
    const float* table = log_probs;
    if (held) {
        float* near = reinterpret_cast<float*>(found.depth + capacity);
        for (int i = threadIdx.x; i < depth_max * width; i += SELECT_THREADS) near[i] = log_probs[i];
        table = near;
    }
    clear_nodes(budget, root, tokens, parents, depths);
    __syncthreads();
    examine(table, depth_max, width, examined);
    if (examined.problems) {
        if (threadIdx.x == 0) {
            atomicOr(status, examined.problems);
            *count = 0;
        }
        return;
    }
    const Build build = {ids, log_probs, depth_max, width, budget, root, tokens, parents, depths, examined.widths};
    const int bits = bits_of_sums(examined, depth_max), exponent = bits == 0 ? 0 : -examined.exponent_low;
    const bool first_row_suffices = depth_max > 0 && examined.widths[0] >= budget;
    int paths = -1;
    if (bits <= 62 && !examined.above_zero && budget > 0) {
        float ceiling = 0.0f;  // what no path, or none of the first `budget` ones, exceeds
        for (int depth = 0; depth < depth_max; ++depth) ceiling += examined.largest[depth];
        if (first_row_suffices) ceiling = fminf(ceiling, -table[budget - 1]);
        ceiling *= LIMIT_ROOM;
        float limit = ceiling;
        for (int round = 0; round < ROUNDS && paths < 0; ++round) {
            __syncthreads();
            limit = cost_limit(table, examined.widths, depth_max, width, budget, limit, reinterpret_cast<float*>(found.cost), &shared_limit);
            paths = enumerate(build, found, table, limit * LIMIT_ROOM, exponent, capacity, scratch);
        }
        if (paths < budget && limit < ceiling) paths = -1;  // costs so small that their cells vanished
    }
    if (paths < 0) {
        __syncthreads();  // `memory` is about to hold a frontier
        if (threadIdx.x < 32) pop_all(build, memory, nullptr, bits, examined.exponent_low, count, status);
        return;
    }
    sort_paths(found, paths);
    const int nodes = min(paths, budget);
    for (int i = threadIdx.x; i < nodes; i += SELECT_THREADS) found.number[found.order[i]] = static_cast<unsigned short>(i + 1);
    if (threadIdx.x == 0) {
        found.number[0] = 0;
        *count = nodes;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < nodes; i += SELECT_THREADS) {
        const int path = found.order[i], depth = found.depth[path];
        tokens[i + 1] = ids[(depth - 1) * width + found.rank[path]];
        parents[i + 1] = found.number[found.parent[path]];
        depths[i + 1] = depth;
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
