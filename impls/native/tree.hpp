#pragma once

#include <cstdint>
#include <vector>

namespace paritree {

constexpr int64_t kBudgetMax = 16384;  // spec.tree.BUDGET_MAX

// Candidates of each depth, [depths, width]: width = min(budget, vocab), by (logit descending, id ascending).
// log_probs = logit - logZ in float32. Throws for NaN and +inf; a row of -inf has no candidate, its log_probs are -inf.
void draft_table(const float* logits, int64_t depths, int64_t vocab, int64_t width, int32_t* ids, float* log_probs);

struct Tree {
  std::vector<int32_t> tokens, parents, depths;  // root first, parents[0] = -1
};

// The first `budget` rank paths by (exact score descending, rank path ascending). Throws for NaN, +inf and rows that ascend.
Tree best_first_tree(const int32_t* ids, const float* log_probs, int64_t depths, int64_t width, int32_t root, int64_t budget);

// Ancestors-or-self of each row, as bits. parents[i] < i; -1: no parent inside the batch.
class Ancestors {
 public:
  explicit Ancestors(const std::vector<int32_t>& parents);
  // Calls see(column) for each row that row `row` sees, ascending.
  template <class See>
  void visit(int64_t row, See see) const;

 private:
  int64_t words_;
  std::vector<uint64_t> bits_;
};

// Depths of one tree; throws unless node 0 is the only root and 0 <= parent(i) < i.
std::vector<int32_t> tree_depths(const int32_t* parents, int64_t count);

struct Acceptance {
  std::vector<int32_t> path;  // accepted nodes, 0 first
  int32_t bonus = -1;
};

// Walks from the root to the child that is the target's choice; the first choice without a child is the bonus.
// Throws for a malformed tree and for a token that occurs twice under one parent.
Acceptance accept(const int32_t* tokens, const int32_t* parents, const int32_t* target, int64_t count);

// Throws unless path ascends strictly within [0, pending).
void check_path(const int32_t* path, int64_t path_count, int64_t pending);

// Where pending row path[j] goes, for j in order: move(from, to) with indices counted from the prefix. In place is safe,
// because path[j] >= j. Returns the number of rows kept.
template <class Move>
int64_t compact(const int32_t* path, int64_t path_count, Move move) {
  for (int64_t j = 0; j < path_count; ++j) {
    int64_t from = path[j];
#ifdef PARITREE_PLANT_COMPACT_FIRST
    from = j;
#endif
    move(from, j);
  }
  return path_count;
}

template <class See>
void Ancestors::visit(int64_t row, See see) const {
  constexpr int64_t kTile = 4;  // columns per look at the mask
  for (int64_t tile = 0; tile <= row; tile += kTile) {
    uint64_t seen = bits_[static_cast<std::size_t>(row * words_ + tile / 64)] >> (tile % 64) & 15;
#ifdef PARITREE_PLANT_MASK_TILE
    if (tile + kTile <= row) seen = 15;  // a tile strictly below the diagonal is taken as causal, without a look at the mask
#endif
    for (int64_t column = tile; seen != 0; ++column, seen >>= 1) {
      if (seen & 1) see(column);
    }
  }
}

}  // namespace paritree
