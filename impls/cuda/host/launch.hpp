// The device as the native engine sees it: memory, copies, and every kernel as a function. launch.cu implements it on the CUDA runtime;
// compiled with the emulator, the same file runs the same kernels on the CPU.
//
// All work is in order on one stream a session; nothing here waits except `synchronise` and the copies to the host. Errors of the runtime
// are Error(FAILED) with the call that showed them. Dimension letters as in spec/ops.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#include "../../native/common.hpp"

namespace paritree::cuda {

enum class Precision { float32, tf32, bf16 };  // of the operands of matrix products

struct Pages {
  const int32_t* table = nullptr;  // on the device; null: contiguous
  int size = 1;
};

// Whether a switch of the environment is on.
inline bool is_set(const char* name) {
  const char* word = std::getenv(name);
  return word != nullptr && *word != '\0' && *word != '0';
}

#ifdef PARITREE_PLANTED
// Bugs of impls/cuda/plants.py, one chosen by name.
inline bool planted(const char* name) {
  const char* chosen = std::getenv("PARITREE_CUDA_PLANT");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}
#else
constexpr bool planted(const char*) { return false; }
#endif

// Work of the stream that was recorded once: launches, fills and copies on the device with the arguments that they had. What the arguments
// point to is read at each replay.
class Graph;
struct GraphDelete {
  void operator()(Graph* graph) const;
};
using GraphPointer = std::unique_ptr<Graph, GraphDelete>;

constexpr int64_t kDraftCounters = 4098;  // words of a depth

// What draws follow, on the device (sampling.cuh).
struct DrawRule {
  double temperature, top_p, min_p, repetition, presence, frequency;
  int64_t top_k;
  uint64_t seed;
  int64_t ties_all, bias_count;
};
struct Draws {
  const void* rule;  // a DrawRule
  const int32_t* bias_tokens;
  const double* biases;
  const int32_t* history;  // of all streams
  const int32_t* streams;  // [streams][4]: first token in `history`, length, length of the prompt, number of the request
};
// The trees whose nodes the rows are: those of stream s begin at s * stride. Null parents: a row a stream, right behind its history.
struct DrawnTree {
  const int32_t *tokens, *parents, *count;
  int64_t nodes, stride;
};

// One stream, its cuBLAS handle where there is cuBLAS, and the properties of the device. Not copied, not shared by threads.
class Device {
 public:
  explicit Device(Precision precision);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void* allocate(int64_t bytes);
  void release(void* memory);
  void copy_in(void* target, const void* host, int64_t bytes);   // the source may be reused on return
  void copy_out(void* host, const void* source, int64_t bytes);  // waits
  void fill(void* target, int byte, int64_t bytes);
  void fill_rows(void* target, int64_t pitch_bytes, int byte, int64_t width_bytes, int64_t rows);
  void copy(void* target, const void* source, int64_t bytes);  // on the device
  void copy_rows(void* target, const void* source, int64_t pitch_bytes, int64_t width_bytes, int64_t rows);
  void synchronise();
  void stall();  // PARITREE_CUDA_DELAY, a hazard: what follows comes late, so that nobody may rely on its being done

  // Records what `body` asks for instead of running it. Inside, memory may not be taken, nothing may come from or go to the host, and nothing waits.
  GraphPointer captured(const std::function<void()>& body);
  void replay(const Graph& graph);
  // Microseconds of the device between two calls; `end_timing` waits.
  void begin_timing();
  double end_timing();

  void gather(const float* table, const int32_t* ids, float* out, int64_t rows, int64_t width);
  void scatter(const float* rows, const int32_t* slots, float* out, int64_t count, int64_t width);
  void add(const float* a, const float* b, float* out, int64_t count);
  void swiglu(const float* gate, const float* up, float* out, int64_t count);
  void rms_norm(const float* x, int64_t x_row, const float* gain, float eps, float* out, int64_t out_row, int64_t rows, int64_t width);
  void rope(const float* x, int64_t x_row, int64_t x_head, const float* cos, const float* sin, float* out, int64_t out_row, int64_t out_head, int64_t rows,
            int64_t heads, int64_t dim, bool half_layout);
  // c[z] = a[z] @ b[z], row strides and batch strides in elements; `transposed`: b[z] is [cols, inner].
  struct Gemm {
    const float* a;
    int64_t a_row, a_batch;
    const float* b;
    int64_t b_row, b_batch;
    float* c;
    int64_t c_row, c_batch, rows, cols, inner, batches;
    bool transposed;
  };
  void gemm(const Gemm& gemm);
  void router_scores(const float* logits, float* out, int64_t rows, int64_t experts, bool over_all);
  struct Route {
    int64_t experts, top_k, groups, top_groups;
    bool group_score_max, norm_top_k;
    float routed_scale, denominator_eps;
    bool group_fill_zero;
    float denominator_clamp;
  };
  void route(const float* scores, const float* bias, int32_t* ids, float* weights, int64_t rows, const Route& rule);
  void moe_group(const int32_t* ids, int32_t* starts, int32_t* order, int64_t pairs, int64_t experts);
  // One product of the rows of each expert, or two of the same rows; second_b may be null.
  void matmul_grouped(const float* a, int64_t divisor, const float* b, const float* second_b, const int32_t* starts, const int32_t* order, float* out,
                      float* second_out, int64_t pairs, int64_t experts, int64_t cols, int64_t inner);
  void combine(const float* weights, const float* experts, const float* shared, float* out, int64_t rows, int64_t chosen, int64_t width);
  template <class Element>
  struct AttentionOf {
    const Element* query;  // [rows, heads, width]
    const Element* cache;  // slots of one layer
    Pages pages;
    const uint32_t* bits;
    int64_t words, rows, heads, kv_rank, width, prefix_len, keys;  // the largest, where prefix_at is given
    const int32_t* prefix_at;  // on the device: the length of the prefix; null: prefix_len
    float scale;
    float* out;  // [rows, heads, kv_rank]
    const uint32_t* seen = nullptr;  // bits of the keys that some row sees; null: all, every slot holds numbers
  };
  using Attention = AttentionOf<float>;
  int64_t attention_workspace(int64_t rows, int64_t heads, int64_t kv_rank, int64_t width, int64_t keys) const;  // floats
  void tree_attention(const Attention& attention, float* workspace);
  void argmax(const float* logits, int32_t* ids, uint64_t* workspace, int64_t rows, int64_t vocab);  // workspace: [rows, 64]
  // The token drawn from each row; `workspace`: sample_workspace bytes. Row r is node r % nodes of stream r / nodes.
  static int64_t sample_workspace(int64_t rows, int64_t vocab);
  void sample(const float* logits, const Draws& draws, const DrawnTree& tree, int32_t* ids, int32_t* status, void* workspace, int64_t rows, int64_t vocab);
  // Workspaces of draft_table: counters [depths * kDraftCounters] words, parts [depths * ceil(vocab / 4096) * 2] floats, candidates [depths * vocab].
  void draft_table(const float* logits, int32_t* ids, float* log_probs, int32_t* status, uint32_t* counters, float* parts, uint64_t* candidates,
                   int64_t depths, int64_t vocab, int64_t width);
  void best_first_tree(const int32_t* ids, const float* log_probs, int64_t depths, int64_t width, int64_t budget, const int32_t* root_at, int32_t* tokens,
                       int32_t* parents, int32_t* node_depths, int32_t* count, int32_t* status);
  // `prefix_at`, `root_at`: on the device. tree_mask and compact take prefix_len where prefix_at is null.
  void tree_mask(const int32_t* parents, const int32_t* count, int64_t rows, int64_t prefix_len, const int32_t* prefix_at, int32_t* positions, uint32_t* bits);
  void accept(const int32_t* tokens, const int32_t* parents, const int32_t* target, const int32_t* count, int64_t rows, int32_t* path, int32_t* length,
              int32_t* bonus, int32_t* status);
  void compact(float* store, int64_t layer_stride, Pages pages, const int32_t* path, const int32_t* kept, int64_t prefix_len, const int32_t* prefix_at,
               int64_t width, int64_t layers);

  // ---- launch_operations.inl
  // scale * q . key: [query_rows, keys]; our own products, float32 in every precision.
  void scores(const float* q, const float* keys, float* out, int64_t query_rows, int64_t width, int64_t key_count, float scale);
  void softmax(const float* scores, const uint8_t* visible, float* out, int64_t rows, int64_t heads, int64_t keys);
  void o_latent(const float* probs, const float* latent, float* out, int64_t query_rows, int64_t keys, int64_t rank);
  void matmul_int4(const float* x, const int32_t* packed, const float* scales, float* out, int64_t rows, int64_t cols, int64_t inner);
  void pack_mask(const uint8_t* visible, uint32_t* bits, uint32_t* seen, int64_t rows, int64_t keys);
  // To bfloat16; columns from `width` to out_row become zero.
  void cast_rows(const float* x, int64_t x_row, uint16_t* out, int64_t out_row, int64_t rows, int64_t width);
  // Of one tree, whose structure is checked: complaints go to the status word.
  void tree_mask_bytes(const int32_t* parents, int64_t rows, int64_t prefix_len, int32_t* positions, uint32_t* bits, uint8_t* visible, int32_t* status);
  void accept_checked(const int32_t* tokens, const int32_t* parents, const int32_t* target, int64_t rows, int32_t* path, int32_t* length, int32_t* bonus,
                      int32_t* status);
  void add_bias(float* x, const float* bias, int64_t rows, int64_t width);
  void round_cache(float* x, int64_t count, bool half);  // in place, to float16 or bfloat16
  // Bits over prefix and own keys of a sliding window: bits [rows, words], seen [words]. key_positions null: key s is at position s.
  void window_mask(const uint32_t* tree_bits, int64_t tree_words, const int32_t* key_positions, const int32_t* positions, int64_t prefix_len,
                   const int32_t* prefix_at, int64_t rows, int64_t window, uint32_t* bits, int64_t words, uint32_t* seen);
  using NarrowAttention = AttentionOf<uint16_t>;  // bfloat16
  int64_t narrow_attention_workspace(int64_t rows, int64_t heads, int64_t kv_rank, int64_t width, int64_t keys) const;  // floats
  void tree_attention(const NarrowAttention& attention, float* workspace);
  // Whether tree_attention of these sizes is the form for any sizes, whose scores can be shown as they are: out [rows, heads, out_row].
  static bool shows_scores(int64_t kv_rank, int64_t width);
  void attention_scores(const Attention& attention, float* out, int64_t out_row);
  void attention_scores(const NarrowAttention& attention, float* out, int64_t out_row);
  Precision precision() const { return precision_; }

 private:
  static int64_t shared_bytes_of_a_block();
  void refuse_in_capture(const char* what) const;

  void* stream_ = nullptr;
  void* blas_ = nullptr;
  void* blas_workspace_ = nullptr;
  void* times_[2] = {nullptr, nullptr};  // events
  bool capturing_ = false;
  bool late_ = false;  // PARITREE_CUDA_DELAY
  int processors_ = 1;
  Precision precision_;
};

}  // namespace paritree::cuda
