// Launches of the kernels, on the CUDA runtime or, compiled with the emulator, on the CPU. See launch.hpp.
#ifndef PARITREE_EMULATOR
#include <cuda_runtime.h>

#include "../kernels.cuh"
#endif

#include "launch.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#ifndef PARITREE_NO_CUBLAS
#include "cublas_gemm.hpp"
#endif

namespace paritree::cuda {
namespace {

constexpr int64_t kWorkspaceMax = int64_t{64} << 20;  // bytes, of one attention call
constexpr int64_t kTiledRows = 64, kSplitRows = split_tile::ROWS, kTiledKeys = 32;
constexpr int kFewRows = 8, kGroupedRows = 32, kArgmaxSplits = 64;
constexpr int64_t kBudgetMax = 1024, kDepthMax = 20, kSelectPaths = 1024, kSampleBlocks = 4;
constexpr int64_t kAnyBlocks = 4;  // a multiprocessor
constexpr int64_t kSharedPortable = 101376;  // bytes a block on sm_120

bool is_tiled(int64_t kv_rank, int64_t width) { return kv_rank == tiled_f32::RANK && width == tiled_f32::WIDTH; }

int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

unsigned round_up(int64_t count, int64_t unit) { return static_cast<unsigned>(std::max<int64_t>(1, parts(count, unit)) * unit); }

int narrow(int64_t value) {
  if (value < 0 || value > 0x7fffffff) unsupported("a size is ", value, ", but these kernels count in 31 bits");
  return static_cast<int>(value);
}

struct Grid {
  int64_t x, y = 1, z = 1;
};

#ifdef PARITREE_EMULATOR

// A capture keeps the arguments by value and runs nothing, as on a GPU: what is stale there is stale here.
thread_local std::vector<std::function<void()>>* recording = nullptr;

// PARITREE_CUDA_DELAY: work is done when somebody waits for it, as late as a stream may be. What the host reads or overwrites too early shows.
thread_local bool is_late = false;
thread_local std::vector<std::function<void()>> waiting;

void run_or_record(std::function<void()> work) {
  if (recording != nullptr) recording->push_back(std::move(work));
  else if (is_late) waiting.push_back(std::move(work));
  else work();
}

void do_waiting() {
  std::vector<std::function<void()>> all;
  all.swap(waiting);
  for (const std::function<void()>& work : all) work();
}

template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), Grid grid, unsigned threads, int64_t shared_bytes, void*, Args... args) {
  run_or_record([=] {
    const char* problem = paritree_emulator::run(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z), threads,
                                                 static_cast<unsigned>(shared_bytes), [&] { kernel(static_cast<Params>(args)...); });
    if (problem != nullptr) failed(name, ": ", problem);
  });
}

#else

constexpr long long kDelayCycles = 400000;  // about 0.2 ms: longer than most batches of the tests

__global__ void delay_cycles(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) failed(what, ": ", cudaGetErrorString(status));
}

template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), Grid grid, unsigned threads, int64_t shared_bytes, void* stream, Args... args) {
  if (shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), name);
  const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
  kernel<<<blocks, threads, static_cast<std::size_t>(shared_bytes), static_cast<cudaStream_t>(stream)>>>(static_cast<Params>(args)...);
  check(cudaGetLastError(), name);
}

#endif

#define LAUNCH(kernel, grid, threads, shared_bytes, ...) launch(#kernel, kernel, Grid grid, threads, shared_bytes, stream_, __VA_ARGS__)

class Capturing {
 public:
  explicit Capturing(bool& flag) : flag_(flag) { flag_ = true; }
  ~Capturing() { flag_ = false; }

 private:
  bool& flag_;
};

}  // namespace

void Device::refuse_in_capture(const char* what) const {
  if (capturing_) failed(what, " was asked for while a graph is captured");
}

// ---- memory ----------------------------------------------------------------------------------------------------------

#ifdef PARITREE_EMULATOR

Device::Device(Precision precision) : processors_(4), precision_(precision) {
  do_waiting();
  late_ = is_late = is_set("PARITREE_CUDA_DELAY");
}
Device::~Device() = default;
void* Device::allocate(int64_t bytes) {
  refuse_in_capture("memory");
  void* memory = std::aligned_alloc(256, round_up(bytes, 256));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0xff, round_up(bytes, 256));
  return memory;
}
void Device::release(void* memory) {
  try {
    do_waiting();  // as cudaFree does
  } catch (const std::exception&) {  // nobody is left to hear of it
    waiting.clear();
  }
  std::free(memory);
}
void Device::copy_in(void* target, const void* host, int64_t bytes) {
  refuse_in_capture("a copy from the host");
  if (bytes == 0) return;
  if (!is_late) {
    std::memcpy(target, host, static_cast<std::size_t>(bytes));
    return;
  }
  const char* begin = static_cast<const char*>(host);
  waiting.push_back([target, staged = std::vector<char>(begin, begin + bytes)] { std::memcpy(target, staged.data(), staged.size()); });
}
void Device::copy_out(void* host, const void* source, int64_t bytes) {
  refuse_in_capture("a copy to the host");
  if (!planted("early-read")) do_waiting();
  if (bytes) std::memcpy(host, source, static_cast<std::size_t>(bytes));
}
void Device::fill(void* target, int byte, int64_t bytes) {
  run_or_record([=] { std::memset(target, byte, static_cast<std::size_t>(bytes)); });
}
void Device::fill_rows(void* target, int64_t pitch_bytes, int byte, int64_t width_bytes, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) fill(static_cast<char*>(target) + row * pitch_bytes, byte, width_bytes);
}
void Device::copy(void* target, const void* source, int64_t bytes) {
  run_or_record([=] { std::memmove(target, source, static_cast<std::size_t>(bytes)); });
}
void Device::copy_rows(void* target, const void* source, int64_t pitch_bytes, int64_t width_bytes, int64_t rows) {
  run_or_record([=] {
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(static_cast<char*>(target) + row * pitch_bytes, static_cast<const char*>(source) + row * pitch_bytes, static_cast<std::size_t>(width_bytes));
  });
}
void Device::synchronise() {
  refuse_in_capture("a wait");
  do_waiting();
}
void Device::stall() {}

class Graph {
 public:
  std::vector<std::function<void()>> work;
};
GraphPointer Device::captured(const std::function<void()>& body) {
  GraphPointer graph(new Graph);
  const Capturing mark(capturing_);
  recording = &graph->work;
  try {
    body();
  } catch (...) {
    recording = nullptr;
    throw;
  }
  recording = nullptr;
  return graph;
}
void Device::replay(const Graph& graph) {
  for (const std::function<void()>& work : graph.work) run_or_record(work);
}
namespace {
std::chrono::steady_clock::time_point emulated_start;  // of one measurement at a time
}
void Device::begin_timing() { emulated_start = std::chrono::steady_clock::now(); }
double Device::end_timing() {
  do_waiting();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - emulated_start).count();
}

#else

Device::Device(Precision precision) : precision_(precision) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  late_ = is_set("PARITREE_CUDA_DELAY");
  stream_ = stream;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
#ifndef PARITREE_NO_CUBLAS
  blas_workspace_ = allocate(kCublasWorkspace);
  blas_ = cublas_open(stream_, blas_workspace_);
#endif
}
Device::~Device() {
#ifndef PARITREE_NO_CUBLAS
  if (blas_ != nullptr) cublas_close(blas_);
  if (blas_workspace_ != nullptr) cudaFree(blas_workspace_);
#endif
  for (void* time : times_)
    if (time != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(time));
  cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}
void* Device::allocate(int64_t bytes) {
  refuse_in_capture("memory");
  void* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<std::size_t>(std::max<int64_t>(bytes, 256))), "cudaMalloc");
  return memory;
}
void Device::release(void* memory) { cudaFree(memory); }
void Device::copy_in(void* target, const void* host, int64_t bytes) {
  refuse_in_capture("a copy from the host");
  stall();
  // pageable memory: the runtime has staged the source when the call returns
  if (bytes) check(cudaMemcpyAsync(target, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream_)), "copy to the device");
}
void Device::copy_out(void* host, const void* source, int64_t bytes) {
  refuse_in_capture("a copy to the host");
  if (planted("early-read")) {  // on the default stream, for which this one does not wait
    check(cudaMemcpy(host, source, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost), "copy to the host");
    return;
  }
  if (bytes) check(cudaMemcpyAsync(host, source, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream_)), "copy to the host");
  synchronise();
}
void Device::fill(void* target, int byte, int64_t bytes) {
  if (bytes) check(cudaMemsetAsync(target, byte, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream_)), "cudaMemsetAsync");
}
void Device::fill_rows(void* target, int64_t pitch_bytes, int byte, int64_t width_bytes, int64_t rows) {
  check(cudaMemset2DAsync(target, static_cast<std::size_t>(pitch_bytes), byte, static_cast<std::size_t>(width_bytes), static_cast<std::size_t>(rows),
                          static_cast<cudaStream_t>(stream_)),
        "cudaMemset2DAsync");
}
void Device::copy(void* target, const void* source, int64_t bytes) {
  if (bytes) check(cudaMemcpyAsync(target, source, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream_)), "copy on the device");
}
void Device::copy_rows(void* target, const void* source, int64_t pitch_bytes, int64_t width_bytes, int64_t rows) {
  check(cudaMemcpy2DAsync(target, static_cast<std::size_t>(pitch_bytes), source, static_cast<std::size_t>(pitch_bytes), static_cast<std::size_t>(width_bytes),
                          static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream_)),
        "cudaMemcpy2DAsync");
}
void Device::synchronise() {
  refuse_in_capture("a wait");
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream_)), "the work of the stream");
}

class Graph {
 public:
  cudaGraphExec_t executable = nullptr;
  ~Graph() {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
  }
};
GraphPointer Device::captured(const std::function<void()>& body) {
  GraphPointer graph(new Graph);
  const Capturing mark(capturing_);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  cudaGraph_t recorded = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    body();
  } catch (...) {
    cudaStreamEndCapture(stream, &recorded);
    if (recorded != nullptr) cudaGraphDestroy(recorded);
    throw;
  }
  check(cudaStreamEndCapture(stream, &recorded), "cudaStreamEndCapture");
  const cudaError_t status = cudaGraphInstantiate(&graph->executable, recorded, 0);
  cudaGraphDestroy(recorded);
  check(status, "cudaGraphInstantiate");
  return graph;
}
void Device::stall() {
  if (late_) {
    delay_cycles<<<1, 1, 0, static_cast<cudaStream_t>(stream_)>>>(kDelayCycles);
    check(cudaGetLastError(), "delay_cycles");
  }
}
void Device::replay(const Graph& graph) { check(cudaGraphLaunch(graph.executable, static_cast<cudaStream_t>(stream_)), "cudaGraphLaunch"); }
void Device::begin_timing() {
  for (void*& time : times_) {
    cudaEvent_t event = nullptr;
    if (time == nullptr) check(cudaEventCreate(&event), "cudaEventCreate");
    if (time == nullptr) time = event;
  }
  check(cudaEventRecord(static_cast<cudaEvent_t>(times_[0]), static_cast<cudaStream_t>(stream_)), "cudaEventRecord");
}
double Device::end_timing() {
  float milliseconds = 0.0f;
  check(cudaEventRecord(static_cast<cudaEvent_t>(times_[1]), static_cast<cudaStream_t>(stream_)), "cudaEventRecord");
  synchronise();
  check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(times_[0]), static_cast<cudaEvent_t>(times_[1])), "cudaEventElapsedTime");
  return 1e3 * milliseconds;
}

#endif

void GraphDelete::operator()(Graph* graph) const { delete graph; }

// ---- kernels ---------------------------------------------------------------------------------------------------------

void Device::gather(const float* table, const int32_t* ids, float* out, int64_t rows, int64_t width) {
  if (rows) LAUNCH(embed_f32, {rows}, 128, 0, table, ids, out, narrow(width));
}

void Device::scatter(const float* rows, const int32_t* slots, float* out, int64_t count, int64_t width) {
  if (count) LAUNCH(scatter_f32, {count}, 128, 0, rows, slots, out, narrow(width));
}

void Device::add(const float* a, const float* b, float* out, int64_t count) {
  if (count) LAUNCH(add_f32, {std::min<int64_t>(parts(count, 256), 32 * processors_)}, 256, 0, a, b, out, static_cast<long long>(count));
}

void Device::swiglu(const float* gate, const float* up, float* out, int64_t count) {
  if (count) LAUNCH(swiglu_f32, {std::min<int64_t>(parts(count, 256), 32 * processors_)}, 256, 0, gate, up, out, static_cast<long long>(count));
}

void Device::rms_norm(const float* x, int64_t x_row, const float* gain, float eps, float* out, int64_t out_row, int64_t rows, int64_t width) {
  const unsigned threads = std::min(256u, round_up(width, 32));
  if (rows) LAUNCH(rms_norm_f32, {rows}, threads, 0, x, narrow(x_row), gain, eps, out, narrow(out_row), narrow(width));
}

void Device::rope(const float* x, int64_t x_row, int64_t x_head, const float* cos, const float* sin, float* out, int64_t out_row, int64_t out_head,
                  int64_t rows, int64_t heads, int64_t dim, bool half_layout) {
  const int64_t count = rows * heads * (dim / 2);
  if (count)
    LAUNCH(rope_f32, {std::min<int64_t>(parts(count, 256), 32 * processors_)}, 256, 0, x, narrow(x_row), narrow(x_head), cos, sin, out, narrow(out_row),
           narrow(out_head), narrow(rows), narrow(heads), narrow(dim / 2), half_layout ? 1 : 0);
}

void Device::gemm(const Gemm& g) {
  if (g.rows == 0 || g.cols == 0 || g.batches == 0) return;
  if (g.inner == 0) {  // cuBLAS refuses strides of 0
    for (int64_t z = 0; z < g.batches; ++z) fill_rows(g.c + z * g.c_batch, g.c_row * 4, 0, g.cols * 4, g.rows);
    return;
  }
#ifndef PARITREE_NO_CUBLAS
  if (blas_ != nullptr) return cublas_gemm(blas_, g, precision_);
#endif
  if (precision_ != Precision::float32) {
    LAUNCH(matmul_rounded_f32, (Grid{parts(g.cols, 128), g.rows, g.batches}), 128, 0, g.a, narrow(g.a_row), static_cast<long long>(g.a_batch), g.b, narrow(g.b_row),
           static_cast<long long>(g.b_batch), g.c, narrow(g.c_row), static_cast<long long>(g.c_batch), narrow(g.cols), narrow(g.inner), g.transposed ? 1 : 0,
           precision_ == Precision::tf32 ? 13 : 16);
    return;
  }
  const auto run = [&](const char* name, auto* kernel, Grid grid) {
    launch(name, kernel, grid, 256u, 0, stream_, g.a, narrow(g.a_row), static_cast<long long>(g.a_batch), g.b, narrow(g.b_row),
           static_cast<long long>(g.b_batch), g.c, narrow(g.c_row), static_cast<long long>(g.c_batch), narrow(g.rows), narrow(g.cols), narrow(g.inner), 1.0f);
  };
  if (g.transposed) run("matmul_tiled_nt_f32", matmul_tiled_nt_f32, {parts(g.cols, 64), parts(g.rows, 64), g.batches});
  else if (g.rows <= kFewRows) run("matmul_rows_f32", matmul_rows_f32, {parts(g.cols, 32), 1, g.batches});
  else run("matmul_tiled_f32", matmul_tiled_f32, {parts(g.cols, 64), parts(g.rows, 64), g.batches});
}

void Device::router_scores(const float* logits, float* out, int64_t rows, int64_t experts, bool over_all) {
  if (rows) LAUNCH(router_scores_f32, {rows}, 128, 0, logits, out, narrow(experts), over_all ? 1 : 0);
}

void Device::route(const float* scores, const float* bias, int32_t* ids, float* weights, int64_t rows, const Route& r) {
  if (rows)
    LAUNCH(route_f32, {rows}, 32, 4 * (r.experts + r.groups + r.top_k), scores, bias, ids, weights, narrow(r.experts), narrow(r.top_k), narrow(r.groups),
           narrow(r.top_groups), r.group_score_max ? 1 : 0, r.norm_top_k ? 1 : 0, r.routed_scale, r.denominator_eps, r.group_fill_zero ? 1 : 0,
           r.denominator_clamp);
}

void Device::moe_group(const int32_t* ids, int32_t* starts, int32_t* order, int64_t pairs, int64_t experts) {
  if (pairs) LAUNCH(::moe_group, {1}, std::min(1024u, round_up(32 * experts, 32)), 4 * (experts + 1), ids, starts, order, narrow(pairs), narrow(experts));
}

void Device::matmul_grouped(const float* a, int64_t divisor, const float* b, const float* second_b, const int32_t* starts, const int32_t* order,
                                 float* out, float* second_out, int64_t pairs, int64_t experts, int64_t cols, int64_t inner) {
  if (pairs == 0) return;
  if (pairs <= kGroupedRows * experts) {  // the weights of an expert are read for a few rows each time: as often as from the tiles at most
    const auto run = [&](const char* name, auto* kernel, int64_t rows, int64_t columns) {
      const int64_t tiles = std::min(pairs, experts) + pairs / rows;
      launch(name, kernel, Grid{parts(cols, columns), tiles, second_b != nullptr ? 2 : 1}, 256u, 0, stream_, a, narrow(divisor), b, second_b, starts, order, out,
             second_out, narrow(experts), narrow(cols), narrow(inner));
    };
    if (pairs <= experts) run("matmul_grouped_rows2_f32", matmul_grouped_rows2_f32, 2, 32);
    else if (pairs <= 8 * experts) run("matmul_grouped_rows8_f32", matmul_grouped_rows8_f32, 8, 64);
    else run("matmul_grouped_rows16_f32", matmul_grouped_rows16_f32, 16, 64);
    return;
  }
  const int64_t tiles = std::min(pairs, experts) + pairs / kGroupedRows;
  for (const auto& [weights, target] : {std::pair{b, out}, std::pair{second_b, second_out}})
    if (weights != nullptr)
      LAUNCH(matmul_grouped_f32, (Grid{parts(cols, 64), tiles}), 256, 0, a, narrow(divisor), weights, starts, order, target, narrow(experts), narrow(cols),
             narrow(inner));
}

void Device::combine(const float* weights, const float* experts, const float* shared, float* out, int64_t rows, int64_t chosen, int64_t width) {
  if (rows) LAUNCH(combine_f32, {rows}, 128, 0, weights, experts, shared, out, narrow(chosen), narrow(width));
}

namespace {
// (parts of the keys, keys a part): enough blocks for the device, at least two tiles a part, workspace within kWorkspaceMax
std::pair<int64_t, int64_t> key_splits(int64_t query_rows, int64_t keys, int processors) {
  const int64_t wanted = std::max<int64_t>(1, processors / parts(query_rows, kSplitRows));
  const int64_t room = std::max<int64_t>(1, kWorkspaceMax / (4 * query_rows * (tiled_f32::RANK + 2)));
  const int64_t splits = std::max<int64_t>(1, std::min({wanted, room, parts(keys, 2 * kTiledKeys)}));
  const int64_t each = round_up(parts(keys, splits), kTiledKeys);
  return {std::max<int64_t>(1, parts(keys, each)), each};
}

// The same for sizes that have no tiled form: 128 keys a part or more, up to some blocks for each multiprocessor.
std::pair<int64_t, int64_t> any_splits(int64_t query_rows, int64_t kv_rank, int64_t keys, int processors) {
  const int64_t wanted = std::max<int64_t>(1, kAnyBlocks * processors / query_rows), room = std::max<int64_t>(1, kWorkspaceMax / (4 * query_rows * (kv_rank + 2)));
  const int64_t each = round_up(parts(keys, std::min(wanted, room)), any_size::THREADS);
  return {std::max<int64_t>(1, parts(keys, each)), each};
}

template <class Kernel, class Call>
void launch_any(const char* name, Kernel* kernel, const Call& a, float* workspace, int processors, void* stream) {
  const int64_t query_rows = a.rows * a.heads;
  const auto [splits, each] = any_splits(query_rows, a.kv_rank, a.keys, processors);
  float* part_out = splits > 1 ? workspace : nullptr;
  float* part_stat = splits > 1 ? workspace + splits * query_rows * a.kv_rank : nullptr;
  int64_t columns = 1;
  while (columns < a.kv_rank && columns < any_size::THREADS) columns *= 2;
  const int64_t floats = 3 * any_size::THREADS + a.width + 4 + any_size::THREADS / columns * a.kv_rank;
  launch(name, kernel, Grid{query_rows, splits}, any_size::THREADS, 4 * floats, stream, a.query, a.cache, a.pages.table, a.pages.size, a.bits, narrow(a.words),
         narrow(a.heads), narrow(a.kv_rank), narrow(a.width), narrow(a.prefix_len), narrow(a.keys), narrow(each), a.scale, a.out, part_out, part_stat, a.prefix_at);
  if (splits > 1)
    launch("tree_attention_any_merge", tree_attention_any_merge, Grid{query_rows}, 128u, 0, stream, part_out, part_stat, narrow(splits), narrow(query_rows),
           narrow(a.kv_rank), a.out);
}
}  // namespace

int64_t Device::attention_workspace(int64_t rows, int64_t heads, int64_t kv_rank, int64_t width, int64_t keys) const {
  if (rows == 0) return 0;
  const int64_t splits = (is_tiled(kv_rank, width) ? key_splits(rows * heads, keys, processors_) : any_splits(rows * heads, kv_rank, keys, processors_)).first;
  return splits > 1 ? splits * rows * heads * (kv_rank + 2) : 0;
}

void Device::tree_attention(const Attention& a, float* workspace) {
  if (a.rows == 0) return;
  if (!is_tiled(a.kv_rank, a.width)) {
    launch_any("tree_attention_any_f32", tree_attention_any_f32, a, workspace, processors_, stream_);
    return;
  }
  const int64_t query_rows = a.rows * a.heads;
  const auto [splits, each] = key_splits(query_rows, a.keys, processors_);
  float* part_out = splits > 1 ? workspace : nullptr;
  float* part_stat = splits > 1 ? workspace + splits * query_rows * a.kv_rank : nullptr;
  const auto run = [&, splits = splits, each = each](const char* name, auto* kernel, unsigned threads, int64_t shared_bytes) {
    launch(name, kernel, Grid{parts(query_rows, kSplitRows), splits}, threads, shared_bytes, stream_, a.query, a.cache, a.pages.table, a.pages.size, a.bits,
           narrow(a.words), a.seen, narrow(a.heads), narrow(query_rows), narrow(a.prefix_len), narrow(a.keys), narrow(each), a.scale, a.out, part_out, part_stat,
           a.prefix_at);
  };
  using split_tile::Large, split_tile::Small;
  if (shared_bytes_of_a_block() >= Large::BYTES) run("tree_attention_split32_f32", tree_attention_split32_f32, Large::THREADS, Large::BYTES);
  else run("tree_attention_split16_f32", tree_attention_split16_f32, Small::THREADS, Small::BYTES);
  if (splits > 1)
    LAUNCH(tree_attention_merge_f32, {query_rows}, 128, 0, part_out, part_stat, narrow(splits), narrow(query_rows), narrow(a.kv_rank), a.out);
}

void Device::argmax(const float* logits, int32_t* ids, uint64_t* workspace, int64_t rows, int64_t vocab) {
  if (rows == 0) return;
  const int64_t splits = std::min<int64_t>(kArgmaxSplits, parts(vocab, 4096));
  if (splits < 2) {
    LAUNCH(argmax_f32, {rows}, 256, 0, logits, ids, narrow(vocab));
    return;
  }
  unsigned long long* partial = reinterpret_cast<unsigned long long*>(workspace);
  LAUNCH(argmax_split_f32, (Grid{rows, splits}), 256, 0, logits, partial, narrow(vocab));
  LAUNCH(argmax_join, {rows}, 32, 0, partial, ids, narrow(splits));
}

int64_t Device::sample_workspace(int64_t rows, int64_t vocab) { return rows * parts(vocab, sampling::CHUNK) * static_cast<int64_t>(sizeof(sampling::Part)); }

void Device::sample(const float* logits, const Draws& draws, const DrawnTree& tree, int32_t* ids, int32_t* status, void* workspace, int64_t rows, int64_t vocab) {
  static_assert(sizeof(DrawRule) == sizeof(sampling::Rule), "the rule of sampling.cuh");
  if (rows == 0) return;
  const int64_t chunks = parts(vocab, sampling::CHUNK), each = parts(chunks * rows, kSampleBlocks * processors_), blocks = parts(chunks, each);
  LAUNCH(sample_race, (Grid{blocks, rows}), sampling::RACE_THREADS, 0, logits, draws.rule, draws.bias_tokens, draws.biases, draws.history, draws.streams,
         tree.tokens, tree.parents, tree.count, narrow(tree.nodes), narrow(tree.stride), narrow(vocab), workspace);
  LAUNCH(sample_finish, {rows}, sampling::THREADS, static_cast<int64_t>(sizeof(sampling::Scratch)), logits, draws.rule, draws.bias_tokens, draws.biases,
         draws.history, draws.streams, tree.tokens, tree.parents, tree.count, narrow(tree.nodes), narrow(tree.stride), narrow(vocab), workspace, narrow(blocks), ids,
         status);
}

void Device::draft_table(const float* logits, int32_t* ids, float* log_probs, int32_t* status, uint32_t* counters, float* parts_of, uint64_t* candidates,
                         int64_t depths, int64_t vocab, int64_t width) {
  if (width > kBudgetMax) unsupported("T5: ", width, " candidates a depth are asked for, but these kernels hold ", kBudgetMax);
  if (depths == 0 || vocab == 0) return;
  const int64_t blocks = parts(vocab, draft::ONCE_CHUNK);
  fill(counters, 0, 4 * depths * kDraftCounters);
  LAUNCH(draft_table_once, (Grid{blocks, depths}), draft::ONCE_THREADS, 8 * draft::SORT_MAX, logits, ids, log_probs, parts_of,
         reinterpret_cast<unsigned long long*>(candidates), counters, status, narrow(vocab), narrow(width), vocab % 4 == 0 ? 1 : 0);
}

void Device::best_first_tree(const int32_t* ids, const float* log_probs, int64_t depths, int64_t width, int64_t budget, const int32_t* root_at, int32_t* tokens,
                             int32_t* parents, int32_t* node_depths, int32_t* count, int32_t* status) {
  if (budget > kBudgetMax || depths > kDepthMax)
    unsupported("T5: budget ", budget, " and ", depths, " depths are asked for, but these kernels hold ", kBudgetMax, " and ", kDepthMax);
  int64_t paths = kSelectPaths;
  while (paths < 2 * budget) paths *= 2;
  const int64_t frontier = int64_t{72} * round_up(budget + 1, 32), table = 4 * depths * width;
  const bool near = 17 * paths + table <= kSharedPortable - 1024;  // the kernel's own variables: below 1 KiB
  LAUNCH(best_first_select, {1}, tree::SELECT_THREADS, std::max(frontier, 17 * paths + (near ? table : 0)), ids, log_probs, narrow(depths), narrow(width),
         narrow(budget), 0, tokens, parents, node_depths, count, status, near ? 1 : 0, narrow(paths), root_at);
}

void Device::tree_mask(const int32_t* parents, const int32_t* count, int64_t rows, int64_t prefix_len, const int32_t* prefix_at, int32_t* positions,
                       uint32_t* bits) {
  if (rows)
    LAUNCH(::tree_mask, {rows}, 128, 4 * parts(rows, 32), parents, count, narrow(rows), narrow(prefix_len), positions, bits,
           static_cast<unsigned char*>(nullptr), static_cast<int*>(nullptr), prefix_at);
}

void Device::accept(const int32_t* tokens, const int32_t* parents, const int32_t* target, const int32_t* count, int64_t rows, int32_t* path, int32_t* length,
                    int32_t* bonus, int32_t* status) {
  LAUNCH(accept_greedy, {1}, std::min(1024u, round_up(rows, 32)), 4 * rows, tokens, parents, target, count, narrow(rows), 0, path, length, bonus, status);
}

void Device::compact(float* store, int64_t layer_stride, Pages pages, const int32_t* path, const int32_t* kept, int64_t prefix_len, const int32_t* prefix_at,
                     int64_t width, int64_t layers) {
  LAUNCH(compact_layers, (Grid{parts(width, 64), layers}), 64, 0, reinterpret_cast<unsigned*>(store), static_cast<long long>(layer_stride), pages.table,
         pages.size, path, kept, narrow(prefix_len), narrow(width), prefix_at);
}

}  // namespace paritree::cuda

#include "launch_operations.inl"
