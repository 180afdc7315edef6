// The draft tree on the device: answers spec/ops/{best_first_tree,tree_mask,accept}.py (T2-T8, C2, C3, V1, A1, A3, T6).
//
// No decision is left to rounding or to the order of threads: a path score is the exact sum of its float32 log-probabilities, kept as
// two doubles (106 bits; a table that needs more raises STATUS_INEXACT instead of guessing), and equal scores fall back on the rank
// path, kept as digits of rank + 1 in big-endian words, so that a prefix comes before its extensions.
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

// Shared memory of best_first_tree in bytes: (budget + 1) * (8 + 8 + 32 + 4 + 4 + 16), 73,800 for 1,024 nodes.
//
// One block, 256 threads: all of them check the table and bring it near, then the first warp pops. Each lane keeps the best of its
// slots (slot % 32 == lane); a pop is a maximum over the lanes, one new minimum within a lane, and at most two insertions.
// tokens, parents, depths [budget + 1], count [1]; ids and log_probs [depths_max, width].
extern "C" __global__ void __launch_bounds__(256)
best_first_tree(const int* ids, const float* log_probs, int depth_max, int width, int budget, int root, int* tokens, int* parents, int* depths,
                int* count, int* status) {
    using namespace paritree;
    using namespace paritree::tree;
    PARITREE_SHARED(unsigned long long, memory);
    const int capacity = budget + 1;
    Frontier f;
    f.high = memory;
    f.low = f.high + capacity;
    f.path = f.low + capacity;
    double* node_high = reinterpret_cast<double*>(f.path + capacity * PATH_WORDS);  // [budget + 1], by node number
    double* node_low = node_high + capacity;
    f.parent = reinterpret_cast<int*>(node_low + capacity);
    f.place = f.parent + capacity;
    __shared__ int widths[DEPTH_MAX];  // finite candidates of a depth
    __shared__ int problems;

    if (threadIdx.x == 0) problems = 0;
    if (threadIdx.x < DEPTH_MAX) widths[threadIdx.x] = 0;
    for (int i = threadIdx.x; i <= budget; i += blockDim.x) tokens[i] = parents[i] = depths[i] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < depth_max * width; i += blockDim.x) {
        const float own = log_probs[i];
        if (own != own || own == -minus_infinity()) atomicOr(&problems, STATUS_NOT_FINITE);
        if (i % width && !(own <= log_probs[i - 1])) atomicOr(&problems, STATUS_ASCENDS);
        if (own > minus_infinity()) atomicAdd(&widths[i / width], 1);
    }
    __syncthreads();
    if (problems) {
        if (threadIdx.x == 0) {
            atomicOr(status, problems);
            *count = 0;
        }
        return;
    }
    if (threadIdx.x >= 32) return;

    const int lane = threadIdx.x;
    bool exact = true;
    int used = 0, number = 0;
    int own_slot = -1;  // the best of this lane's slots
    if (lane == 0) {
        node_high[0] = node_low[0] = 0.0;
        tokens[0] = root;
        depths[0] = 0;  // parents[0] stays -1
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
    if (lane == 0) {
        *count = number;
        if (!exact) atomicOr(status, STATUS_INEXACT);
    }
}

// Positions, visibility bits and bytes of a tree. grid (rows), block a multiple of 32; bits [rows, ceil(rows / 32)]; visible
// [rows, prefix_len + rows] bytes, or null. Rows past *count (padding, C4) see themselves only; count may be null. status null: any forest.
// Dynamic shared memory: ceil(rows / 32) words.
extern "C" __global__ void tree_mask(const int* parents, const int* count, int rows, int prefix_len, int* positions, unsigned* bits,
                                     unsigned char* visible, int* status) {
    using namespace paritree;
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
