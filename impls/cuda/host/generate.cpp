// The engine's own loops: autoregressive, and by draft trees (rules T, V, A, K, L). Sequences of unequal length share each batch and
// leave it when they are done.
#include <algorithm>
#include <limits>
#include <optional>

#include "session.hpp"

namespace paritree::cuda {
namespace {

// One sequence. The cache holds history[:-1]; the last token, the root, has no cache row yet.
struct Stream {
  int32_t number;    // index of the prompt
  int32_t sequence;  // name in the cache
  std::vector<int32_t> history;
  int64_t prompt_len;
  int64_t emitted;
  bool done;
};

class Loop {
 public:
  Loop(DeviceSession& session, const paritree_generate_args& args) : session_(session), args_(args) {
    int32_t sequence = std::numeric_limits<int32_t>::max();
    for (int64_t i = 0; i < args.prompt_count; ++i) {
      if (args.prompt_lengths[i] < 1 || args.prompts[i] == nullptr) invalid("prompt ", i, " has no tokens: give at least one");
      while (session_.contains(sequence)) --sequence;
      streams_.push_back({static_cast<int32_t>(i), sequence--, {args.prompts[i], args.prompts[i] + args.prompt_lengths[i]}, args.prompt_lengths[i], 0, args.max_new == 0});
    }
    if (args.sampling.count != 0) sampling_ = read_sampling(args.sampling, session.config().vocab);
    session_.draw_by(sampling_ ? &*sampling_ : nullptr);
  }
  ~Loop() {
    session_.draw_by(nullptr);
    for (const Stream& stream : streams_)
      if (session_.contains(stream.sequence)) session_.evict(stream.sequence);
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void run() {
    if (args_.max_new == 0 || streams_.empty()) return;
    prefill();
    for (std::vector<Stream*> active; !(active = waiting()).empty();) args_.draft != nullptr ? tree_round(active) : single_step(active);
  }

 private:
  std::vector<Stream*> waiting() {
    std::vector<Stream*> out;
    for (Stream& stream : streams_)
      if (!stream.done) out.push_back(&stream);
    return out;
  }

  static DeviceSession::History history_of(const Stream& stream) { return {&stream.history, stream.prompt_len, stream.number}; }

  static void add_row(BatchRows& rows, const Stream& stream, int32_t token, int64_t position, int32_t parent, bool want) {
    rows.sequence.push_back(stream.sequence);
    rows.token.push_back(token);
    rows.position.push_back(static_cast<int32_t>(position));
    rows.parent.push_back(parent);
    rows.want_logits.push_back(want ? 1 : 0);
  }

  // Appends tokens as far as rule A4 lets them out and reports them; returns how many those are.
  int64_t emit(Stream& stream, const std::vector<int32_t>& tokens, const DeviceSession::Outcome* outcome) {
    int64_t kept = 0;
    while (kept < static_cast<int64_t>(tokens.size()) && !stream.done) {
      const int32_t token = tokens[static_cast<std::size_t>(kept++)];
      stream.history.push_back(token);
      const int32_t* stops = args_.stop_tokens;
      stream.done = ++stream.emitted == args_.max_new || std::find(stops, stops + args_.stop_count, token) != stops + args_.stop_count;
    }
    paritree_emission emission{};
    emission.struct_size = sizeof emission;
    emission.sequence = stream.number;
    emission.tokens = tokens.data();
    emission.token_count = kept;
    emission.bonus = -1;
    if (outcome != nullptr) {
      emission.node_tokens = outcome->tokens.data();
      emission.node_parents = outcome->parents.data();
      emission.node_count = static_cast<int64_t>(outcome->tokens.size());
      emission.path = outcome->path.data();
      emission.path_count = static_cast<int64_t>(outcome->path.size());
      emission.bonus = outcome->bonus;
    }
    const paritree_status status = args_.emit(args_.emit_user, &emission);
    if (status != PARITREE_OK) failed("the emit callback answered ", status, " for prompt ", stream.number);
    return kept;
  }

  void prefill() {
    BatchRows rows;
    for (const Stream& stream : streams_) {
      const int64_t length = static_cast<int64_t>(stream.history.size());
      for (int64_t i = 0; i < length; ++i)
        add_row(rows, stream, stream.history[static_cast<std::size_t>(i)], i, i == 0 ? -1 : static_cast<int32_t>(rows.count() - 1), i + 1 == length);
    }
    std::vector<DeviceSession::History> histories;
    for (const Stream& stream : streams_) histories.push_back(history_of(stream));
    const std::vector<int32_t> ids = session_.choices(rows, histories);
    for (Stream& stream : streams_) {
      std::vector<int32_t> path(stream.history.size());
      for (std::size_t i = 0; i < path.size(); ++i) path[i] = static_cast<int32_t>(i);
      session_.commit(stream.sequence, path.data(), static_cast<int64_t>(path.size()));
      emit(stream, {ids[static_cast<std::size_t>(stream.number)]}, nullptr);
    }
  }

  void single_step(const std::vector<Stream*>& active) {
    BatchRows rows;
    for (const Stream* stream : active) add_row(rows, *stream, stream->history.back(), static_cast<int64_t>(stream->history.size()) - 1, -1, true);
    std::vector<DeviceSession::History> histories;
    for (const Stream* stream : active) histories.push_back(history_of(*stream));
    const std::vector<int32_t> ids = session_.choices(rows, histories);
    const int32_t path[] = {0};
    for (std::size_t i = 0; i < active.size(); ++i) {
      session_.commit(active[i]->sequence, path, 1);
      emit(*active[i], {ids[i]}, nullptr);
    }
  }

  void tree_round(const std::vector<Stream*>& active) {
    std::vector<std::vector<float>> logits;
    std::vector<DeviceSession::Draft> drafts;
    for (const Stream* stream : active) {
      logits.emplace_back(static_cast<std::size_t>(args_.block_len * session_.config().vocab), std::numeric_limits<float>::quiet_NaN());
      const paritree_status status =
          args_.draft(args_.draft_user, stream->number, stream->history.data(), static_cast<int64_t>(stream->history.size()), logits.back().data());
      if (status != PARITREE_OK) failed("the draft callback answered ", status, " for prompt ", stream->number);
      drafts.push_back({stream->sequence, stream->history.back(), logits.back().data(), history_of(*stream)});
    }
    const std::vector<DeviceSession::Outcome> outcomes = session_.tree_round(drafts, args_.block_len, args_.budget);
    for (std::size_t i = 0; i < active.size(); ++i) {
      const DeviceSession::Outcome& outcome = outcomes[i];
      std::vector<int32_t> tokens;
      for (std::size_t j = 1; j < outcome.path.size(); ++j) tokens.push_back(outcome.tokens[static_cast<std::size_t>(outcome.path[j])]);
      tokens.push_back(outcome.bonus);
      // as far as emitted, so that the cache is that of the cut stream also after a stop in the middle of a path
      const int64_t before = session_.committed(active[i]->sequence) - static_cast<int64_t>(outcome.path.size());
      const int64_t kept = emit(*active[i], tokens, &outcome);
      session_.keep_committed(active[i]->sequence, before + kept);
    }
  }

  DeviceSession& session_;
  const paritree_generate_args& args_;
  std::vector<Stream> streams_;
  std::optional<Sampling> sampling_;  // none: greedy
};

}  // namespace

void generate(DeviceSession& session, const paritree_generate_args& args) { Loop(session, args).run(); }

}  // namespace paritree::cuda
