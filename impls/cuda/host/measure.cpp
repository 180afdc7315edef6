// Times of one round of draft trees, for benchmarks/gpu_round.py. Not a part of the C ABI: paritree.h does not know it.
#include <algorithm>
#include <chrono>

#include "session.hpp"

extern "C" {

// One committed sequence; every repeat drafts, verifies, accepts and compacts from the same prefix, and takes the accepted rows back.
struct paritree_cuda_round {
  paritree_session* session;
  int32_t sequence, root;
  int64_t block_len, budget, repeats;
  const float* logits;  // [block_len, vocab] on the host
  double* device_us;    // [repeats] of the device, from logits on the device to the records
  double* round_us;     // [repeats] on the clock, from the first launch to the records on the host
  double* whole_us;     // [repeats] on the clock, with the plan of the round and the copy of the logits to the device
  int32_t graph;        // 1: as a graph
  int32_t reserved;
  int32_t *tokens, *parents, *targets;  // [budget + 1]
  int64_t count;                        // of nodes, with the root
  int64_t path_count;
  int64_t replays;
};

__attribute__((visibility("default"))) const char* paritree_cuda_measure_round(paritree_cuda_round* args);
}

const char* paritree_cuda_measure_round(paritree_cuda_round* args) {
  using namespace paritree::cuda;
  using Clock = std::chrono::steady_clock;
  static thread_local std::string message;
  const auto since = [](Clock::time_point start) { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); };
  try {
    DeviceSession& own = args->session->session;
    const bool graphs = own.graphs();
    own.use_graphs(args->graph != 0);
    const int64_t prefix = own.committed(args->sequence), before = own.replays();
    const std::vector<DeviceSession::Draft> drafts = {{args->sequence, args->root, args->logits}};
    std::vector<DeviceSession::Outcome> outcomes;
    for (int64_t i = -3; i < args->repeats; ++i) {  // three to warm up
      const DeviceSession::Round round = own.prepare_round(drafts, args->block_len, args->budget);
      own.device().begin_timing();
      own.run_round(round);
      const double spent = own.device().end_timing();
      if (i >= 0) args->device_us[i] = spent;
      outcomes = own.finish_round(round, drafts);
      own.keep_committed(args->sequence, prefix);
    }
    const std::vector<int32_t> targets = own.round_targets(args->budget + 1);
    std::copy(targets.begin(), targets.end(), args->targets);
    for (int64_t i = 0; i < args->repeats; ++i) {
      const DeviceSession::Round round = own.prepare_round(drafts, args->block_len, args->budget);
      own.device().synchronise();
      const Clock::time_point start = Clock::now();
      own.run_round(round);
      own.finish_round(round, drafts);
      args->round_us[i] = since(start);
      own.keep_committed(args->sequence, prefix);
    }
    for (int64_t i = 0; i < args->repeats; ++i) {
      own.device().synchronise();
      const Clock::time_point start = Clock::now();
      own.tree_round(drafts, args->block_len, args->budget);
      args->whole_us[i] = since(start);
      own.keep_committed(args->sequence, prefix);
    }
    const DeviceSession::Outcome& outcome = outcomes.front();
    args->count = static_cast<int64_t>(outcome.tokens.size());
    args->path_count = static_cast<int64_t>(outcome.path.size());
    args->replays = own.replays() - before;
    std::copy(outcome.tokens.begin(), outcome.tokens.end(), args->tokens);
    std::copy(outcome.parents.begin(), outcome.parents.end(), args->parents);
    own.use_graphs(graphs);
    return nullptr;
  } catch (const std::exception& problem) {
    message = problem.what();
    return message.c_str();
  }
}

// How often a graph has been replayed in this process.
extern "C" __attribute__((visibility("default"))) int64_t paritree_cuda_replays() { return paritree::cuda::replays_of_process.load(); }
