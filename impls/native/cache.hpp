#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace paritree {

// The latent cache: pages of 16 rows [latent | k_rope] for all layers, a page table per sequence. A sequence's rows are its
// committed ones, then the pending ones of the last batch. A fresh page is full of NaN, so that a kernel that reads an unused
// slot cannot pass.
class Cache {
 public:
  Cache(int64_t layers, int64_t width, int64_t capacity_rows);

  bool contains(int32_t sequence) const { return sequences_.count(sequence) != 0; }
  int64_t committed(int32_t sequence) const;  // 0 for an unknown sequence
  int64_t free_rows() const;
  float* row(int64_t layer, int32_t sequence, int64_t index);

  // Makes rows with these parents (-1: the prefix) pending; throws Error(FAILED) when the pages do not suffice.
  void append(int32_t sequence, const std::vector<int32_t>& parents, const std::vector<int32_t>& positions);
  // Of the committed and the pending rows: a sliding window goes by position, not by slot.
  const std::vector<int32_t>& positions(int32_t sequence) { return known(sequence).positions; }
  // Drops the pending rows, and the sequence if it has no committed row.
  void drop_pending(int32_t sequence);
  // K1-K3: keeps the pending rows of `path`, a chain of parents from the prefix on, in place.
  void commit(int32_t sequence, const int32_t* path, int64_t path_count);
  void evict(int32_t sequence);
  // Copies the committed rows of source to a new sequence.
  void fork(int32_t source, int32_t target);

 private:
  struct Sequence {
    std::vector<int64_t> pages;
    int64_t committed = 0;
    std::vector<int32_t> parents;  // of the pending rows
    std::vector<int32_t> positions;  // of all rows
  };

  Sequence& known(int32_t sequence);
  void resize_pages(Sequence& sequence, int64_t rows);

  int64_t layers_, width_, capacity_pages_;
  std::vector<std::unique_ptr<float[]>> pages_;  // [layers, 16, width] each, made when first used
  std::vector<int64_t> free_;
  std::map<int32_t, Sequence> sequences_;
};

}  // namespace paritree
