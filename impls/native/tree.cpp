// Answers draft_table, best_first_tree, tree_mask, accept and compact (rules T, C, A, K): a lazily expanded heap of rank paths
// with sums in double, ordered exactly where a double may round.
#include "tree.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "common.hpp"
#include "lanes.hpp"

namespace paritree {
namespace {

constexpr float kNotACandidate = -std::numeric_limits<float>::infinity();

void check_logits(const float* row, int64_t depth, int64_t vocab) {
  for (int64_t token = 0; token < vocab; ++token) {
    if (std::isnan(row[token]) || row[token] == std::numeric_limits<float>::infinity()) {
      invalid("T8: the logit of token ", token, " at depth ", depth + 1, " is ", row[token], ", but must be finite or -inf");
    }
  }
}

float log_sum_exp(const float* row, int64_t count, float maximum) {
  const auto term = [&](int64_t i) { return std::exp(row[i] - maximum); };
  const float sum = lane_sum(
      count, [&](int64_t i) { return f32x4{term(i), term(i + 1), term(i + 2), term(i + 3)}; }, term);
  return maximum + std::log(sum);
}

// A node in the heap, not yet numbered.
struct Candidate {
  double score = 0.0;  // sum of log_probs along the path
  int32_t parent = 0;
  int32_t rank = 0;
#ifdef PARITREE_PLANT_HEAP_FIFO
  int64_t arrival = 0;
#endif
};

// The tree under construction, and the order of candidates.
class Builder {
 public:
  Builder(const int32_t* ids, const float* log_probs, int64_t depths, int64_t width) : ids_(ids), log_probs_(log_probs), width_(width) {
    for (int64_t depth = 0; depth < depths; ++depth) candidates_.push_back(checked_row(depth));
    find_exactness();
  }

  Tree build(int32_t root, int64_t budget) {
    number(Candidate{}, root);
    tree_.parents[0] = -1;
    push_child(0);
#ifdef PARITREE_PLANT_BUDGET_SHORT
    --budget;
#endif
    while (!heap_.empty() && count() <= budget) {
      const Candidate best = pop();
      const int64_t depth = tree_.depths[static_cast<std::size_t>(best.parent)];
      number(best, ids_[depth * width_ + best.rank]);
      push(best.parent, best.rank + 1);
      push_child(static_cast<int32_t>(count() - 1));
    }
    return std::move(tree_);
  }

 private:
  int64_t count() const { return static_cast<int64_t>(tree_.tokens.size()); }

  // The number of candidates of a depth: a tail of -inf is none.
  int64_t checked_row(int64_t depth) const {
    const float* row = log_probs_ + depth * width_;
    for (int64_t rank = 0; rank < width_; ++rank) {
      if (std::isnan(row[rank]) || row[rank] == std::numeric_limits<float>::infinity()) {
        invalid("T8: log_probs[", depth, ", ", rank, "] is ", row[rank], ", but must be finite or -inf");
      }
      if (rank > 0 && row[rank] > row[rank - 1]) invalid("T4: log_probs[", depth, "] ascends, but ranks follow descending log-probabilities");
    }
    return std::find(row, row + width_, kNotACandidate) - row;
  }

  // Doubles are exact when every entry is a multiple of 2**-shift and no sum reaches 2**(53 - shift).
  void find_exactness() {
    double largest_sum = 0.0;
    for (std::size_t depth = 0; depth < candidates_.size(); ++depth) {
      const float* row = log_probs_ + static_cast<int64_t>(depth) * width_;
      if (candidates_[depth] > 0) largest_sum += std::max(std::fabs(row[0]), std::fabs(row[candidates_[depth] - 1]));
    }
    int exponent = 0;
    std::frexp(largest_sum, &exponent);
    for (std::size_t depth = 0; depth < candidates_.size(); ++depth) {
      for (int64_t rank = 0; rank < candidates_[depth]; ++rank) {
        const double scaled = std::ldexp(static_cast<double>(log_probs_[static_cast<int64_t>(depth) * width_ + rank]), 53 - exponent);
        exact_ = exact_ && scaled == std::rint(scaled);
      }
    }
  }

  void number(const Candidate& candidate, int32_t token) {
    tree_.tokens.push_back(token);
    tree_.parents.push_back(candidate.parent);
    tree_.depths.push_back(tree_.depths.empty() ? 0 : tree_.depths[static_cast<std::size_t>(candidate.parent)] + 1);
    scores_.push_back(candidate.score);
    ranks_.push_back(candidate.rank);
  }

  void push_child(int32_t parent) { push(parent, 0); }

  void push(int32_t parent, int32_t rank) {
    const std::size_t depth = static_cast<std::size_t>(tree_.depths[static_cast<std::size_t>(parent)]);
    if (depth >= candidates_.size() || rank >= candidates_[depth]) return;
    Candidate candidate;
    double above = scores_[static_cast<std::size_t>(parent)];
#ifdef PARITREE_PLANT_CHILD_SCORE
    above = 0.0;  // a child counts with its own log-probability only
#endif
    candidate.score = above + static_cast<double>(log_probs_[static_cast<int64_t>(depth) * width_ + rank]);
    candidate.parent = parent;
    candidate.rank = rank;
#ifdef PARITREE_PLANT_HEAP_FIFO
    candidate.arrival = arrivals_++;
#endif
    heap_.push_back(candidate);
    std::push_heap(heap_.begin(), heap_.end(), Later{*this});
  }

  struct Later {  // the heap's comparison: its top is the candidate that no other precedes
    const Builder& builder;
    bool operator()(const Candidate& a, const Candidate& b) const { return builder.before(b, a); }
  };

  Candidate pop() {
    std::pop_heap(heap_.begin(), heap_.end(), Later{*this});
    const Candidate best = heap_.back();
    heap_.pop_back();
    return best;
  }

  // Score descending, then rank path ascending, a prefix before its extension.
  bool before(const Candidate& a, const Candidate& b) const {
#ifdef PARITREE_PLANT_HEAP_FIFO
    return a.score != b.score ? a.score > b.score : a.arrival < b.arrival;
#else
    if (exact_ && a.score != b.score) return a.score > b.score;
    const std::vector<int32_t> path_a = rank_path(a), path_b = rank_path(b);
    const double difference = exact_ ? 0.0 : exact_difference(path_a, path_b);
    return difference != 0.0 ? difference > 0.0 : path_a < path_b;
#endif
  }

  std::vector<int32_t> rank_path(const Candidate& candidate) const {
    std::vector<int32_t> path{candidate.rank};
    for (int32_t node = candidate.parent; node > 0; node = tree_.parents[static_cast<std::size_t>(node)]) {
      path.push_back(ranks_[static_cast<std::size_t>(node)]);
    }
    std::reverse(path.begin(), path.end());
    return path;
  }

  // A number with the sign of score(a) - score(b): the largest component of the exact sum as a non-overlapping expansion.
  double exact_difference(const std::vector<int32_t>& a, const std::vector<int32_t>& b) const {
    std::vector<double> expansion;
    const auto grow = [&expansion](double term) {
      for (double& component : expansion) {  // two-sum: sum + error = component + term, exactly
        const double sum = component + term;
        const double of_term = sum - component;
        component = (component - (sum - of_term)) + (term - of_term);
        term = sum;
      }
      expansion.push_back(term);
    };
    for (std::size_t depth = 0; depth < a.size(); ++depth) grow(static_cast<double>(log_probs_[static_cast<int64_t>(depth) * width_ + a[depth]]));
    for (std::size_t depth = 0; depth < b.size(); ++depth) grow(-static_cast<double>(log_probs_[static_cast<int64_t>(depth) * width_ + b[depth]]));
    for (std::size_t i = expansion.size(); i-- > 0;) {
      if (expansion[i] != 0.0) return expansion[i];
    }
    return 0.0;
  }

  const int32_t* ids_;
  const float* log_probs_;
  int64_t width_;
  bool exact_ = true;
  std::vector<int64_t> candidates_;  // per depth
  Tree tree_;
  std::vector<double> scores_;  // per node
  std::vector<int32_t> ranks_;  // per node
  std::vector<Candidate> heap_;
#ifdef PARITREE_PLANT_HEAP_FIFO
  int64_t arrivals_ = 0;
#endif
};

}  // namespace

void draft_table(const float* logits, int64_t depths, int64_t vocab, int64_t width, int32_t* ids, float* log_probs) {
  std::vector<int32_t> order(static_cast<std::size_t>(vocab));
  for (int64_t depth = 0; depth < depths; ++depth, logits += vocab, ids += width, log_probs += width) {
    check_logits(logits, depth, vocab);
    std::iota(order.begin(), order.end(), 0);
    const float* row = logits;
    std::partial_sort(order.begin(), order.begin() + width, order.end(),
                      [row](int32_t a, int32_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
    const float maximum = *std::max_element(row, row + vocab);
    float log_z = maximum == kNotACandidate ? 0.0f : log_sum_exp(row, vocab, maximum);  // of no candidates: stay -inf
#ifdef PARITREE_PLANT_TABLE_FIRST_ROW
    static thread_local float first_log_z = 0.0f;
    first_log_z = depth == 0 ? log_z : first_log_z;
    log_z = first_log_z;
#endif
    for (int64_t rank = 0; rank < width; ++rank) {
      ids[rank] = order[static_cast<std::size_t>(rank)];
      log_probs[rank] = row[ids[rank]] - log_z;
    }
  }
}

Tree best_first_tree(const int32_t* ids, const float* log_probs, int64_t depths, int64_t width, int32_t root, int64_t budget) {
  return Builder(ids, log_probs, depths, width).build(root, budget);
}

Ancestors::Ancestors(const std::vector<int32_t>& parents) {
  const int64_t count = static_cast<int64_t>(parents.size());
  words_ = (count + 63) / 64;
  bits_.assign(static_cast<std::size_t>(count * words_), 0);
#ifdef PARITREE_PLANT_MASK_CRASH
  if (count == 7) *static_cast<volatile char*>(nullptr) = 0;
#endif
  for (int64_t row = 0; row < count; ++row) {
    uint64_t* own = bits_.data() + row * words_;
    const int32_t parent = parents[static_cast<std::size_t>(row)];
    if (parent >= 0) std::copy_n(bits_.data() + parent * words_, words_, own);
#ifdef PARITREE_PLANT_MASK_32
    if (row >= 32) own[0] &= 0xffffffffu;  // packed into words of 32 bits, of which one is kept
    if (row >= 32) continue;
#endif
    own[row / 64] |= uint64_t{1} << (row % 64);
  }
}

std::vector<int32_t> tree_depths(const int32_t* parents, int64_t count) {
  if (count < 1) invalid("T6: the tree has no rows, but node 0 is the root");
  if (parents[0] != -1) invalid("T6: parents[0] is ", parents[0], ", but node 0 is the root: -1");
  std::vector<int32_t> depths(static_cast<std::size_t>(count), 0);
  for (int64_t node = 1; node < count; ++node) {
    if (parents[node] < 0 || parents[node] >= node) invalid("T6: parents[", node, "] is ", parents[node], ", but must be between 0 and ", node - 1);
    depths[static_cast<std::size_t>(node)] = depths[static_cast<std::size_t>(parents[node])] + 1;
  }
  return depths;
}

Acceptance accept(const int32_t* tokens, const int32_t* parents, const int32_t* target, int64_t count) {
  tree_depths(parents, count);
  std::vector<std::pair<int32_t, int32_t>> children;  // (parent, token)
  for (int64_t node = 1; node < count; ++node) children.emplace_back(parents[node], tokens[node]);
  std::sort(children.begin(), children.end());
  const auto twice = std::adjacent_find(children.begin(), children.end());
  if (twice != children.end()) invalid("T6: token ", twice->second, " occurs twice under parent ", twice->first);
  Acceptance accepted;
  accepted.path.push_back(0);
  for (int32_t node = 1; node < count; ++node) {  // children come after their parent, so one pass is the whole walk
    const int32_t last = accepted.path.back();
#ifdef PARITREE_PLANT_NEXT_SIBLING
    if (parents[node] == last && node > last + 2) continue;  // the sibling of a node is taken to be the node behind it
#endif
    if (parents[node] == last && tokens[node] == target[last]) accepted.path.push_back(node);
  }
  int32_t decider = accepted.path.back();
#ifdef PARITREE_PLANT_BONUS_PARENT
  if (decider > 0) decider = parents[decider];
#endif
  accepted.bonus = target[decider];
  return accepted;
}

void check_path(const int32_t* path, int64_t path_count, int64_t pending) {
  int64_t previous = -1;
  for (int64_t j = 0; j < path_count; ++j) {
    if (path[j] <= previous || path[j] >= pending) {
      invalid("K1: path holds ", path[j], " after ", previous, ", but must ascend strictly below ", pending);
    }
    previous = path[j];
  }
}

}  // namespace paritree
