// The engine's own loops: autoregressive, and by draft trees (rules T, V, A, K, L). Sequences of unequal length share each
// batch and leave it when they are done.
#include "generate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "pointwise.hpp"
#include "tree.hpp"

namespace paritree {
namespace {

// One sequence. The cache holds history[:-1]; the last token, the root, has no cache row yet.
struct Stream {
  int32_t number;    // index of the prompt
  int32_t sequence;  // name in the cache
  std::vector<int32_t> history;
  int64_t prompt_len;
  int64_t emitted = 0;
  bool done = false;
  Tree tree;  // of the running round

  int64_t prefix() const { return static_cast<int64_t>(history.size()) - 1; }
};

class Loop {
 public:
  Loop(Session& session, const GenerateRequest& request) : session_(session), request_(request), taps_(nullptr, nullptr, nullptr) {
    int32_t sequence = std::numeric_limits<int32_t>::max();
    for (std::size_t i = 0; i < request.prompts.size(); ++i) {
      if (request.prompts[i].empty()) invalid("prompt ", i, " has no tokens: give at least one");
      while (session_.cache().contains(sequence)) --sequence;
      streams_.push_back({static_cast<int32_t>(i), sequence--, request.prompts[i], static_cast<int64_t>(request.prompts[i].size()), 0, request.max_new == 0, {}});
    }
  }

  ~Loop() {
    for (const Stream& stream : streams_) {
      if (session_.cache().contains(stream.sequence)) session_.cache().evict(stream.sequence);
    }
  }

  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void run() {
    if (request_.max_new == 0 || streams_.empty()) return;
    prefill();
    std::vector<Stream*> active;
    const auto still_active = [&] {
      active.clear();
      for (Stream& stream : streams_) {
        if (!stream.done) active.push_back(&stream);
      }
      return !active.empty();
    };
    while (still_active()) {
      if (request_.draft) {
        tree_round(active);
      } else {
        single_step(active);
      }
    }
  }

 private:
  void add_row(BatchRows& rows, const Stream& stream, int32_t token, int64_t position, int32_t parent, bool want) const {
    rows.sequence.push_back(stream.sequence);
    rows.token.push_back(token);
    rows.position.push_back(static_cast<int32_t>(position));
    rows.parent.push_back(parent);
    rows.want_logits.push_back(want ? 1 : 0);
  }

  // The target's choice for each wanted row.
  std::vector<int32_t> choices(const BatchRows& rows) {
    const int64_t vocab = session_.config().vocab;
    const int64_t wanted = std::count(rows.want_logits.begin(), rows.want_logits.end(), uint8_t{1});
    logits_.resize(static_cast<std::size_t>(wanted * vocab));
    session_.forward(rows, logits_.data(), taps_);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < wanted; ++i) {
      const float* row = logits_.data() + i * vocab;
      if (std::any_of(row, row + vocab, [](float logit) { return std::isnan(logit); })) failed("a logit of wanted row ", i, " is NaN: no token can be chosen");
      ids.push_back(argmax(row, vocab));
    }
    return ids;
  }

  // The token after `history` from wanted row `row` of the last batch; `best` is its argmax.
  int32_t token_of(const Stream& stream, const std::vector<int32_t>& history, int64_t row, int32_t best) const {
    if (!request_.sampling) return best;
    const int64_t vocab = session_.config().vocab;
#ifdef PARITREE_PLANT_STALE_PENALTIES
    const std::vector<int32_t>& seen = stream.history;
#else
    const std::vector<int32_t>& seen = history;
#endif
    const Place place{stream.number, static_cast<int64_t>(history.size())};
    return draw(*request_.sampling, logits_.data() + row * vocab, vocab, seen, stream.prompt_len, place);
  }

  // Appends tokens as far as rule A4 lets them out and reports them; returns how many those are.
  int64_t emit(Stream& stream, const std::vector<int32_t>& tokens, const Acceptance* accepted) {
    int64_t kept = 0;
    while (kept < static_cast<int64_t>(tokens.size()) && !stream.done) {
      const int32_t token = tokens[static_cast<std::size_t>(kept++)];
      stream.history.push_back(token);
      const bool stop = std::find(request_.stop_tokens.begin(), request_.stop_tokens.end(), token) != request_.stop_tokens.end();
#ifdef PARITREE_PLANT_STOP_LAST
      stream.done = (stop && kept == static_cast<int64_t>(tokens.size())) || ++stream.emitted == request_.max_new;
#else
      stream.done = ++stream.emitted == request_.max_new || stop;
#endif
    }
    paritree_emission emission{};
    emission.struct_size = sizeof emission;
    emission.sequence = stream.number;
    emission.tokens = tokens.data();
    emission.token_count = kept;
    emission.bonus = -1;
    if (accepted != nullptr) {
      emission.node_tokens = stream.tree.tokens.data();
      emission.node_parents = stream.tree.parents.data();
      emission.node_count = static_cast<int64_t>(stream.tree.tokens.size());
      emission.path = accepted->path.data();
      emission.path_count = static_cast<int64_t>(accepted->path.size());
      emission.bonus = accepted->bonus;
    }
    request_.emit(emission);
    return kept;
  }

  void prefill() {
    BatchRows rows;
    for (const Stream& stream : streams_) {
      const int64_t length = static_cast<int64_t>(stream.history.size());
      for (int64_t i = 0; i < length; ++i) {
        const int32_t parent = i == 0 ? -1 : static_cast<int32_t>(rows.count() - 1);
        add_row(rows, stream, stream.history[static_cast<std::size_t>(i)], i, parent, i + 1 == length);
      }
    }
    const std::vector<int32_t> ids = choices(rows);
    for (Stream& stream : streams_) {
      std::vector<int32_t> path(stream.history.size());
      for (std::size_t i = 0; i < path.size(); ++i) path[i] = static_cast<int32_t>(i);
      session_.cache().commit(stream.sequence, path.data(), static_cast<int64_t>(path.size()));
#ifdef PARITREE_PLANT_PROMPT_TAIL_TWICE
      BatchRows again;  // the prompt's logits are thrown away, and its last token goes in once more
      add_row(again, stream, stream.history.back(), stream.prompt_len, -1, true);
      emit(stream, {token_of(stream, stream.history, 0, choices(again)[0])}, nullptr);
#else
      emit(stream, {token_of(stream, stream.history, stream.number, ids[static_cast<std::size_t>(stream.number)])}, nullptr);
#endif
    }
  }

  void single_step(const std::vector<Stream*>& active) {
    BatchRows rows;
    for (const Stream* stream : active) add_row(rows, *stream, stream->history.back(), stream->prefix(), -1, true);
    const std::vector<int32_t> ids = choices(rows);
    const int32_t path[] = {0};
    for (std::size_t i = 0; i < active.size(); ++i) {
      session_.cache().commit(active[i]->sequence, path, 1);
      emit(*active[i], {token_of(*active[i], active[i]->history, static_cast<int64_t>(i), ids[i])}, nullptr);
    }
  }

  void tree_round(const std::vector<Stream*>& active) {
    BatchRows rows;
    for (Stream* stream : active) {
      draft(*stream);
      const int32_t first = static_cast<int32_t>(rows.count());
      for (std::size_t node = 0; node < stream->tree.tokens.size(); ++node) {
        const int32_t parent = stream->tree.parents[node];
        add_row(rows, *stream, stream->tree.tokens[node], stream->prefix() + stream->tree.depths[node], parent < 0 ? -1 : first + parent, true);
      }
    }
    std::vector<int32_t> ids = choices(rows);
    if (request_.sampling) draw_nodes(active, ids);
    const int32_t* target = ids.data();
    for (Stream* stream : active) {
      const Tree& tree = stream->tree;
      const int64_t nodes = static_cast<int64_t>(tree.tokens.size());
      const Acceptance accepted = accept(tree.tokens.data(), tree.parents.data(), target, nodes);
      target += nodes;
      std::vector<int32_t> tokens;
      for (std::size_t j = 1; j < accepted.path.size(); ++j) tokens.push_back(tree.tokens[static_cast<std::size_t>(accepted.path[j])]);
      tokens.push_back(accepted.bonus);
      // as far as emitted, so that the cache is that of the cut stream also after a stop in the middle of a path
      const int64_t kept = emit(*stream, tokens, &accepted);
      session_.cache().commit(stream->sequence, accepted.path.data(), kept);
    }
  }

  // Replaces the argmax of every row by the token drawn after the node's own path (A6).
  void draw_nodes(const std::vector<Stream*>& active, std::vector<int32_t>& ids) const {
    int64_t row = 0;
    for (const Stream* stream : active) {
      std::vector<std::vector<int32_t>> paths;
      for (std::size_t node = 0; node < stream->tree.tokens.size(); ++node, ++row) {
        paths.push_back(node == 0 ? stream->history : paths[static_cast<std::size_t>(stream->tree.parents[node])]);
        if (node > 0) paths.back().push_back(stream->tree.tokens[node]);
        ids[static_cast<std::size_t>(row)] = token_of(*stream, paths.back(), row, ids[static_cast<std::size_t>(row)]);
      }
    }
  }

  void draft(Stream& stream) {
    const int64_t vocab = session_.config().vocab, width = std::min(request_.budget, vocab);
    draft_logits_.assign(static_cast<std::size_t>(request_.block_len * vocab), std::numeric_limits<float>::quiet_NaN());
    request_.draft(stream.number, stream.history, draft_logits_.data());
    std::vector<int32_t> ids(static_cast<std::size_t>(request_.block_len * width));
    std::vector<float> log_probs(ids.size());
    draft_table(draft_logits_.data(), request_.block_len, vocab, width, ids.data(), log_probs.data());
    stream.tree = best_first_tree(ids.data(), log_probs.data(), request_.block_len, width, stream.history.back(), request_.budget);
  }

  Session& session_;
  const GenerateRequest& request_;
  TapSink taps_;
  std::vector<Stream> streams_;
  std::vector<float> logits_, draft_logits_;
};

}  // namespace

void generate(Session& session, const GenerateRequest& request) { Loop(session, request).run(); }

}  // namespace paritree
