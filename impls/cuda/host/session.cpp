// Sessions of the CUDA engine: the plan of a batch on the host, everything else on the device.
#include "session.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../../native/tensors.hpp"
#include "../../native/tree.hpp"

namespace paritree::cuda {
namespace {

constexpr int64_t kFirstPositions = 256;
constexpr int64_t kGuardBytes = 256;
constexpr int kGuardByte = 0xa5;
constexpr std::size_t kGraphs = 256;  // kept at a time, of forward passes and of rounds each

int64_t words_for(int64_t rows) { return (rows + 31) / 32; }

// The float32 of a bfloat16.
float widened(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
template <class T>
T widened(T value) {
  return value;
}

// Lengths in steps of a quarter of their power of two, at least 64: a stream of n rows needs about 4 log2(n / 256) graphs, and the keys that are
// split over the device are at most a quarter too many.
int64_t keys_bucket(int64_t keys) {
  int64_t step = 64;
  while (8 * step <= keys) step *= 2;
  return (keys + step - 1) / step * step;
}

// 0, 1, 2, 4, 8, then steps of 8 to 128, then of an eighth to a sixteenth.
int64_t rows_bucket(int64_t rows) {
  int64_t step = 1;
  while (step < 8 && step < rows) step *= 2;
  while (16 * step < rows) step *= 2;
  return (rows + step - 1) / step * step;
}

}  // namespace

// Rows of a batch, sorted by sequence: `batch[i]` is where row i of the plan stands in the caller's batch; -1: padding.
struct DeviceSession::Order {
  std::vector<int64_t> batch;
};

DeviceSession::DeviceSession(const ModelConfig& config, paritree_weight_fn weight, void* user, int64_t cache_slots, Precision precision)
    : config_(config),
      device_(precision),
      rope_(computed_table(config.rope)),
      narrow_(precision == Precision::bf16),
      store_(device_, config.layers * ((cache_slots + kPageRows - 1) / kPageRows * kPageRows) * row_words()),
      slots_((cache_slots + kPageRows - 1) / kPageRows * kPageRows) {
  poison_ = is_set("PARITREE_CUDA_POISON");
  graphs_ = is_set("PARITREE_CUDA_GRAPH");
  device_.fill(store_.data(), 0xff, store_.count() * 4);
  // neither pages nor slots follow logical order: odd pages upwards, then even ones downwards, taken from the end
  const int32_t pages = static_cast<int32_t>(slots_ / kPageRows);
  for (int32_t page = pages - 1; page >= 0; --page)
    if (page % 2) free_.push_back(page);
  for (int32_t page = 0; page < pages; ++page)
    if (page % 2 == 0) free_.insert(free_.begin(), page);
  load(weight, user);
}

void DeviceSession::load(paritree_weight_fn callback, void* user) {
  const ModelConfig& c = config_;
  const auto take = [&](const std::string& name, std::initializer_list<int64_t> shape) {
    DLTensor tensor{};
    const paritree_status status = callback(user, name.c_str(), &tensor);
    if (status != PARITREE_OK) failed("the weight callback answered ", status, " for ", name, "; expected float32 ", shape_text(shape.begin(), static_cast<int64_t>(shape.size())));
    const float* data = checked_data<float>(name.c_str(), tensor, shape);
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    Memory<float> memory(device_, count);
    device_.copy_in(memory.data(), data, count * 4);
    device_.synchronise();  // the source may be overwritten at the next call of the callback
    weights_.emplace(name, std::move(memory));
  };
  const auto table = [&](const char* name) {
    DLTensor tensor{};
    const paritree_status status = callback(user, name, &tensor);
    if (status != PARITREE_OK) failed("the weight callback answered ", status, " for ", name, "; expected float32 [", c.rope_table_len, ", ", c.rope_dim / 2, "]");
    const float* data = checked_data<float>(name, tensor, {c.rope_table_len, c.rope_dim / 2});
    return std::vector<float>(data, data + c.rope_table_len * (c.rope_dim / 2));
  };
  take("embed", {c.vocab, c.hidden});
  if (c.rope_table_len > 0) {
    const std::vector<float> cos = table("rope_cos");
    rope_ = carried_table(cos, table("rope_sin"), c.rope_table_len);
  }
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const auto of = [layer](const char* name) { return std::to_string(layer) + "." + name; };
    take(of("attn_norm"), {c.hidden});
    if (c.q_rank > 0) {
      take(of("q_a"), {c.hidden, c.q_rank});
      take(of("q_a_norm"), {c.q_rank});
      take(of("q_b"), {c.q_rank, c.heads * c.head_dim()});
    } else {
      take(of("q"), {c.hidden, c.heads * c.head_dim()});
    }
    if (c.attention_bias) {
      if (c.q_rank > 0) take(of("q_a_bias"), {c.q_rank});
      else take(of("q_bias"), {c.heads * c.head_dim()});
      take(of("kv_a_bias"), {c.cache_dim()});
      take(of("o_bias"), {c.hidden});
    }
    take(of("kv_a"), {c.hidden, c.cache_dim()});
    take(of("kv_a_norm"), {c.kv_rank});
    take(of("w_kc"), {c.heads, c.nope_dim, c.kv_rank});
    take(of("w_vc"), {c.heads, c.kv_rank, c.v_dim});
    take(of("o"), {c.heads * c.v_dim, c.hidden});
    take(of("ffn_norm"), {c.hidden});
    if (c.is_dense(layer)) {
      take(of("gate"), {c.hidden, c.dense_dim});
      take(of("up"), {c.hidden, c.dense_dim});
      take(of("down"), {c.dense_dim, c.hidden});
      continue;
    }
    take(of("router"), {c.hidden, c.experts});
    if (!c.scoring_softmax) take(of("router_bias"), {c.experts});
    take(of("expert_gate"), {c.experts, c.hidden, c.expert_dim});
    take(of("expert_up"), {c.experts, c.hidden, c.expert_dim});
    take(of("expert_down"), {c.experts, c.expert_dim, c.hidden});
    if (c.shared_experts > 0) {
      take(of("shared_gate"), {c.hidden, c.shared_dim()});
      take(of("shared_up"), {c.hidden, c.shared_dim()});
      take(of("shared_down"), {c.shared_dim(), c.hidden});
    }
  }
  take("norm", {c.hidden});
  if (!c.tied) take("head", {c.hidden, c.vocab});
}

template <class T>
T* DeviceSession::buffer(const std::string& name, int64_t count) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), with_guard = bytes + (poison_ ? kGuardBytes : 0);
  const auto found = buffers_.find(name);
  if (found == buffers_.end()) {
    buffers_.emplace(name, Memory<char>(device_, with_guard));
  } else if (found->second.count() < with_guard) {
    device_.synchronise();  // the old memory may still be in use
    found->second = Memory<char>(device_, std::max(with_guard, 2 * found->second.count()));
    forget_graphs();
  }
  Memory<char>& memory = buffers_.at(name);
  if (poison_) {
    device_.fill(memory.data(), 0xff, bytes);
    device_.fill(memory.data() + bytes, kGuardByte, kGuardBytes);
    guards_[name] = memory.data() + bytes;
  }
  return reinterpret_cast<T*>(memory.data());
}

// Memory has moved, and graphs hold the old addresses. That a shape has run, so that its buffers have their sizes, stays true.
void DeviceSession::forget_graphs() {
  for (auto& [shape, recorded] : rounds_) recorded.graph.reset();
  for (auto& [shape, recorded] : forwards_) recorded.graph.reset();
}

// Whether what was launched since the buffers were asked for has kept within them.
void DeviceSession::check_guards() {
  if (!poison_ || guards_.empty()) return;
  Memory<char> together(device_, static_cast<int64_t>(guards_.size()) * kGuardBytes);
  int64_t at = 0;
  for (const auto& [name, guard] : guards_) device_.copy(together.data() + kGuardBytes * at++, guard, kGuardBytes);
  std::vector<unsigned char> host(static_cast<std::size_t>(together.count()));
  device_.copy_out(host.data(), together.data(), together.count());
  at = 0;
  for (const auto& [name, guard] : guards_) {
    const auto begin = host.begin() + kGuardBytes * at++;
    if (std::any_of(begin, begin + kGuardBytes, [](unsigned char byte) { return byte != kGuardByte; })) failed("a kernel wrote behind the end of buffer '", name, "'");
  }
}

// ---- sequences and pages ---------------------------------------------------------------------------------------------

int64_t DeviceSession::committed(int32_t sequence) const {
  const auto found = sequences_.find(sequence);
  return found == sequences_.end() ? 0 : found->second.committed;
}

DeviceSession::Sequence& DeviceSession::known(int32_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) invalid("sequence ", sequence, " is unknown: a sequence exists from its first row on");
  return found->second;
}

// Fresh pages are full of NaN, so that a kernel that reads an unused slot cannot pass.
void DeviceSession::resize_pages(Sequence& sequence, int64_t rows) {
  const int64_t wanted = (rows + kPageRows - 1) / kPageRows, held = static_cast<int64_t>(sequence.pages.size());
  if (wanted > held && (wanted - held) * kPageRows > free_rows()) {
    failed("the cache is full: ", (wanted - held) * kPageRows, " more rows are needed, ", free_rows(), " are free; raise cache_slots or evict");
  }
  while (static_cast<int64_t>(sequence.pages.size()) > wanted) {
    free_.push_back(sequence.pages.back());
    sequence.pages.pop_back();
  }
  while (static_cast<int64_t>(sequence.pages.size()) < wanted) {
    const int32_t page = free_.back();
    free_.pop_back();
    sequence.pages.push_back(page);
    device_.fill_rows(store_.data() + page * kPageRows * row_words(), slots_ * row_words() * 4, 0xff, kPageRows * row_words() * 4, config_.layers);
  }
}

void DeviceSession::drop_pending(int32_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return;
  found->second.pending = 0;
  found->second.parents.clear();
  found->second.positions.resize(static_cast<std::size_t>(found->second.committed));
  resize_pages(found->second, found->second.committed);
  if (found->second.committed == 0) sequences_.erase(found);
}

const int32_t* DeviceSession::page_table(int32_t sequence, int64_t) {
  const Sequence& of = known(sequence);
  int32_t* table = buffer<int32_t>("pages " + std::to_string(sequence), std::max<int64_t>(64, static_cast<int64_t>(of.pages.size())));
  device_.copy_in(table, of.pages.data(), static_cast<int64_t>(of.pages.size()) * 4);
  return table;
}

void DeviceSession::ensure_positions(int64_t limit) {
  if (limit <= positions_) return;
  int64_t count = std::max(kFirstPositions, positions_);
  while (count < limit) count *= 2;
  const int64_t half = config_.rope_dim / 2;
  std::vector<float> cos(static_cast<std::size_t>(count * half)), sin(cos.size());
  const int64_t known_positions = config_.rope_table_len > 0 ? std::min(count, config_.rope_table_len) : count;
  for (int64_t p = 0; p < known_positions; ++p) rope_(p, cos.data() + p * half, sin.data() + p * half);
  // past carried tables: NaN, which only padding may meet (check_position)
  std::fill(cos.begin() + static_cast<std::ptrdiff_t>(known_positions * half), cos.end(), std::numeric_limits<float>::quiet_NaN());
  std::fill(sin.begin() + static_cast<std::ptrdiff_t>(known_positions * half), sin.end(), std::numeric_limits<float>::quiet_NaN());
  // not through buffer(): tables are kept, and poison would take them
  for (const auto& [name, values] : {std::pair<const char*, const std::vector<float>*>{"cos table", &cos}, {"sin table", &sin}}) {
    Memory<float> memory(device_, count * half);
    device_.copy_in(memory.data(), values->data(), count * half * 4);
    device_.synchronise();
    weights_.erase(name);
    weights_.emplace(name, std::move(memory));
  }
  forget_graphs();
  positions_ = count;
}

void DeviceSession::check_position(int64_t position) const {
  if (config_.rope_table_len > 0 && position >= config_.rope_table_len)
    invalid("position is ", position, ", but the carried rotary tables end at ", config_.rope_table_len - 1);
}

void DeviceSession::commit(int32_t sequence, const int32_t* path, int64_t path_count) {
  Sequence& of = known(sequence);
  check_path(path, path_count, of.pending);
  for (int64_t j = 0; j < path_count; ++j) {
    const int32_t before = j == 0 ? -1 : path[j - 1], parent = of.parents[static_cast<std::size_t>(path[j])];
    if (parent != before) invalid("K1: row ", path[j], " of the path has parent ", parent, ", but the row before it is ", before);
  }
  if (path_count > 0 && path[path_count - 1] != path_count - 1) {  // else every row is in its place
    int32_t* on_device = buffer<int32_t>("path", path_count + 1);
    const int32_t kept = static_cast<int32_t>(path_count);
    device_.copy_in(on_device, path, path_count * 4);
    device_.copy_in(on_device + path_count, &kept, 4);
    device_.compact(store_.data(), slots_ * row_words(), {page_table(sequence, 0), static_cast<int>(kPageRows)}, on_device, on_device + path_count,
                    of.committed, nullptr, row_words(), config_.layers);
    device_.synchronise();
  }
  int32_t* pending_at = of.positions.data() + of.committed;
  for (int64_t j = 0; j < path_count; ++j) pending_at[j] = pending_at[path[j]];
  of.positions.resize(static_cast<std::size_t>(of.committed + path_count));
  of.committed += path_count;
  of.pending = 0;
  of.parents.clear();
  resize_pages(of, of.committed);
}

void DeviceSession::keep_committed(int32_t sequence, int64_t rows) {
  Sequence& of = known(sequence);
  of.committed = std::min(of.committed, rows);
  of.positions.resize(static_cast<std::size_t>(of.committed));
  resize_pages(of, of.committed);
}

void DeviceSession::cache_rows(int32_t sequence, int64_t layer, float* out) {
  const Sequence& of = known(sequence);
  const int64_t width = config_.cache_dim(), words = row_words();
  std::vector<int32_t> slots;
  for (int64_t i = 0; i < of.committed; ++i) slots.push_back(of.pages[static_cast<std::size_t>(i / kPageRows)] * static_cast<int32_t>(kPageRows) + static_cast<int32_t>(i % kPageRows));
  int32_t* on_device = buffer<int32_t>("row slots", of.committed);
  float* rows = buffer<float>("rows", of.committed * words);
  device_.copy_in(on_device, slots.data(), of.committed * 4);
  device_.gather(store_.data() + layer * slots_ * words, on_device, rows, of.committed, words);
  if (!narrow_) {
    device_.copy_out(out, rows, of.committed * width * 4);
    return;
  }
  std::vector<uint16_t> narrow(static_cast<std::size_t>(of.committed * padded_width()));
  device_.copy_out(narrow.data(), rows, of.committed * words * 4);
  for (int64_t i = 0; i < of.committed; ++i)
    for (int64_t column = 0; column < width; ++column) out[i * width + column] = widened(narrow[static_cast<std::size_t>(i * padded_width() + column)]);
}

void DeviceSession::evict(int32_t sequence) {
  resize_pages(known(sequence), 0);
  sequences_.erase(sequence);
}

void DeviceSession::fork(int32_t source, int32_t target) {
  const int64_t rows = known(source).committed;
  if (contains(target)) invalid("sequence ", target, " exists already: evict it before a fork");
  Sequence& copy = sequences_[target];
  try {
    resize_pages(copy, rows);
  } catch (...) {
    sequences_.erase(target);
    throw;
  }
  const int64_t page_floats = kPageRows * row_words();
  for (std::size_t i = 0; i < copy.pages.size(); ++i) {
    // whole pages; rows past the end of the source are NaN there and stay NaN here
    device_.copy_rows(store_.data() + copy.pages[i] * page_floats, store_.data() + sequences_.at(source).pages[i] * page_floats, slots_ * row_words() * 4,
                      page_floats * 4, config_.layers);
  }
  copy.committed = rows;
  copy.positions.assign(sequences_.at(source).positions.begin(), sequences_.at(source).positions.begin() + rows);
}

// ---- the plan of a batch ---------------------------------------------------------------------------------------------

void DeviceSession::check_rows(const BatchRows& rows) const {
  for (int64_t i = 0; i < rows.count(); ++i) {
    const std::size_t at = static_cast<std::size_t>(i);
    if (rows.token[at] < 0 || rows.token[at] >= config_.vocab) invalid("token[", i, "] is ", rows.token[at], ", but must be between 0 and ", config_.vocab - 1);
    if (rows.position[at] < 0) invalid("position[", i, "] is ", rows.position[at], ", but positions start at 0");
    check_position(rows.position[at]);
    const int32_t parent = rows.parent[at];
    if (parent < -1 || parent >= i) invalid("parent[", i, "] is ", parent, ", but must be -1 or an earlier row of the batch");
    if (parent >= 0 && rows.sequence[static_cast<std::size_t>(parent)] != rows.sequence[at]) {
      invalid("parent[", i, "] is ", parent, ", a row of sequence ", rows.sequence[static_cast<std::size_t>(parent)], ", but must be of sequence ", rows.sequence[at]);
    }
  }
}

DeviceSession::Batch DeviceSession::plan_host(const BatchRows& rows, Order& order) {
  guards_.clear();
  const int64_t count = rows.count();
  std::map<int32_t, std::vector<int64_t>> members;
  for (int64_t i = 0; i < count; ++i) members[rows.sequence[static_cast<std::size_t>(i)]].push_back(i);
  const auto drop_all = [&] {
    for (const auto& [sequence, ignored] : members) drop_pending(sequence);
  };
  const auto take_pages = [&](bool padded) {
    drop_all();
    for (const auto& [sequence, own] : members) {
      const int64_t size = static_cast<int64_t>(own.size());
      Sequence& of = sequences_[sequence];
      resize_pages(of, of.committed + (padded ? rows_bucket(size) : size));
    }
  };
  bool padded = true;
  try {
    take_pages(true);
  } catch (const Error&) {  // a cache that is nearly full holds the rows, but no padding
    padded = false;
    try {
      take_pages(false);
    } catch (...) {
      drop_all();
      throw;
    }
  }
  Batch batch;
  std::vector<int32_t> local(static_cast<std::size_t>(count)), tokens, slots, positions, parents, sorted_at(static_cast<std::size_t>(count)), wanted, prefixes, tables,
      key_positions;
  std::vector<int64_t> pages_at, keys_at;
  int64_t words_total = 0, furthest = 0;
  for (const auto& [sequence, own] : members) {
    const int64_t size = static_cast<int64_t>(own.size()), all = padded ? rows_bucket(size) : size;
    Sequence& of = sequences_[sequence];
    const int64_t prefix = of.committed, keys = keys_bucket(prefix + all);
    of.pending = size;
    of.parents.clear();
    of.positions.resize(static_cast<std::size_t>(prefix));
    if (config_.window > 0) {
      keys_at.push_back(static_cast<int64_t>(key_positions.size()));
      key_positions.insert(key_positions.end(), of.positions.begin(), of.positions.end());
      key_positions.resize(static_cast<std::size_t>(keys_at.back() + keys), 0);
    }
    batch.columns = std::max(batch.columns, prefix + size);
    batch.plan.spans.push_back({batch.plan.rows, all, keys - all, nullptr, nullptr, nullptr, words_for(all)});
    batch.shape.push_back(all);
    batch.shape.push_back(keys);
    for (int64_t i = 0; i < all; ++i) {
      const int64_t slot = prefix + i;
      slots.push_back(of.pages[static_cast<std::size_t>(slot / kPageRows)] * static_cast<int32_t>(kPageRows) + static_cast<int32_t>(slot % kPageRows));
      if (i >= size) {
        order.batch.push_back(-1);
        tokens.push_back(-1);
        positions.push_back(0);
        parents.push_back(-1);
        continue;
      }
      const std::size_t row = static_cast<std::size_t>(own[static_cast<std::size_t>(i)]);
      local[row] = static_cast<int32_t>(i);
      sorted_at[row] = static_cast<int32_t>(order.batch.size());
      order.batch.push_back(static_cast<int64_t>(row));
      tokens.push_back(rows.token[row]);
      positions.push_back(rows.position[row]);
      furthest = std::max<int64_t>(furthest, rows.position[row]);
      of.parents.push_back(rows.parent[row] < 0 ? -1 : local[static_cast<std::size_t>(rows.parent[row])]);
      parents.push_back(of.parents.back());
      of.positions.push_back(rows.position[row]);
    }
    prefixes.push_back(static_cast<int32_t>(prefix));
    pages_at.push_back(static_cast<int64_t>(tables.size()));
    tables.insert(tables.end(), of.pages.begin(), of.pages.end());
    tables.resize(static_cast<std::size_t>(pages_at.back() + (keys + kPageRows - 1) / kPageRows), 0);
    batch.plan.rows += all;
    words_total += all * words_for(all);
  }
  for (int64_t i = 0; i < count; ++i)
    if (rows.want_logits[static_cast<std::size_t>(i)]) wanted.push_back(sorted_at[static_cast<std::size_t>(i)]);
  batch.kept = static_cast<int64_t>(wanted.size());
  batch.kept_rows = std::min(rows_bucket(batch.kept), batch.plan.rows);
  wanted.resize(static_cast<std::size_t>(batch.kept_rows), 0);
  batch.shape.push_back(batch.kept_rows);
  ensure_positions(1 + furthest);

  if (planted("graph-stale-pages")) {  // the tables stay those that were there before the first replay
    static std::vector<int32_t> captured;
    if (replays_ == 0) captured = tables;
    captured.resize(tables.size(), 0);
    tables = captured;
  }
  std::vector<int32_t> inputs;
  std::vector<std::size_t> at;
  for (const std::vector<int32_t>* part : {&tokens, &slots, &positions, &parents, &prefixes, &wanted, &key_positions, &tables}) {
    at.push_back(inputs.size());
    inputs.insert(inputs.end(), part->begin(), part->end());
  }
  int32_t* on_device = buffer<int32_t>("plan", static_cast<int64_t>(inputs.size()));
  device_.copy_in(on_device, inputs.data(), static_cast<int64_t>(inputs.size()) * 4);
  batch.plan.tokens = on_device + at[0];
  batch.plan.slots = on_device + at[1];
  batch.plan.positions = on_device + at[2];
  batch.parents = on_device + at[3];
  batch.wanted = on_device + at[5];
  uint32_t* bits = buffer<uint32_t>("bits", words_total);
  for (std::size_t number = 0; number < batch.plan.spans.size(); ++number) {
    Span& span = batch.plan.spans[number];
    span.prefix_at = on_device + at[4] + number;
    if (planted("graph-stale-length")) {  // by value: replays keep the length of the batch that was captured
      span.prefix_at = nullptr;
      span.prefix_len = prefixes[number];
    }
    span.pages = on_device + at[7] + pages_at[number];
    if (config_.window > 0) span.key_positions = on_device + at[6] + keys_at[number];
    span.bits = bits;
    bits += span.rows * span.words;
  }
  return batch;
}

// ---- the model -------------------------------------------------------------------------------------------------------

// A copy on the device: it waits there until the pass is over, so that a graph has its taps as well.
template <class T>
void DeviceSession::tap(const TapSink& taps, const Order* order, const char* name, int64_t layer, const T* data, int64_t rows,
                        std::initializer_list<int64_t> shape) {
  if (!taps.wants(name)) return;
  int64_t width = 1;
  std::vector<int64_t> tail(shape.begin() + 1, shape.end());
  for (const int64_t size : tail) width *= size;
  T* copy = buffer<T>(text("tap ", name, " ", layer), rows * width);
  device_.copy(copy, data, rows * width * static_cast<int64_t>(sizeof(T)));
  taps_.push_back({name, layer, std::is_same_v<T, int32_t>, order != nullptr, reinterpret_cast<const char*>(copy), rows, 1, width, 0, width, std::move(tail)});
}

// Parts of the rows that attention reads, in the format in which it reads them: fresh cache rows [latent | k_rope], queries [absorbed | rotated].
template <class Element>
void DeviceSession::tap_parts(const TapSink& taps, int64_t layer, const Element* fresh, const Element* query, int64_t rows, int64_t width) {
  const int64_t rank = config_.kv_rank, dim = config_.rope_dim, heads = config_.heads;
  constexpr int64_t bytes = sizeof(Element);
  constexpr bool narrow = std::is_same_v<Element, uint16_t>;
  if (!taps.wants("latent") && !taps.wants("q_rope") && !taps.wants("k_rope") && !taps.wants("q_absorb")) return;
  Element* rows_copy = buffer<Element>(text("tap cache rows ", layer), rows * width);
  Element* query_copy = buffer<Element>(text("tap query ", layer), rows * heads * width);
  device_.copy(rows_copy, fresh, rows * width * bytes);
  device_.copy(query_copy, query, rows * heads * width * bytes);
  const char *of_rows = reinterpret_cast<const char*>(rows_copy), *of_query = reinterpret_cast<const char*>(query_copy);
  const TapRecord parts[] = {{"latent", layer, false, true, of_rows, rows, 1, width, 0, rank, {rank}, narrow},
                             {"q_rope", layer, false, true, of_query, rows, heads, width, rank, dim, {heads, dim}, narrow},
                             {"k_rope", layer, false, true, of_rows, rows, 1, width, rank, dim, {dim}, narrow},
                             {"q_absorb", layer, false, true, of_query, rows, heads, width, 0, rank, {heads, rank}, narrow}};
  for (const TapRecord& part : parts)
    if (taps.wants(part.name.c_str())) taps_.push_back(part);
}

template <class T, class Out>
void DeviceSession::push_tap(const TapRecord& record, const Order& order, const Batch& batch, const TapSink& taps) {
  std::vector<T> found(static_cast<std::size_t>(record.rows * record.groups * record.pitch));
  device_.copy_out(found.data(), record.data, static_cast<int64_t>(found.size() * sizeof(T)));
  const int64_t rows = record.sorted ? std::count_if(order.batch.begin(), order.batch.end(), [](int64_t row) { return row >= 0; }) : batch.kept;
  const int64_t size = record.size < 0 ? batch.columns : record.size;
  std::vector<Out> out(static_cast<std::size_t>(rows * record.groups * size));
  for (int64_t row = 0; row < record.rows; ++row) {
    const int64_t target = record.sorted ? order.batch[static_cast<std::size_t>(row)] : row < batch.kept ? row : -1;
    for (int64_t group = 0; target >= 0 && group < record.groups; ++group) {
      const T* from = found.data() + (row * record.groups + group) * record.pitch + record.begin;
      std::transform(from, from + size, out.begin() + (target * record.groups + group) * size, [](T value) -> Out { return widened(value); });
    }
  }
  const char* name = record.name.c_str();
  if (record.tail.empty()) taps.push(name, record.layer, out.data(), {rows});
  else if (record.tail.size() == 1) taps.push(name, record.layer, out.data(), {rows, record.tail[0]});
  else taps.push(name, record.layer, out.data(), {rows, record.tail[0], record.tail[1] < 0 ? size : record.tail[1]});
}

void DeviceSession::matmul(const float* x, int64_t rows, int64_t inner, const float* w, int64_t cols, float* out) {
  device_.gemm({x, inner, 0, w, cols, 0, out, cols, 0, rows, cols, inner, 1, false});
}

void DeviceSession::forward(const BatchRows& rows, float* logits, const TapSink& taps) {
  if (rows.count() == 0) return;
  check_rows(rows);
  Order order;
  const Batch batch = plan_host(rows, order);
  try {
    run_forward(batch, order, taps);
    for (const TapRecord& record : taps_) {
      if (record.integers) push_tap<int32_t>(record, order, batch, taps);
      else if (record.narrow) push_tap<uint16_t, float>(record, order, batch, taps);
      else push_tap<float>(record, order, batch, taps);
    }
    check_guards();
    if (logits != nullptr) device_.copy_out(logits, buffers_.at("logits").data(), batch.kept * config_.vocab * 4);
    device_.synchronise();
  } catch (...) {
    for (const int32_t sequence : rows.sequence) drop_pending(sequence);
    throw;
  }
}

void DeviceSession::run_forward(const Batch& batch, const Order& order, const TapSink& taps) {
  const auto launch = [&] {
    if (!planted("graph-stale-mask")) launch_masks(batch);
    launch_forward(batch, order, taps);
  };
  taps_.clear();
  if (forwards_.size() > kGraphs) forwards_.clear();
  Recorded& recorded = forwards_[{batch.shape, taps.names()}];
  if (planted("graph-stale-mask") && recorded.graph == nullptr) launch_masks(batch);  // replays keep the mask of the batch that was captured
  if (!graphs_) return launch();
  if (recorded.graph == nullptr) {
    if (recorded.runs++ == 0) return launch();  // every buffer gets its size, and cuBLAS its kernels
    const std::map<std::string, const char*> before = std::exchange(guards_, {});
    recorded.graph = device_.captured(launch);
    recorded.taps = taps_;
    recorded.guards = std::exchange(guards_, before);
  }
  taps_ = recorded.taps;
  for (const auto& [name, guard] : recorded.guards) guards_[name] = guard;
  device_.replay(*recorded.graph);
  ++replays_;
  ++replays_of_process;
}

void DeviceSession::launch_masks(const Batch& batch) {
  int32_t* depths = buffer<int32_t>("depths", batch.plan.rows);
  for (const Span& span : batch.plan.spans)
    device_.tree_mask(batch.parents + span.first, nullptr, span.rows, 0, span.prefix_at, depths + span.first, const_cast<uint32_t*>(span.bits));
}

// Launches only: what differs from batch to batch of one shape stands behind the pointers of `batch`.
void DeviceSession::launch_forward(const Batch& batch, const Order& order, const TapSink& taps) {
  const int64_t rows = batch.plan.rows, hidden = config_.hidden, vocab = config_.vocab, kept = batch.kept_rows;
  const float* residual = run_layers(batch.plan, &order, taps);
  float* normed = buffer<float>("final_norm", rows * hidden);
  device_.rms_norm(residual, hidden, weight("norm"), config_.rms_eps, normed, hidden, rows, hidden);
  tap(taps, &order, "final_norm", config_.layers, normed, rows, {rows, hidden});
  float* picked = buffer<float>("picked", kept * hidden);
  float* out = buffer<float>("logits", kept * vocab - (planted("short-buffer") && kept > 0 ? 1 : 0));
  device_.gather(normed, batch.wanted, picked, kept, hidden);
  if (config_.tied) {
    device_.gemm({picked, hidden, 0, weight("embed"), hidden, 0, out, vocab, 0, kept, vocab, hidden, 1, true});
  } else {
    matmul(picked, kept, hidden, weight("head"), vocab, out);
  }
  tap(taps, nullptr, "logits", config_.layers, out, kept, {kept, vocab});
  int32_t* ids = buffer<int32_t>("argmax", kept);
  device_.argmax(out, ids, buffer<uint64_t>("argmax parts", kept * 64), kept, vocab);
  tap(taps, nullptr, "argmax", config_.layers, ids, kept, {kept});
}

DrawRule draw_rule(const Sampling& s) {
  return {s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty, s.top_k, s.seed, s.top_k_ties_all ? 1 : 0,
          static_cast<int64_t>(s.logit_bias.size())};
}

// In one piece: the rule, the streams, room for `history_max` tokens, biases, their tokens. So the number of biases is a part of a round's shape.
Draws DeviceSession::upload_draws(const std::vector<History>& histories, int64_t history_max) {
  const int64_t streams = static_cast<int64_t>(histories.size()), biases = static_cast<int64_t>(sampling_->logit_bias.size());
  const int64_t at_streams = sizeof(DrawRule), at_history = at_streams + 16 * streams, at_biases = (at_history + 4 * history_max + 7) / 8 * 8,
                at_tokens = at_biases + 8 * biases, bytes = at_tokens + 4 * biases;
  std::vector<char> host(static_cast<std::size_t>(bytes), 0);
  const DrawRule rule = draw_rule(*sampling_);
  std::memcpy(host.data(), &rule, sizeof rule);
  int64_t first = 0;
  for (int64_t i = 0; i < streams; ++i) {
    const History& own = histories[static_cast<std::size_t>(i)];
    const int64_t length = static_cast<int64_t>(own.tokens->size());
    const int32_t stream[] = {static_cast<int32_t>(first), static_cast<int32_t>(length), static_cast<int32_t>(own.prompt_len), own.number};
    std::memcpy(host.data() + at_streams + 16 * i, stream, sizeof stream);
    std::memcpy(host.data() + at_history + 4 * first, own.tokens->data(), static_cast<std::size_t>(4 * length));
    first += length;
  }
  for (int64_t i = 0; i < biases; ++i) {
    const auto& [token, bias] = sampling_->logit_bias[static_cast<std::size_t>(i)];
    const int32_t narrow_token = static_cast<int32_t>(token);
    std::memcpy(host.data() + at_biases + 8 * i, &bias, 8);
    std::memcpy(host.data() + at_tokens + 4 * i, &narrow_token, 4);
  }
  char* on_device = buffer<char>("draws", bytes);
  device_.copy_in(on_device, host.data(), bytes);
  return {on_device, reinterpret_cast<const int32_t*>(on_device + at_tokens), reinterpret_cast<const double*>(on_device + at_biases),
          reinterpret_cast<const int32_t*>(on_device + at_history), reinterpret_cast<const int32_t*>(on_device + at_streams)};
}

void DeviceSession::check_draws(int32_t status) {
  if (status & 32) failed("a row of logits is no distribution");
  if (status & 64) unsupported("S3: two numbers agree to about 85 bits, and these kernels do not guess");
}

std::vector<int32_t> DeviceSession::choices(const BatchRows& rows, const std::vector<History>& histories) {
  const int64_t kept = std::count_if(rows.want_logits.begin(), rows.want_logits.end(), [](uint8_t want) { return want != 0; });
  const TapSink none(nullptr, nullptr, nullptr);
  forward(rows, nullptr, none);
  std::vector<int32_t> ids(static_cast<std::size_t>(kept));
  if (sampling_ == nullptr) {
    device_.copy_out(ids.data(), buffers_.at("argmax").data(), kept * 4);
    return ids;
  }
  int64_t tokens = 0;
  for (const History& own : histories) tokens += static_cast<int64_t>(own.tokens->size());
  const Draws draws = upload_draws(histories, tokens);
  int32_t* drawn = buffer<int32_t>("drawn", kept + 1);
  device_.fill(drawn + kept, 0, 4);
  device_.sample(reinterpret_cast<const float*>(buffers_.at("logits").data()), draws, {nullptr, nullptr, nullptr, 1, 1}, drawn, drawn + kept,
                 buffer<char>("draw parts", Device::sample_workspace(kept, config_.vocab)), kept, config_.vocab);
  ids.push_back(0);
  device_.copy_out(ids.data(), drawn, (kept + 1) * 4);
  check_draws(ids.back());
  ids.pop_back();
  return ids;
}

void DeviceSession::make_masks(const Plan& plan) {
  masks_.clear();
  int64_t bits_total = 0, seen_total = 0;
  for (const Span& span : plan.spans) {
    masks_.push_back({span.bits, span.words, span.prefix_len, span.prefix_at, nullptr});
    bits_total += span.rows * words_for(span.prefix_len + span.rows);
    seen_total += words_for(span.prefix_len + span.rows);
  }
  if (config_.window == 0) return;
  uint32_t* bits = buffer<uint32_t>("window bits", bits_total);
  uint32_t* seen = buffer<uint32_t>("window seen", seen_total);
  for (std::size_t i = 0; i < plan.spans.size(); ++i) {
    const Span& span = plan.spans[i];
    const int64_t words = words_for(span.prefix_len + span.rows);
    device_.window_mask(span.bits, span.words, span.key_positions, plan.positions + span.first, span.prefix_len, span.prefix_at, span.rows,
                        config_.window + (planted("window-inclusive") ? 1 : 0), bits, words, seen);
    masks_[i] = {bits, words, 0, nullptr, seen};
    bits += span.rows * words;
    seen += words;
  }
}

const float* DeviceSession::run_layers(const Plan& plan, const Order* order, const TapSink& taps) {
  const int64_t rows = plan.rows, hidden = config_.hidden, half = config_.rope_dim / 2;
  float* residual = buffer<float>("residual", rows * hidden);
  float* cos = buffer<float>("cos", rows * half);
  float* sin = buffer<float>("sin", rows * half);
  device_.gather(weight("cos table"), plan.positions, cos, rows, half);
  device_.gather(weight("sin table"), plan.positions, sin, rows, half);
  device_.gather(weight("embed"), plan.tokens, residual, rows, hidden);
  tap(taps, order, "embed", -1, residual, rows, {rows, hidden});
  make_masks(plan);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    attention(plan, order, layer, cos, sin, residual, taps);
    feed_forward(rows, order, layer, residual, taps);
  }
  return residual;
}

void DeviceSession::attention(const Plan& plan, const Order* order, int64_t layer, const float* cos, const float* sin, float* residual, const TapSink& taps) {
  const ModelConfig& c = config_;
  const int64_t rows = plan.rows, heads = c.heads, rank = c.kv_rank, dim = c.rope_dim, width = c.cache_dim(), head_dim = c.head_dim();
  float* x = buffer<float>("attn_norm", rows * c.hidden);
  float* q = buffer<float>("q", rows * heads * head_dim);
  device_.rms_norm(residual, c.hidden, of_layer(layer, "attn_norm"), c.rms_eps, x, c.hidden, rows, c.hidden);
  tap(taps, order, "attn_norm", layer, x, rows, {rows, c.hidden});
  if (c.q_rank > 0) {
    float* q_a = buffer<float>("q_a", rows * c.q_rank);
    float* q_a_norm = buffer<float>("q_a_norm", rows * c.q_rank);
    matmul(x, rows, c.hidden, of_layer(layer, "q_a"), c.q_rank, q_a);
    if (c.attention_bias) device_.add_bias(q_a, of_layer(layer, "q_a_bias"), rows, c.q_rank);
    tap(taps, order, "q_a", layer, q_a, rows, {rows, c.q_rank});
    device_.rms_norm(q_a, c.q_rank, of_layer(layer, "q_a_norm"), c.latent_eps, q_a_norm, c.q_rank, rows, c.q_rank);
    tap(taps, order, "q_a_norm", layer, q_a_norm, rows, {rows, c.q_rank});
    matmul(q_a_norm, rows, c.q_rank, of_layer(layer, "q_b"), heads * head_dim, q);
  } else {
    matmul(x, rows, c.hidden, of_layer(layer, "q"), heads * head_dim, q);
    if (c.attention_bias) device_.add_bias(q, of_layer(layer, "q_bias"), rows, heads * head_dim);
  }
  tap(taps, order, "q", layer, q, rows, {rows, heads, head_dim});
  float* kv = buffer<float>("kv_a", rows * width);
  matmul(x, rows, c.hidden, of_layer(layer, "kv_a"), width, kv);
  if (c.attention_bias) device_.add_bias(kv, of_layer(layer, "kv_a_bias"), rows, width);
  tap(taps, order, "kv_a", layer, kv, rows, {rows, width});

  // new cache rows [latent | k_rope], and queries [absorbed | rotated], written into their places
  float* fresh = buffer<float>("cache rows", rows * width);
  float* query = buffer<float>("query", rows * heads * width);
  const bool half_layout = c.rope.half_layout;
  device_.rms_norm(kv, width, of_layer(layer, "kv_a_norm"), c.latent_eps, fresh, width, rows, rank);
  device_.rope(kv + rank, width, dim, cos, sin, fresh + rank, width, dim, rows, 1, dim, half_layout);
  device_.rope(q + c.nope_dim, heads * head_dim, head_dim, cos, sin, query + rank, heads * width, width, rows, heads, dim, half_layout);
  device_.gemm({q, heads * head_dim, head_dim, of_layer(layer, "w_kc"), rank, c.nope_dim * rank, query, heads * width, width, rows, rank, c.nope_dim, heads, false});
  float* o_latent = buffer<float>("o_latent", rows * heads * rank);
  if (c.to_cache != round_nothing && !planted("cache-unrounded")) device_.round_cache(fresh, rows * width, c.to_cache == round_float16);
  if (narrow_) {
    const int64_t padded = padded_width();
    uint16_t* narrow_fresh = buffer<uint16_t>("narrow cache rows", rows * padded);
    uint16_t* narrow_query = buffer<uint16_t>("narrow query", rows * heads * padded);
    device_.cast_rows(fresh, width, narrow_fresh, padded, rows, width);
    device_.cast_rows(query, width, narrow_query, padded, rows * heads, width);
    attend(plan, order, layer, narrow_fresh, narrow_query, padded, o_latent, taps);
  } else {
    attend(plan, order, layer, fresh, query, width, o_latent, taps);
  }
  tap(taps, order, "o_latent", layer, o_latent, rows, {rows, heads, rank});
  float* o_heads = buffer<float>("o_heads", rows * heads * c.v_dim);
  device_.gemm({o_latent, heads * rank, rank, of_layer(layer, "w_vc"), c.v_dim, rank * c.v_dim, o_heads, heads * c.v_dim, c.v_dim, rows, c.v_dim, rank, heads, false});
  tap(taps, order, "o_heads", layer, o_heads, rows, {rows, heads, c.v_dim});
  float* out = buffer<float>("attn_out", rows * c.hidden);
  matmul(o_heads, rows, heads * c.v_dim, of_layer(layer, "o"), c.hidden, out);
  if (c.attention_bias && !planted("bias-forgotten")) device_.add_bias(out, of_layer(layer, "o_bias"), rows, c.hidden);
  tap(taps, order, "attn_out", layer, out, rows, {rows, c.hidden});
  device_.add(residual, out, residual, rows * c.hidden);
  tap(taps, order, "attn_residual", layer, residual, rows, {rows, c.hidden});
}

// The new cache rows into the cache, and attention over it: fresh [rows, width], query [rows, heads, width]; columns past cache_dim are zero.
template <class Element>
void DeviceSession::attend(const Plan& plan, const Order* order, int64_t layer, const Element* fresh, const Element* query, int64_t width, float* o_latent,
                           const TapSink& taps) {
  const int64_t rows = plan.rows, heads = config_.heads, rank = config_.kv_rank;
  if (order != nullptr) tap_parts(taps, layer, fresh, query, rows, width);
  float* layer_store = store_.data() + layer * slots_ * row_words();
  device_.scatter(reinterpret_cast<const float*>(fresh), plan.slots, layer_store, rows, row_words());  // words, whatever they hold
  std::vector<Device::AttentionOf<Element>> calls;
  int64_t workspace = 0, columns = 0;
  for (std::size_t i = 0; i < plan.spans.size(); ++i) {
    const Span& span = plan.spans[i];
    const Mask& mask = masks_[i];
    const int64_t keys = span.prefix_len + span.rows;
    columns = std::max(columns, keys);
    workspace = std::max(workspace, std::is_same_v<Element, uint16_t> ? device_.narrow_attention_workspace(span.rows, heads, rank, width, keys)
                                                                      : device_.attention_workspace(span.rows, heads, rank, width, keys));
    calls.push_back({query + span.first * heads * width, reinterpret_cast<const Element*>(layer_store), {span.pages, static_cast<int>(kPageRows)}, mask.bits,
                     mask.words, span.rows, heads, rank, width, mask.prefix_len, keys, mask.prefix_at, config_.softmax_scale,
                     o_latent + span.first * heads * rank, mask.seen});
  }
  float* work = workspace ? buffer<float>("attention workspace", workspace) : nullptr;
  for (const Device::AttentionOf<Element>& call : calls) device_.tree_attention(call, work);
  if (order != nullptr && taps.wants("scores") && Device::shows_scores(rank, width)) {
    float* scores = buffer<float>(text("tap scores ", layer), rows * heads * columns);
    for (std::size_t i = 0; i < calls.size(); ++i) device_.attention_scores(calls[i], scores + plan.spans[i].first * heads * columns, columns);
    taps_.push_back({"scores", layer, false, true, reinterpret_cast<const char*>(scores), rows, heads, columns, 0, -1, {heads, -1}});
  }
}

// down(silu(gate(x)) * up(x)) of the dense block (prefix "") or of the shared expert ("shared_")
void DeviceSession::gated(int64_t rows, const Order* order, int64_t layer, const std::string& prefix, int64_t width, const float* x, float* out, const TapSink& taps) {
  float* gate = buffer<float>(prefix + "gate", rows * width);
  float* up = buffer<float>(prefix + "up", rows * width);
  float* act = buffer<float>(prefix + "act", rows * width);
  matmul(x, rows, config_.hidden, of_layer(layer, (prefix + "gate").c_str()), width, gate);
  tap(taps, order, (prefix + "gate").c_str(), layer, gate, rows, {rows, width});
  matmul(x, rows, config_.hidden, of_layer(layer, (prefix + "up").c_str()), width, up);
  tap(taps, order, (prefix + "up").c_str(), layer, up, rows, {rows, width});
  device_.swiglu(gate, up, act, rows * width);
  tap(taps, order, (prefix + "act").c_str(), layer, act, rows, {rows, width});
  matmul(act, rows, width, of_layer(layer, (prefix + "down").c_str()), config_.hidden, out);
}

void DeviceSession::feed_forward(int64_t rows, const Order* order, int64_t layer, float* residual, const TapSink& taps) {
  const ModelConfig& c = config_;
  const int64_t hidden = c.hidden, chosen = c.top_k, width = c.expert_dim, pairs = rows * chosen;
  float* x = buffer<float>("ffn_norm", rows * hidden);
  float* out = buffer<float>("ffn_out", rows * hidden);
  device_.rms_norm(residual, hidden, of_layer(layer, "ffn_norm"), c.rms_eps, x, hidden, rows, hidden);
  tap(taps, order, "ffn_norm", layer, x, rows, {rows, hidden});
  if (c.is_dense(layer)) {
    gated(rows, order, layer, "", c.dense_dim, x, out, taps);
  } else {
    float* router_logits = buffer<float>("router_logits", rows * c.experts);
    float* scores = buffer<float>("router_scores", rows * c.experts);
    int32_t* ids = buffer<int32_t>("expert_ids", pairs);
    float* weights = buffer<float>("expert_weights", pairs);
    matmul(x, rows, hidden, of_layer(layer, "router"), c.experts, router_logits);
    tap(taps, order, "router_logits", layer, router_logits, rows, {rows, c.experts});
    device_.router_scores(router_logits, scores, rows, c.experts, c.scoring_softmax);
    tap(taps, order, "router_scores", layer, scores, rows, {rows, c.experts});
    device_.route(scores, c.scoring_softmax ? nullptr : of_layer(layer, "router_bias"), ids, weights, rows,
                  {c.experts, chosen, c.route.groups, c.route.top_groups, c.route.group_score_max, c.route.norm_top_k, c.route.routed_scale,
                   c.route.denominator_eps, c.route.group_fill == 0.0f, c.route.denominator_clamp});
    tap(taps, order, "expert_ids", layer, ids, rows, {rows, chosen});
    tap(taps, order, "expert_weights", layer, weights, rows, {rows, chosen});
    int32_t* starts = buffer<int32_t>("expert starts", c.experts + 1);
    int32_t* members = buffer<int32_t>("expert order", pairs);
    float* gate = buffer<float>("expert_gate", pairs * width);
    float* up = buffer<float>("expert_up", pairs * width);
    float* act = buffer<float>("expert_act", pairs * width);
    float* expert_out = buffer<float>("expert_out", pairs * hidden);
    device_.moe_group(ids, starts, members, pairs, c.experts);
    device_.matmul_grouped(x, chosen, of_layer(layer, "expert_gate"), of_layer(layer, "expert_up"), starts, members, gate, up, pairs, c.experts, width, hidden);
    device_.swiglu(gate, up, act, pairs * width);
    device_.matmul_grouped(act, 1, of_layer(layer, "expert_down"), nullptr, starts, members, expert_out, nullptr, pairs, c.experts, hidden, width);
    tap(taps, order, "expert_gate", layer, gate, rows, {rows, chosen, width});
    tap(taps, order, "expert_up", layer, up, rows, {rows, chosen, width});
    tap(taps, order, "expert_act", layer, act, rows, {rows, chosen, width});
    tap(taps, order, "expert_out", layer, expert_out, rows, {rows, chosen, hidden});
    float* shared = nullptr;
    if (c.shared_experts > 0) {
      shared = buffer<float>("shared_out", rows * hidden);
      gated(rows, order, layer, "shared_", c.shared_dim(), x, shared, taps);
      tap(taps, order, "shared_out", layer, shared, rows, {rows, hidden});
    }
    device_.combine(weights, expert_out, shared, out, rows, chosen, hidden);
  }
  tap(taps, order, "ffn_out", layer, out, rows, {rows, hidden});
  device_.add(residual, out, residual, rows * hidden);
  tap(taps, order, "ffn_residual", layer, residual, rows, {rows, hidden});
}

// ---- a round of draft trees ------------------------------------------------------------------------------------------

std::vector<DeviceSession::Outcome> DeviceSession::tree_round(const std::vector<Draft>& drafts, int64_t block_len, int64_t budget) {
  const Round round = prepare_round(drafts, block_len, budget);
  run_round(round);
  return finish_round(round, drafts);
}

DeviceSession::Round DeviceSession::prepare_round(const std::vector<Draft>& drafts, int64_t block_len, int64_t budget) {
  guards_.clear();
  const int64_t streams = static_cast<int64_t>(drafts.size()), nodes = budget + 1, vocab = config_.vocab;
  int64_t longest = 0;
  for (const Draft& draft : drafts) {
    const int64_t prefix = committed(draft.sequence);
    drop_pending(draft.sequence);
    resize_pages(sequences_[draft.sequence], prefix + nodes);
    longest = std::max(longest, prefix);
  }
  Round round;
  round.shape = {streams, block_len, budget, keys_bucket(longest + nodes), sampling_ == nullptr ? -1 : static_cast<int64_t>(sampling_->logit_bias.size())};
  ensure_positions(round.shape.keys + block_len + 1);
  const int64_t pages = (round.shape.keys + kPageRows - 1) / kPageRows;
  std::vector<int32_t> inputs(static_cast<std::size_t>(streams * (2 + nodes + pages)), 0);
  int32_t *root = inputs.data(), *prefix_of = root + streams, *slot_of = prefix_of + streams, *page_of = slot_of + streams * nodes;
  for (int64_t i = 0; i < streams; ++i) {
    const Draft& draft = drafts[static_cast<std::size_t>(i)];
    const Sequence& of = known(draft.sequence);
    const int64_t prefix = of.committed;
    root[i] = draft.root;
    prefix_of[i] = static_cast<int32_t>(prefix);
    std::copy(of.pages.begin(), of.pages.end(), page_of + i * pages);
    for (int64_t slot = prefix; slot < prefix + nodes; ++slot)
      *slot_of++ = of.pages[static_cast<std::size_t>(slot / kPageRows)] * static_cast<int32_t>(kPageRows) + static_cast<int32_t>(slot % kPageRows);
  }
  int32_t* on_device = buffer<int32_t>("round inputs", static_cast<int64_t>(inputs.size()));
  round.roots = on_device;
  round.prefixes = round.roots + streams;
  round.slots = round.prefixes + streams;
  round.pages = round.slots + streams * nodes;
  if (sampling_ != nullptr) {
    std::vector<History> histories;
    for (const Draft& draft : drafts) histories.push_back(draft.history);
    round.draws = upload_draws(histories, streams * (round.shape.keys + 1));
  }
  round.logits = buffer<float>("draft logits", streams * block_len * vocab);
  round.records = buffer<int32_t>("round records", streams * round.record() + 1);
  device_.copy_in(on_device, inputs.data(), static_cast<int64_t>(inputs.size()) * 4);
  for (int64_t i = 0; i < streams; ++i)
    device_.copy_in(round.logits + i * block_len * vocab, drafts[static_cast<std::size_t>(i)].logits, block_len * vocab * 4);
  return round;
}

void DeviceSession::run_round(const Round& round) {
  if (!graphs_) return launch_round(round);
  if (rounds_.size() > kGraphs) rounds_.clear();
  Recorded& recorded = rounds_[round.shape];
  if (recorded.graph == nullptr) {
    if (recorded.runs++ == 0) {  // every buffer gets its size, and cuBLAS its kernels
      launch_round(round);
      return;
    }
    const std::map<std::string, const char*> before = std::exchange(guards_, {});
    recorded.graph = device_.captured([&] { launch_round(round); });
    recorded.guards = std::exchange(guards_, before);
  }
  for (const auto& [name, guard] : recorded.guards) guards_[name] = guard;
  device_.replay(*recorded.graph);
  ++replays_;
  ++replays_of_process;
}

// Launches only: what differs from round to round stands behind the pointers of `round`.
void DeviceSession::launch_round(const Round& round) {
  const RoundShape& shape = round.shape;
  const int64_t nodes = shape.nodes(), streams = shape.streams, rows = nodes * streams, vocab = config_.vocab, width = std::min(shape.budget, vocab);
  const int64_t words = words_for(nodes), depth_max = shape.block_len, pages = (shape.keys + kPageRows - 1) / kPageRows;
  int32_t* tokens = buffer<int32_t>("round tokens", rows);
  int32_t* positions = buffer<int32_t>("round positions", rows);
  int32_t* depths = buffer<int32_t>("round depths", rows);
  uint32_t* bits = buffer<uint32_t>("round bits", rows * words);
  int32_t* ids = buffer<int32_t>("draft ids", depth_max * width);
  float* log_probs = buffer<float>("draft log_probs", depth_max * width);
  uint32_t* counters = buffer<uint32_t>("draft counters", depth_max * kDraftCounters);
  float* parts = buffer<float>("draft parts", depth_max * ((vocab + 4095) / 4096) * 2);
  uint64_t* candidates = buffer<uint64_t>("draft candidates", depth_max * vocab);
  device_.fill(round.status(), 0, 4);
  Plan plan;
  plan.rows = rows;
  plan.tokens = tokens;
  plan.slots = round.slots;
  plan.positions = positions;
  for (int64_t i = 0; i < streams; ++i) {
    int32_t* own = round.records + i * round.record();
    int32_t *own_tokens = own, *own_parents = own + nodes, *found = own + 3 * nodes;
    uint32_t* own_bits = bits + i * nodes * words;
    const int32_t* prefix_at = round.prefixes + i;
    device_.draft_table(round.logits + i * depth_max * vocab, ids, log_probs, round.status(), counters, parts, candidates, depth_max, vocab, width);
    device_.best_first_tree(ids, log_probs, depth_max, width, shape.budget, round.roots + i, own_tokens, own_parents, depths + i * nodes, found, round.status());
    device_.tree_mask(own_parents, found, nodes, 0, prefix_at, positions + i * nodes, own_bits);
    device_.copy_rows(tokens + i * nodes, own_tokens, nodes * 4, nodes * 4, 1);
    plan.spans.push_back({i * nodes, nodes, shape.keys - nodes, prefix_at, round.pages + i * pages, own_bits, words});
  }
  const TapSink none(nullptr, nullptr, nullptr);
  const float* residual = run_layers(plan, nullptr, none);
  const int64_t hidden = config_.hidden;
  float* normed = buffer<float>("final_norm", rows * hidden);
  float* out = buffer<float>("logits", rows * vocab);
  int32_t* target = buffer<int32_t>("argmax", rows);
  device_.rms_norm(residual, hidden, weight("norm"), config_.rms_eps, normed, hidden, rows, hidden);
  if (config_.tied) {
    device_.gemm({normed, hidden, 0, weight("embed"), hidden, 0, out, vocab, 0, rows, vocab, hidden, 1, true});
  } else {
    matmul(normed, rows, hidden, weight("head"), vocab, out);
  }
  if (shape.biases < 0) {
    device_.argmax(out, target, buffer<uint64_t>("argmax parts", rows * 64), rows, vocab);
  } else {  // each node's own draw: its noise, and the history of its path (A6)
    device_.sample(out, round.draws, {round.records, round.records + nodes, round.records + 3 * nodes, nodes, round.record()}, target, round.status(),
                   buffer<char>("draw parts", Device::sample_workspace(rows, vocab)), rows, vocab);
  }
  for (int64_t i = 0; i < streams; ++i) {
    int32_t* own = round.records + i * round.record();
    int32_t *path = own + 2 * nodes, *found = own + 3 * nodes;
    const Span& span = plan.spans[static_cast<std::size_t>(i)];
    device_.accept(own, own + nodes, target + i * nodes, found, nodes, path, found + 1, found + 2, round.status());
    device_.compact(store_.data(), slots_ * row_words(), {span.pages, static_cast<int>(kPageRows)}, path, found + 1, span.prefix_len, span.prefix_at,
                    row_words(), config_.layers);
  }
}

std::vector<int32_t> DeviceSession::round_targets(int64_t rows) {
  std::vector<int32_t> ids(static_cast<std::size_t>(rows));
  device_.copy_out(ids.data(), buffers_.at("argmax").data(), rows * 4);
  return ids;
}

std::vector<DeviceSession::Outcome> DeviceSession::finish_round(const Round& round, const std::vector<Draft>& drafts) {
  const int64_t nodes = round.shape.nodes(), streams = round.shape.streams, record = round.record();
  std::vector<int32_t> host(static_cast<std::size_t>(streams * record + 1));
  device_.copy_out(host.data(), round.records, (streams * record + 1) * 4);
  check_guards();
  const int32_t problem = host.back();
  if (problem != 0) {
    for (const Draft& draft : drafts) drop_pending(draft.sequence);
    check_draws(problem);
    if (problem & 1) invalid("T8: draft logits must be finite or -inf");
    if (problem == 4) unsupported("T2: a path score has more than 106 bits, and these kernels do not guess");
    failed("the draft tree of a round is malformed (status ", problem, ")");
  }
  std::vector<Outcome> outcomes;
  for (int64_t i = 0; config_.rope_table_len > 0 && i < streams; ++i) {
    const int32_t *own = host.data() + i * record, *parents = own + nodes;
    std::vector<int64_t> depth(1, 0);
    for (int64_t node = 1; node <= own[3 * nodes]; ++node) depth.push_back(depth[static_cast<std::size_t>(parents[node])] + 1);
    try {
      check_position(committed(drafts[static_cast<std::size_t>(i)].sequence) + *std::max_element(depth.begin(), depth.end()));
    } catch (...) {
      for (const Draft& draft : drafts) drop_pending(draft.sequence);
      throw;
    }
  }
  for (int64_t i = 0; i < streams; ++i) {
    const int32_t* own = host.data() + i * record;
    const int64_t size = own[3 * nodes] + 1, length = own[3 * nodes + 1];
    outcomes.push_back({{own, own + size}, {own + nodes, own + nodes + size}, {own + 2 * nodes, own + 2 * nodes + length}, own[3 * nodes + 2]});
    Sequence& of = known(drafts[static_cast<std::size_t>(i)].sequence);
    for (int64_t j = 0; j < length; ++j) of.positions.push_back(static_cast<int32_t>(of.committed + j));
    of.committed += length;
    resize_pages(of, of.committed);
  }
  return outcomes;
}

}  // namespace paritree::cuda
