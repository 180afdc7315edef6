// A client of paritree's golden vectors in plain C++17: reads a suite, runs an engine, writes its outputs. Copy it and replace the calls of
// `Library` by those of your engine; as it stands it drives any shared library with the C ABI of paritree.h.
//
//   c++ -std=c++17 -I impls/native/include docs/clients/vectors_client.cpp -ldl -o vectors_client
//   ./vectors_client SUITE ./libengine.so OUTPUTS && paritree vectors check SUITE --outputs OUTPUTS
//
// The format is docs/vectors.md. Exit codes: 0 outputs written, 2 usage, 3 the engine cannot be loaded, 4 anything else. What the
// engine refuses or fails at is written to OUTPUTS/engine.json and ends nothing. Little-endian machines only, as safetensors is.
#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "paritree.h"

namespace {

struct Problem : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct NotLoadable : Problem {
  using Problem::Problem;
};
struct Unsupported : Problem {
  using Problem::Problem;
};

// ---- JSON: what a manifest and a safetensors header need ------------------------------------------------------------

struct Json {
  enum Kind { Null, Bool, Integer, Number, String, Array, Object } kind = Null;
  int64_t integer = 0;
  double number = 0;
  std::string string;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> fields;  // in order of the file

  const Json *find(const std::string &key) const {
    for (const auto &field : fields)
      if (field.first == key) return &field.second;
    return nullptr;
  }
  const Json &operator[](const std::string &key) const {
    const Json *found = find(key);
    if (!found) throw Problem("the JSON object lacks the field " + key);
    return *found;
  }
  bool is_number() const { return kind == Integer || kind == Number; }
  double as_double() const { return kind == Integer ? double(integer) : number; }
};

class Parser {
 public:
  explicit Parser(const std::string &text) : text_(text) {}
  Json document() {
    Json out = value();
    skip();
    if (at_ != text_.size()) fail("text after the end");
    return out;
  }

 private:
  [[noreturn]] void fail(const std::string &what) const { throw Problem("broken JSON at byte " + std::to_string(at_) + ": " + what); }
  void skip() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_])) ++at_;
  }
  char peek() {
    skip();
    if (at_ >= text_.size()) fail("the text ends early");
    return text_[at_];
  }
  bool take(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  void need(char wanted) {
    if (!take(wanted)) fail(std::string("expected ") + wanted);
  }
  Json value() {
    Json out;
    switch (peek()) {
      case '{':
        out.kind = Json::Object;
        ++at_;
        while (!take('}')) {
          if (!out.fields.empty()) need(',');
          std::string key = string();
          need(':');
          out.fields.emplace_back(key, value());
        }
        return out;
      case '[':
        out.kind = Json::Array;
        ++at_;
        while (!take(']')) {
          if (!out.items.empty()) need(',');
          out.items.push_back(value());
        }
        return out;
      case '"':
        out.kind = Json::String;
        out.string = string();
        return out;
      default:
        return scalar();
    }
  }
  std::string string() {
    need('"');
    std::string out;
    while (at_ < text_.size() && text_[at_] != '"') {
      char c = text_[at_++];
      if (c == '\\' && at_ < text_.size()) {
        c = text_[at_++];
        if (c == 'u') {  // names are ASCII; anything else is only shown
          at_ += 4;
          c = '?';
        } else if (const char *known = std::strchr("n\nt\tr\rb\bf\f", c)) {
          c = known[1];
        }
      }
      out += c;
    }
    need('"');
    return out;
  }
  Json scalar() {
    size_t start = at_;
    while (at_ < text_.size() && !std::strchr(",]} \t\r\n", text_[at_])) ++at_;
    const std::string word = text_.substr(start, at_ - start);
    Json out;
    if (word == "null") return out;
    if (word == "true" || word == "false") {
      out.kind = Json::Bool;
      out.integer = word == "true";
      return out;
    }
    char *end = nullptr;
    out.kind = word.find_first_of(".eE") == std::string::npos ? Json::Integer : Json::Number;
    out.number = std::strtod(word.c_str(), &end);
    if (word.empty() || *end) fail("no value: " + word);
    if (out.kind == Json::Integer) out.integer = std::strtoll(word.c_str(), nullptr, 10);
    return out;
  }

  const std::string &text_;
  size_t at_ = 0;
};

std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c < 32 ? ' ' : char(c);
  }
  return out + '"';
}

// ---- tensors and safetensors files: 8 bytes of length, a JSON header, the data --------------------------------------

struct Array {
  std::string dtype;  // float32, int32 or uint8
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;

  int64_t count() const {
    int64_t out = 1;
    for (int64_t extent : shape) out *= extent;
    return out;
  }
  const int32_t *ints() const { return reinterpret_cast<const int32_t *>(bytes.data()); }
  const float *floats() const { return reinterpret_cast<const float *>(bytes.data()); }
};
using Arrays = std::map<std::string, Array>;

size_t size_of(const std::string &dtype) { return dtype == "uint8" ? 1 : 4; }

Array made(const std::string &dtype, std::vector<int64_t> shape) {  // full of poison: NaN, and a negative integer
  Array out{dtype, std::move(shape), {}};
  out.bytes.assign(size_t(out.count()) * size_of(dtype), 0xFF);
  return out;
}

Array ints_of(const int32_t *values, int64_t count) {
  Array out = made("int32", {count});
  if (count) std::memcpy(out.bytes.data(), values, out.bytes.size());
  return out;
}

Array first_rows(const Array &of, int64_t rows) {
  Array out = of;
  out.shape[0] = rows;
  out.bytes.resize(size_t(out.count()) * size_of(of.dtype));
  return out;
}

std::string read_text(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Problem(path + " cannot be read");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

const std::pair<const char *, const char *> kDtypes[] = {{"F32", "float32"}, {"I32", "int32"}, {"U8", "uint8"}};

Arrays read_tensors(const std::string &path) {
  const std::string text = read_text(path);
  uint64_t length = 0;
  if (text.size() >= 8) std::memcpy(&length, text.data(), 8);
  if (text.size() < 8 || length > text.size() - 8) throw Problem(path + " was cut");
  const std::string head = text.substr(8, length);
  const size_t start = 8 + length;
  Arrays out;
  for (const auto &field : Parser(head).document().fields) {
    if (field.first == "__metadata__") continue;
    Array array;
    for (const auto &dtype : kDtypes)
      if (field.second["dtype"].string == dtype.first) array.dtype = dtype.second;
    for (const Json &extent : field.second["shape"].items) array.shape.push_back(extent.integer);
    const size_t begin = start + size_t(field.second["data_offsets"].items.at(0).integer);
    const size_t end = start + size_t(field.second["data_offsets"].items.at(1).integer);
    if (array.dtype.empty() || end > text.size() || end - begin != size_t(array.count()) * size_of(array.dtype))
      throw Problem(path + ": tensor " + field.first + " was cut or has an unknown dtype");
    array.bytes.assign(text.begin() + long(begin), text.begin() + long(end));
    out[field.first] = std::move(array);
  }
  return out;
}

void write_tensors(const std::string &path, const Arrays &arrays) {
  std::string head = "{";
  size_t offset = 0;
  // four-byte types first, so that every tensor is aligned
  std::vector<const Arrays::value_type *> order;
  for (size_t size : {size_t(4), size_t(1)})
    for (const auto &item : arrays)
      if (size_of(item.second.dtype) == size) order.push_back(&item);
  for (const auto *item : order) {
    const Array &array = item->second;
    std::string shape, dtype;
    for (int64_t extent : array.shape) shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    for (const auto &known : kDtypes)
      if (array.dtype == known.second) dtype = known.first;
    head += (head.size() > 1 ? "," : "") + quoted("outputs." + item->first) + ":{\"dtype\":" + quoted(dtype) + ",\"shape\":[" + shape +
            "],\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(offset + array.bytes.size()) + "]}";
    offset += array.bytes.size();
  }
  head += "}";
  head.resize((head.size() + 7) / 8 * 8, ' ');
  const uint64_t length = head.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char *>(&length), 8);
  file.write(head.data(), long(head.size()));
  for (const auto *item : order) file.write(reinterpret_cast<const char *>(item->second.bytes.data()), long(item->second.bytes.size()));
  if (!file.flush()) throw Problem(path + " cannot be written");
}

// ---- the engine -----------------------------------------------------------------------------------------------------

DLTensor tensor_of(Array &array) {
  const uint8_t code = array.dtype == "float32" ? 2 : array.dtype == "int32" ? 0 : 1;
  const DLDataType dtype{code, uint8_t(8 * size_of(array.dtype)), 1};
  return {array.bytes.data(), {1, 0}, int32_t(array.shape.size()), dtype, array.shape.data(), nullptr, 0};
}

struct Params {  // the flat pairs of the C ABI; `json` outlives them
  std::vector<paritree_param> items;
  explicit Params(const Json &json) {
    for (const auto &field : json.fields) {
      if (!field.second.is_number()) continue;
      paritree_param param{field.first.c_str(), field.second.kind == Json::Number, 0, {}};
      if (param.kind) param.value.d = field.second.number;
      else param.value.i = field.second.integer;
      items.push_back(param);
    }
  }
  paritree_params view() const { return {items.data(), int64_t(items.size())}; }
};

class Library {
 public:
  explicit Library(const std::string &path) : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw NotLoadable(dlerror());
    auto version = symbol<decltype(&paritree_abi_version)>("paritree_abi_version");
    if (version() != PARITREE_ABI_VERSION) throw NotLoadable(path + " speaks another ABI version");
    about.struct_size = sizeof about;
    check(symbol<decltype(&paritree_describe)>("paritree_describe")(&about), "paritree_describe");
  }

  template <class Function>
  Function symbol(const char *name, bool required = true) const {
    void *found = dlsym(handle_, name);
    if (!found && required) throw Unsupported(path_ + " does not export " + name);
    return reinterpret_cast<Function>(found);
  }

  void check(paritree_status status, const std::string &what) const {
    if (status == PARITREE_OK) return;
    auto last_error = symbol<decltype(&paritree_last_error)>("paritree_last_error", false);
    const std::string text = what + ": " + (last_error ? last_error() : "no message");
    if (status == PARITREE_UNSUPPORTED) throw Unsupported(text);
    throw Problem(text);
  }

  void run_op(const std::string &op, Arrays &inputs, const Json &params, Arrays &outputs) const {
    std::vector<paritree_named_tensor> in, out;
    for (auto &item : inputs) in.push_back({item.first.c_str(), tensor_of(item.second)});
    for (auto &item : outputs) out.push_back({item.first.c_str(), tensor_of(item.second)});
    const Params pairs(params);
    paritree_op_call call{};
    call.struct_size = sizeof call;
    call.synchronised = 1;
    call.op = op.c_str();
    call.inputs = in.data(), call.input_count = int64_t(in.size());
    call.outputs = out.data(), call.output_count = int64_t(out.size());
    call.params = pairs.view();
    call.device = {1, 0};
    uint64_t bytes = 0;
    auto workspace = symbol<decltype(&paritree_run_op_workspace)>("paritree_run_op_workspace", false);
    if (workspace) check(workspace(&call, &bytes), op);
    const std::unique_ptr<void, decltype(&std::free)> memory(bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr, std::free);
    if (bytes) std::memset(memory.get(), 0xFF, bytes);
    call.workspace = memory.get(), call.workspace_bytes = bytes;
    check(symbol<decltype(&paritree_run_op)>("paritree_run_op")(&call), op);
  }

  paritree_description about{};

 private:
  std::string path_;
  void *handle_;
};

// ---- the three kinds of vectors -------------------------------------------------------------------------------------

Arrays run_op_vector(const Library &engine, const Json &vector, const Arrays &file) {
  Arrays inputs, outputs;
  for (const auto &input : vector["inputs"].fields) inputs[input.first] = file.at(input.second["tensor"].string);
  for (const auto &output : vector["outputs"].fields) {
    std::vector<int64_t> shape;
    for (const Json &extent : output.second["shape"].items) shape.push_back(extent.integer);
    outputs[output.first] = made(output.second["dtype"].string, shape);
  }
  engine.run_op(vector["op"].string, inputs, vector["params"], outputs);
  return outputs;
}

// Each operation on the outputs of those before it; N = count. The target of node i is next_token[depths[i], tokens[i]].
Arrays run_tree_vector(const Library &engine, const Json &vector, const Arrays &file) {
  const Array &logits = file.at("inputs.logits"), &cache = file.at("inputs.cache"), &next_token = file.at("inputs.next_token");
  const Json &params = vector["params"];
  const int64_t budget = params["budget"].integer, prefix_len = params["prefix_len"].integer;
  const int64_t depth = logits.shape[0], vocab = logits.shape[1], width = budget < vocab ? budget : vocab;
  Arrays all;
  auto run = [&](const std::string &op, Arrays inputs, const std::vector<const char *> &wanted, Arrays outputs) {
    Json own;  // the engine is given the parameters of this operation only
    for (const char *name : wanted) own.fields.emplace_back(name, params[name]);
    engine.run_op(op, inputs, own, outputs);
    for (auto &output : outputs) all[op == "compact" ? "cache" : output.first] = std::move(output.second);
  };
  run("draft_table", {{"logits", logits}}, {"budget"},
      {{"ids", made("int32", {depth, width})}, {"log_probs", made("float32", {depth, width})}});
  Arrays nodes{{"count", made("int32", {1})}};
  for (const char *name : {"tokens", "parents", "depths"}) nodes[name] = made("int32", {budget + 1});
  run("best_first_tree", {{"ids", all["ids"]}, {"log_probs", all["log_probs"]}}, {"budget", "root"}, nodes);
  const int64_t rows = all["count"].ints()[0] + 1;
  if (rows < 1 || rows > budget + 1) return all;  // the check says what is wrong with it
  const Array tokens = first_rows(all["tokens"], rows), parents = first_rows(all["parents"], rows);
  run("tree_mask", {{"parents", parents}}, {"prefix_len"},
      {{"positions", made("int32", {rows})}, {"visible", made("uint8", {rows, prefix_len + rows})}});
  std::vector<int32_t> target;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t d = all["depths"].ints()[i], token = tokens.ints()[i];
    if (d < 0 || d > depth || token < 0 || token >= vocab) return all;
    target.push_back(next_token.ints()[d * vocab + token]);
  }
  run("accept", {{"tokens", tokens}, {"parents", parents}, {"target", ints_of(target.data(), rows)}}, {},
      {{"path", made("int32", {rows})}, {"length", made("int32", {1})}, {"bonus", made("int32", {1})}});
  const int64_t length = all["length"].ints()[0];
  if (length < 1 || length > rows) return all;
  run("compact", {{"cache", first_rows(cache, prefix_len + rows)}, {"path", first_rows(all["path"], length)}}, {"prefix_len"},
      {{"out", made("float32", {prefix_len + length, cache.shape[1]})}});
  return all;
}

struct Loop {  // what the callbacks of one generate step need
  const Array *draft;
  std::string step;
  Arrays *outputs;
  std::map<int32_t, std::vector<int32_t>> streams;
  std::map<int32_t, int> rounds;
};

paritree_status lend_weight(void *user, const char *name, DLTensor *tensor) {
  auto &weights = *static_cast<Arrays *>(user);
  const auto found = weights.find(name);
  if (found == weights.end()) return PARITREE_INVALID;
  *tensor = tensor_of(found->second);
  return PARITREE_OK;
}

paritree_status keep_tap(void *user, const paritree_tap *tap) {
  auto &kept = *static_cast<std::pair<std::string, Arrays *> *>(user);
  const DLTensor &from = tap->tensor;
  Array array = made(from.dtype.code == 2 ? "float32" : from.dtype.bits == 8 ? "uint8" : "int32", {from.shape, from.shape + from.ndim});
  if (from.strides) return PARITREE_UNSUPPORTED;
  std::memcpy(array.bytes.data(), static_cast<const uint8_t *>(from.data) + from.byte_offset, array.bytes.size());
  (*kept.second)[kept.first + ".tap." + tap->name + "." + std::to_string(tap->layer)] = std::move(array);
  return PARITREE_OK;
}

// A table of one block per last token: [tokens, block_len, vocab].
paritree_status look_up_draft(void *user, int32_t, const int32_t *history, int64_t history_count, float *logits) {
  const Array &draft = *static_cast<Loop *>(user)->draft;
  const int64_t block = draft.shape[1] * draft.shape[2];
  std::memcpy(logits, draft.floats() + history[history_count - 1] % draft.shape[0] * block, size_t(block) * 4);
  return PARITREE_OK;
}

paritree_status keep_emission(void *user, const paritree_emission *emission) {
  Loop &loop = *static_cast<Loop *>(user);
  auto &stream = loop.streams[emission->sequence];
  stream.insert(stream.end(), emission->tokens, emission->tokens + emission->token_count);
  if (emission->node_count == 0) return PARITREE_OK;
  const int round = loop.rounds[emission->sequence]++;
  const std::string name = loop.step + ".round." + std::to_string(emission->sequence) + "." + std::to_string(round);
  (*loop.outputs)[name + ".tokens"] = ints_of(emission->node_tokens, emission->node_count);
  (*loop.outputs)[name + ".parents"] = ints_of(emission->node_parents, emission->node_count);
  (*loop.outputs)[name + ".path"] = ints_of(emission->path, emission->path_count);
  (*loop.outputs)[name + ".bonus"] = ints_of(&emission->bonus, 1);
  return PARITREE_OK;
}

class SessionVector {
 public:
  SessionVector(const Library &engine, const Json &vector, const Arrays &file, Arrays weights)
      : engine_(engine), vector_(vector), file_(file), weights_(std::move(weights)) {
    const Params config(vector["parameters"]);
    paritree_open_args args{};
    args.struct_size = sizeof args;
    args.config = config.view();
    args.weight = lend_weight, args.weight_user = &weights_;
    args.device = {1, 0};
    engine.check(engine.symbol<decltype(&paritree_open)>("paritree_open")(&args, &session_), "paritree_open");
  }
  ~SessionVector() {
    if (auto close = engine_.symbol<decltype(&paritree_close)>("paritree_close", false)) close(session_);
  }
  SessionVector(const SessionVector &) = delete;

  Arrays run() {
    const auto &steps = vector_["steps"].items;
    for (size_t number = 0; number < steps.size(); ++number) {
      const Json &step = steps[number];
      const std::string what = step["do"].string, name = std::to_string(number);
      if (what == "forward") forward(step, name);
      else if (what == "commit") {
        const Array &path = tensor(step["path"]);
        auto commit = engine_.symbol<decltype(&paritree_commit)>("paritree_commit");
        engine_.check(commit(session_, int32_t(step["sequence"].integer), path.ints(), path.count()), what);
      } else if (what == "cache_rows") cache_rows(step, name);
      else if (what == "evict")
        engine_.check(engine_.symbol<decltype(&paritree_evict)>("paritree_evict")(session_, int32_t(step["sequence"].integer)), what);
      else if (what == "fork") {
        auto fork = engine_.symbol<decltype(&paritree_fork)>("paritree_fork");
        engine_.check(fork(session_, int32_t(step["source"].integer), int32_t(step["target"].integer)), what);
      } else if (what == "generate") generate(step, name);
      else throw Unsupported("a step " + what);
    }
    return std::move(outputs_);
  }

 private:
  const Array &tensor(const Json &name) const { return file_.at(name.string); }
  int64_t parameter(const char *name) const { return vector_["parameters"][name].integer; }

  void forward(const Json &step, const std::string &name) {
    const Array &token = tensor(step["token"]), &want = tensor(step["want"]);
    int64_t wanted = 0;
    for (uint8_t one : want.bytes) wanted += one;
    Array logits = made("float32", {wanted, parameter("vocab")});
    DLTensor logits_tensor = tensor_of(logits);
    std::pair<std::string, Arrays *> kept{name, &outputs_};
    paritree_forward_args args{};
    args.struct_size = sizeof args;
    args.synchronised = 1;
    args.row_count = token.count();
    args.sequence = tensor(step["sequence"]).ints(), args.token = token.ints();
    args.position = tensor(step["position"]).ints(), args.parent = tensor(step["parent"]).ints();
    args.want_logits = want.bytes.data();
    args.logits = wanted ? &logits_tensor : nullptr;
    args.taps = engine_.about.taps, args.tap = keep_tap, args.tap_user = &kept;
    engine_.check(engine_.symbol<decltype(&paritree_forward)>("paritree_forward")(session_, &args), "forward");
    if (wanted) outputs_[name + ".logits"] = std::move(logits);
  }

  void cache_rows(const Json &step, const std::string &name) {  // [layers, rows, kv_rank + rope_dim]
    auto read = engine_.symbol<decltype(&paritree_cache_rows)>("paritree_cache_rows");
    const int32_t sequence = int32_t(step["sequence"].integer);
    const int64_t width = parameter("kv_rank") + parameter("rope_dim");
    Array all{"float32", {parameter("layers"), 0, width}, {}};
    for (int64_t layer = 0; layer < all.shape[0]; ++layer) {
      int64_t count = 0;
      engine_.check(read(session_, sequence, layer, nullptr, &count), "cache_rows");
      Array rows = made("float32", {count, width});
      DLTensor rows_tensor = tensor_of(rows);
      engine_.check(read(session_, sequence, layer, &rows_tensor, &count), "cache_rows");
      if (layer && count != all.shape[1]) throw Problem("cache_rows: the layers hold different numbers of rows");
      all.shape[1] = count;
      all.bytes.insert(all.bytes.end(), rows.bytes.begin(), rows.bytes.end());
    }
    outputs_[name + ".cache"] = std::move(all);
  }

  void generate(const Json &step, const std::string &name) {
    std::vector<const int32_t *> prompts;
    std::vector<int64_t> lengths;
    std::vector<int32_t> stops;
    for (const Json &prompt : step["prompts"].items) prompts.push_back(tensor(prompt).ints()), lengths.push_back(tensor(prompt).count());
    for (const Json &token : step["stop_tokens"].items) stops.push_back(int32_t(token.integer));
    const Json *draft = step.find("draft");
    Loop loop{draft ? &tensor(*draft) : nullptr, name, &outputs_, {}, {}};
    paritree_generate_args args{};
    args.struct_size = sizeof args;
    args.prompt_count = int64_t(prompts.size());
    args.prompts = prompts.data(), args.prompt_lengths = lengths.data();
    args.draft = draft ? look_up_draft : nullptr, args.draft_user = &loop;
    args.block_len = step["block_len"].integer, args.budget = step["budget"].integer, args.max_new = step["max_new"].integer;
    args.stop_tokens = stops.data(), args.stop_count = int64_t(stops.size());
    args.emit = keep_emission, args.emit_user = &loop;
    engine_.check(engine_.symbol<decltype(&paritree_generate)>("paritree_generate")(session_, &args), "generate");
    for (size_t i = 0; i < prompts.size(); ++i) {
      const auto &stream = loop.streams[int32_t(i)];
      outputs_[name + ".tokens." + std::to_string(i)] = ints_of(stream.data(), int64_t(stream.size()));
    }
  }

  const Library &engine_;
  const Json &vector_;
  const Arrays &file_;
  Arrays weights_;
  paritree_session *session_ = nullptr;
  Arrays outputs_;
};

// ---- who wrote the outputs ------------------------------------------------------------------------------------------

std::string listed(const char *words) {
  std::string out, word;
  std::stringstream stream(words ? words : "");
  while (std::getline(stream, word, ',')) out += (out.empty() ? "" : ",") + quoted(word);
  return "[" + out + "]";
}

std::string or_nothing(const char *text) { return text ? text : ""; }

using Texts = std::map<std::string, std::string>;

std::string texts(const Texts &of) {
  std::string out;
  for (const auto &item : of) out += (out.empty() ? "" : ",") + quoted(item.first) + ":" + quoted(item.second);
  return "{" + out + "}";
}

std::string about(const paritree_description &engine, const Texts &unsupported, const Texts &failed) {
  std::ostringstream out;
  out.precision(17);
  out << "{\"engine\":" << quoted(or_nothing(engine.name)) << ",\"version\":" << quoted(or_nothing(engine.version));
  out << ",\"profile\":{\"name\":" << quoted(engine.profile_name ? engine.profile_name : "float32-any-order");
  for (int64_t i = 0; i < engine.profile.count; ++i) {
    const paritree_param &field = engine.profile.items[i];
    out << "," << quoted(field.key) << ":";
    if (field.kind) out << field.value.d;
    else out << field.value.i;
  }
  out << "},\"capabilities\":" << listed(engine.capabilities) << ",\"ops\":" << listed(engine.ops) << ",\"taps\":" << listed(engine.taps)
      << ",\"unsupported\":" << texts(unsupported) << ",\"failed\":" << texts(failed) << "}\n";
  return out.str();
}

void run_suite(const std::string &suite, const std::string &library, const std::string &place) {
  const Json manifest = Parser(read_text(suite + "/manifest.json")).document();
  if (manifest["format"].string != "paritree-vectors" || manifest["version"].integer != 1)
    throw Problem(suite + " is no suite of version 1");
  const Library engine(library);
  mkdir(place.c_str(), 0777);
  Texts unsupported, failed;
  for (const Json &vector : manifest["vectors"].items) {
    const std::string &id = vector["id"].string, &kind = vector["kind"].string;
    const Arrays file = read_tensors(suite + "/" + vector["file"]["name"].string);
    try {
      Arrays outputs;
      if (kind == "op") outputs = run_op_vector(engine, vector, file);
      else if (kind == "tree") outputs = run_tree_vector(engine, vector, file);
      else if (kind == "session") {
        Arrays weights = read_tensors(suite + "/" + vector["weights"]["name"].string);
        outputs = SessionVector(engine, vector, file, std::move(weights)).run();
      } else throw Unsupported("a vector of kind " + kind);
      write_tensors(place + "/" + id + ".safetensors", outputs);
    } catch (const Unsupported &problem) {
      unsupported[id] = problem.what();
    } catch (const Problem &problem) {
      failed[id] = problem.what();
    }
  }
  std::ofstream(place + "/engine.json") << about(engine.about, unsupported, failed);
  std::cout << manifest["vectors"].items.size() << " vectors, " << unsupported.size() << " unsupported, " << failed.size() << " failed\n";
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 4) {
    std::cerr << "usage: vectors_client SUITE ENGINE.so OUTPUTS\n";
    return 2;
  }
  try {
    run_suite(argv[1], argv[2], argv[3]);
    return 0;
  } catch (const NotLoadable &problem) {
    std::cerr << "vectors_client: " << problem.what() << "\n";
    return 3;
  } catch (const std::exception &problem) {
    std::cerr << "vectors_client: " << problem.what() << "\n";
    return 4;
  }
}
