// A model resident on the device: weights, a paged cache, ragged forward passes, and draft-tree rounds without a host round trip inside.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../native/rope.hpp"
#include "../../native/sampling.hpp"
#include "../../native/session.hpp"
#include "launch.hpp"

namespace paritree::cuda {

inline std::atomic<int64_t> replays_of_process{0};  // of graphs, in all sessions; for benchmarks

// Device memory of one owner.
template <class T>
class Memory {
 public:
  Memory(Device& device, int64_t count) : device_(&device), count_(count), data_(static_cast<T*>(device.allocate(count * static_cast<int64_t>(sizeof(T))))) {}
  ~Memory() {
    if (data_ != nullptr) device_->release(data_);
  }
  Memory(Memory&& other) noexcept : device_(other.device_), count_(other.count_), data_(std::exchange(other.data_, nullptr)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(count_, other.count_);
    std::swap(data_, other.data_);
    return *this;
  }
  T* data() const { return data_; }
  int64_t count() const { return count_; }

 private:
  Device* device_;
  int64_t count_;
  T* data_;
};

// The rows of one sequence inside a batch: contiguous, in the order in which they are pending.
struct Span {
  int64_t first, rows;   // of the batch
  int64_t prefix_len;        // the longest that the launches are made for, where prefix_at is given
  const int32_t* prefix_at;  // on the device; null: prefix_len
  const int32_t* pages;      // on the device
  const uint32_t* bits;  // [rows, words] on the device
  int64_t words;
  const int32_t* key_positions = nullptr;  // of the prefix, on the device, for a sliding window; null: key s is at position s
};

// What the rows of a span see, as attention takes it: the tree's bits after a whole prefix, or bits over all keys.
struct Mask {
  const uint32_t* bits;
  int64_t words, prefix_len;
  const int32_t* prefix_at;
  const uint32_t* seen;
};

// A batch whose plan is on the device already. Rows are padded to a few sizes (rows_bucket), so that batches of nearly one shape are one graph;
// a padding row is computed like any other, into a cache slot of its own, and nobody sees it.
struct Plan {
  const int32_t* tokens;     // [T]; negative: an embedding of zeros
  const int32_t* slots;      // [T] cache slots
  const int32_t* positions;  // [T]
  int64_t rows = 0;
  std::vector<Span> spans;
};

class DeviceSession {
 public:
  DeviceSession(const ModelConfig& config, paritree_weight_fn weight, void* user, int64_t cache_slots, Precision precision);

  // Writes [wanted rows, vocab] to the host. Drops rows of these sequences that are still pending; rows are checked before anything changes.
  void forward(const BatchRows& rows, float* logits, const TapSink& taps);
  void commit(int32_t sequence, const int32_t* path, int64_t path_count);
  void cache_rows(int32_t sequence, int64_t layer, float* out);
  void evict(int32_t sequence);
  void fork(int32_t source, int32_t target);

  const ModelConfig& config() const { return config_; }
  bool contains(int32_t sequence) const { return sequences_.count(sequence) != 0; }
  int64_t committed(int32_t sequence) const;
  int64_t free_rows() const { return static_cast<int64_t>(free_.size()) * kPageRows; }

  // One round of draft trees: logits of each stream come from the host, what was accepted goes back, everything between stays on the device.
  struct History {  // what a draw follows (A6): everything before the token, how much of it is the prompt, the number of the request
    const std::vector<int32_t>* tokens = nullptr;
    int64_t prompt_len = 0;
    int32_t number = 0;
  };
  struct Draft {
    int32_t sequence;
    int32_t root;
    const float* logits;  // host, [block_len, vocab]
    History history = {};  // the root last; asked for while tokens are drawn
  };
  struct Outcome {
    std::vector<int32_t> tokens, parents, path;  // tokens and parents of the tree, root first
    int32_t bonus;
  };
  // What decides the launches of a round. Rounds of one shape are one graph: tokens, trees, lengths and page tables are read on the device.
  struct RoundShape {
    int64_t streams, block_len, budget, keys;  // keys: at most, of one stream, in steps (keys_bucket)
    int64_t biases = -1;                       // of the rule that tokens are drawn by; -1: the argmax is taken
    bool operator<(const RoundShape& other) const {
      return std::tie(streams, block_len, budget, keys, biases) < std::tie(other.streams, other.block_len, other.budget, other.keys, other.biases);
    }
    int64_t nodes() const { return budget + 1; }
  };
  // Where the inputs and results of a round stand on the device.
  struct Round {
    RoundShape shape;
    int32_t *roots, *prefixes, *slots, *pages;  // [streams], [streams], [streams * nodes], [streams, pages of `keys`]
    float* logits;                              // [streams, block_len, vocab]
    int32_t* records;  // a stream: tokens, parents, path [nodes] each, then count, length, bonus; after the last one the status word
    int64_t record() const { return 3 * shape.nodes() + 3; }
    int32_t* status() const { return records + shape.streams * record(); }
    Draws draws = {};
  };
  // The accepted rows are committed as far as `outcomes` says; `keep_committed` takes rows away again where the stream ended earlier.
  std::vector<Outcome> tree_round(const std::vector<Draft>& drafts, int64_t block_len, int64_t budget);
  void keep_committed(int32_t sequence, int64_t rows);
  // The three parts of tree_round: what comes from the host, the work of the device (as a graph from the second round of a shape on, with
  // PARITREE_CUDA_GRAPH), and the only wait.
  Round prepare_round(const std::vector<Draft>& drafts, int64_t block_len, int64_t budget);
  void run_round(const Round& round);
  std::vector<Outcome> finish_round(const Round& round, const std::vector<Draft>& drafts);
  std::vector<int32_t> round_targets(int64_t rows);  // the choice of each row of the last round
  Device& device() { return device_; }
  bool graphs() const { return graphs_; }
  void use_graphs(bool use) { graphs_ = use; }
  int64_t replays() const { return replays_; }
  // Choices and rounds draw by this rule, which stays the caller's, until they are told otherwise; null: they take the argmax.
  void draw_by(const Sampling* sampling) { sampling_ = sampling; }
  // The choice of each wanted row; `histories`: of the same rows, asked for while tokens are drawn.
  std::vector<int32_t> choices(const BatchRows& rows, const std::vector<History>& histories = {});

 private:
  static constexpr int64_t kPageRows = 16;
  struct Sequence {
    std::vector<int32_t> pages;
    int64_t committed = 0;
    int64_t pending = 0;
    std::vector<int32_t> parents;    // of the pending rows
    std::vector<int32_t> positions;  // of the committed rows, then of the pending ones
  };

  void load(paritree_weight_fn weight, void* user);
  const float* weight(const std::string& name) const { return weights_.at(name).data(); }
  const float* of_layer(int64_t layer, const char* name) const { return weight(std::to_string(layer) + "." + name); }

  void check_rows(const BatchRows& rows) const;
  Sequence& known(int32_t sequence);
  void resize_pages(Sequence& sequence, int64_t rows);
  void drop_pending(int32_t sequence);
  const int32_t* page_table(int32_t sequence, int64_t spare_rows);
  void ensure_positions(int64_t limit);
  void check_position(int64_t position) const;  // against carried rotary tables
  struct Order;  // batch order <-> order by sequence
  // A forward pass whose inputs are on the device.
  struct Batch {
    Plan plan;
    const int32_t *parents, *wanted;  // [T] within the span, -1: the prefix; [kept_rows] rows whose logits are wanted
    int64_t kept = 0, kept_rows = 0;  // without and with padding
    int64_t columns = 0;              // keys of the longest sequence, its rows of this batch included
    std::vector<int64_t> shape;       // what decides the launches
  };
  // A tap as it waits on the device: of each group of `pitch` numbers those from `begin` on. Groups are rows, or the heads of rows.
  struct TapRecord {
    std::string name;
    int64_t layer;
    bool integers, sorted;  // sorted: rows in the order of the plan, else the wanted rows
    const char* data;
    int64_t rows, groups, pitch, begin, size;  // size -1: the key columns of the batch
    std::vector<int64_t> tail;  // the shape after the rows
    bool narrow = false;        // bfloat16
  };
  Batch plan_host(const BatchRows& rows, Order& order);
  void launch_masks(const Batch& batch);
  void launch_forward(const Batch& batch, const Order& order, const TapSink& taps);
  void run_forward(const Batch& batch, const Order& order, const TapSink& taps);
  template <class T, class Out = T>
  void push_tap(const TapRecord& record, const Order& order, const Batch& batch, const TapSink& taps);

  void launch_round(const Round& round);
  Draws upload_draws(const std::vector<History>& histories, int64_t history_max);
  static void check_draws(int32_t status);

  void make_masks(const Plan& plan);
  const float* run_layers(const Plan& plan, const Order* order, const TapSink& taps);
  void attention(const Plan& plan, const Order* order, int64_t layer, const float* cos, const float* sin, float* residual, const TapSink& taps);
  void feed_forward(int64_t rows, const Order* order, int64_t layer, float* residual, const TapSink& taps);
  void gated(int64_t rows, const Order* order, int64_t layer, const std::string& prefix, int64_t width, const float* x, float* out, const TapSink& taps);
  void matmul(const float* x, int64_t rows, int64_t inner, const float* w, int64_t cols, float* out);
  const float* head(const float* residual, int64_t rows, float** normed);
  template <class Element>
  void tap_parts(const TapSink& taps, int64_t layer, const Element* fresh, const Element* query, int64_t rows, int64_t width);
  template <class T>
  void tap(const TapSink& taps, const Order* order, const char* name, int64_t layer, const T* data, int64_t rows, std::initializer_list<int64_t> shape);

  void check_guards();
  void forget_graphs();
  template <class T>
  T* buffer(const std::string& name, int64_t count);

  int64_t padded_width() const { return (config_.cache_dim() + 1) / 2 * 2; }
  int64_t row_words() const { return narrow_ ? padded_width() / 2 : config_.cache_dim(); }
  template <class Element>
  void attend(const Plan& plan, const Order* order, int64_t layer, const Element* fresh, const Element* query, int64_t width, float* o_latent, const TapSink& taps);

  ModelConfig config_;
  Device device_;
  RopeTable rope_;
  std::map<std::string, Memory<float>> weights_;
  // In bfloat16 mode the cache holds bfloat16: rows of padded_width() elements, two a word. Else float32 rows, rounded to the configuration's format.
  bool narrow_;
  Memory<float> store_;  // [layers, slots, row_words()]
  int64_t slots_;
  std::vector<int32_t> free_;  // pages
  std::map<int32_t, Sequence> sequences_;
  std::map<std::string, Memory<char>> buffers_;  // by the name of what they hold, kept between batches
  int64_t positions_ = 0;                        // rows of the rotary tables on the device
  bool poison_;                                  // fill every buffer with NaN before each use, and put a guard behind it
  std::map<std::string, const char*> guards_;    // behind the buffers of the batch or round, on the device
  bool graphs_;                                  // PARITREE_CUDA_GRAPH
  struct Recorded {
    int64_t runs = 0;  // before it was recorded; the first one sizes the buffers
    GraphPointer graph;
    std::vector<TapRecord> taps;
    std::map<std::string, const char*> guards;
  };
  std::map<RoundShape, Recorded> rounds_;  // these two are dropped whenever memory moves
  std::map<std::pair<std::vector<int64_t>, std::vector<std::string>>, Recorded> forwards_;  // by shape and taps
  std::vector<TapRecord> taps_;  // of the last forward pass
  std::vector<Mask> masks_;      // of the batch that is launched, one a span
  int64_t replays_ = 0;
  const Sampling* sampling_ = nullptr;
};

DrawRule draw_rule(const Sampling& sampling);

void generate(DeviceSession& session, const paritree_generate_args& args);

}  // namespace paritree::cuda

struct paritree_session {  // the handle of the C ABI
  paritree::cuda::DeviceSession session;
};
