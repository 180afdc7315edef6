// The cache of a session and its life: append, commit, evict, fork (rules C2, K1-K4, K7).
#include "cache.hpp"

#include <algorithm>
#include <limits>

#include "common.hpp"
#include "tree.hpp"

namespace paritree {
namespace {

constexpr int64_t kPageRows = 16;

int64_t pages_for(int64_t rows) { return (rows + kPageRows - 1) / kPageRows; }

}  // namespace

Cache::Cache(int64_t layers, int64_t width, int64_t capacity_rows) : layers_(layers), width_(width), capacity_pages_(pages_for(capacity_rows)) {}

int64_t Cache::committed(int32_t sequence) const {
  const auto found = sequences_.find(sequence);
  return found == sequences_.end() ? 0 : found->second.committed;
}

int64_t Cache::free_rows() const {
  const int64_t unused = capacity_pages_ - static_cast<int64_t>(pages_.size()) + static_cast<int64_t>(free_.size());
  return unused * kPageRows;
}

float* Cache::row(int64_t layer, int32_t sequence, int64_t index) {
  const Sequence& of = known(sequence);
  float* page = pages_[static_cast<std::size_t>(of.pages[static_cast<std::size_t>(index / kPageRows)])].get();
  return page + (layer * kPageRows + index % kPageRows) * width_;
}

Cache::Sequence& Cache::known(int32_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) invalid("sequence ", sequence, " is unknown: a sequence exists from its first row on");
  return found->second;
}

void Cache::resize_pages(Sequence& sequence, int64_t rows) {
  const int64_t wanted = pages_for(rows), held = static_cast<int64_t>(sequence.pages.size());
  if (wanted > held && (wanted - held) * kPageRows > free_rows()) {
    failed("the cache is full: ", (wanted - held) * kPageRows, " more rows are needed, ", free_rows(), " are free; raise cache_slots or evict");
  }
  while (static_cast<int64_t>(sequence.pages.size()) > wanted) {
    free_.push_back(sequence.pages.back());
    sequence.pages.pop_back();
  }
  const int64_t page_size = layers_ * kPageRows * width_;
  while (static_cast<int64_t>(sequence.pages.size()) < wanted) {
    if (free_.empty()) {
      pages_.push_back(std::make_unique<float[]>(static_cast<std::size_t>(page_size)));
      free_.push_back(static_cast<int64_t>(pages_.size()) - 1);
    }
    float* page = pages_[static_cast<std::size_t>(free_.back())].get();
    std::fill(page, page + page_size, std::numeric_limits<float>::quiet_NaN());
    sequence.pages.push_back(free_.back());
    free_.pop_back();
  }
}

void Cache::append(int32_t sequence, const std::vector<int32_t>& parents, const std::vector<int32_t>& positions) {
  Sequence& of = sequences_[sequence];
  try {
    resize_pages(of, of.committed + static_cast<int64_t>(parents.size()));
  } catch (...) {
    drop_pending(sequence);
    throw;
  }
  of.parents = parents;
  of.positions.resize(static_cast<std::size_t>(of.committed));
  of.positions.insert(of.positions.end(), positions.begin(), positions.end());
}

void Cache::drop_pending(int32_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return;
  found->second.parents.clear();
  resize_pages(found->second, found->second.committed);
  if (found->second.committed == 0) sequences_.erase(found);
}

void Cache::commit(int32_t sequence, const int32_t* path, int64_t path_count) {
  Sequence& of = known(sequence);
  const int64_t pending = static_cast<int64_t>(of.parents.size());
  check_path(path, path_count, pending);
  for (int64_t j = 0; j < path_count; ++j) {
    const int32_t before = j == 0 ? -1 : path[j - 1], parent = of.parents[static_cast<std::size_t>(path[j])];
    if (parent != before) invalid("K1: row ", path[j], " of the path has parent ", parent, ", but the row before it is ", before);
  }
  const int64_t kept = compact(path, path_count, [&](int64_t from, int64_t to) {
    if (from == to) return;
    of.positions[static_cast<std::size_t>(of.committed + to)] = of.positions[static_cast<std::size_t>(of.committed + from)];
    for (int64_t layer = 0; layer < layers_; ++layer) {
      const float* source = row(layer, sequence, of.committed + from);
      float* target = row(layer, sequence, of.committed + to);
#ifdef PARITREE_PLANT_COMPACT_PAGE
      if ((of.committed + from) / kPageRows != (of.committed + to) / kPageRows) continue;
#endif
      std::copy_n(source, width_, target);
    }
  });
  of.committed += kept;
#ifdef PARITREE_PLANT_REJECTED_VISIBLE
  if (path_count < pending) of.committed += 1;
#endif
  of.parents.clear();
  resize_pages(of, of.committed);
}

void Cache::evict(int32_t sequence) {
  Sequence& of = known(sequence);
  resize_pages(of, 0);
  sequences_.erase(sequence);
}

void Cache::fork(int32_t source, int32_t target) {
  const int64_t rows = known(source).committed;
  if (contains(target)) invalid("sequence ", target, " exists already: evict it before a fork");
  const std::vector<int32_t> positions(known(source).positions.begin(), known(source).positions.begin() + rows);
  append(target, std::vector<int32_t>(static_cast<std::size_t>(rows), -1), positions);
  for (int64_t layer = 0; layer < layers_; ++layer) {
    int64_t copied = rows;
#ifdef PARITREE_PLANT_FORK_PAGES
    copied = rows / kPageRows * kPageRows;  // whole pages only
#endif
    for (int64_t index = 0; index < copied; ++index) std::copy_n(row(layer, source, index), width_, row(layer, target, index));
  }
  Sequence& copy = known(target);
  copy.committed = rows;
  copy.parents.clear();
}

}  // namespace paritree
