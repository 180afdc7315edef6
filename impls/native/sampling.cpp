// spec/sampling.py, in float64 throughout. Penalties, truncation and noise touch one row at a time: nothing here is worth vectorising.
#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <set>

namespace paritree {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr char kBias[] = "logit_bias:";

void check(bool ok, const char* name, double value, const char* accepted) {
  if (!ok) invalid(name, " is ", value, ", but must be ", accepted);
}

// z after bias and penalties.
std::vector<double> penalised(const Sampling& s, const float* logits, int64_t vocab, const std::vector<int32_t>& seen, int64_t prompt_len) {
  std::vector<double> z(logits, logits + vocab);
  for (const auto& [token, bias] : s.logit_bias) z[static_cast<std::size_t>(token)] += bias;
  if (s.repetition_penalty != 1.0) {
    for (const int32_t token : std::set<int32_t>(seen.begin(), seen.end())) {
      double& value = z[static_cast<std::size_t>(token)];
      value = value > 0 ? value / s.repetition_penalty : value * s.repetition_penalty;
    }
  }
  if (s.presence_penalty != 0.0 || s.frequency_penalty != 0.0) {
    std::map<int32_t, int64_t> counts;
    for (auto token = seen.begin() + prompt_len; token != seen.end(); ++token) ++counts[*token];
    for (const auto& [token, count] : counts) {
      z[static_cast<std::size_t>(token)] -= s.frequency_penalty * static_cast<double>(count);
      z[static_cast<std::size_t>(token)] -= s.presence_penalty;
    }
  }
  return z;
}

// -inf for every token that min-p, top-k and top-p leave out, in this order. z is scaled by the temperature already.
void truncate(const Sampling& s, std::vector<double>& z) {
  const double top = *std::max_element(z.begin(), z.end());
  if (s.min_p > 0) {
    const double limit = std::log(s.min_p);
    for (double& value : z) {
      if (value - top < limit) value = -kInfinity;
    }
  }
  const bool cut_k = s.top_k > 0 && s.top_k < static_cast<int64_t>(z.size());
  if (!cut_k && s.top_p == 1.0) return;
  std::vector<std::size_t> order(z.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&z](std::size_t a, std::size_t b) { return z[a] > z[b]; });
  if (cut_k) {
    const double last = z[order[static_cast<std::size_t>(s.top_k - 1)]];
    for (std::size_t rank = static_cast<std::size_t>(s.top_k); rank < order.size(); ++rank) {
      if (!s.top_k_ties_all || z[order[rank]] < last) z[order[rank]] = -kInfinity;
    }
  }
  if (s.top_p == 1.0) return;
  double total = 0;
  for (const std::size_t token : order) total += std::exp(z[token] - top);
  double before = 0;
  for (const std::size_t token : order) {
    const double mass = std::exp(z[token] - top);
    if (before >= s.top_p * total) z[token] = -kInfinity;
    before += mass;
  }
}

}  // namespace

Sampling sampling_fields(const Params& params) {
  Sampling s;
  s.temperature = params.number("temperature", s.temperature);
  s.top_k = params.integer("top_k", s.top_k);
  s.top_k_ties_all = params.integer("top_k_ties_all", 0) != 0;
  s.top_p = params.number("top_p", s.top_p);
  s.min_p = params.number("min_p", s.min_p);
  s.repetition_penalty = params.number("repetition_penalty", s.repetition_penalty);
  s.presence_penalty = params.number("presence_penalty", s.presence_penalty);
  s.frequency_penalty = params.number("frequency_penalty", s.frequency_penalty);
  s.seed = static_cast<uint64_t>(params.integer("seed", 0));
  check(s.temperature >= 0 && s.temperature < kInfinity, "temperature", s.temperature, "finite and at least 0");
  check(s.top_k >= 0, "top_k", static_cast<double>(s.top_k), "at least 0");
  check(s.top_p > 0 && s.top_p <= 1, "top_p", s.top_p, "above 0 and at most 1");
  check(s.min_p >= 0 && s.min_p <= 1, "min_p", s.min_p, "between 0 and 1");
  check(s.repetition_penalty > 0 && s.repetition_penalty < kInfinity, "repetition_penalty", s.repetition_penalty, "finite and above 0");
  check(std::isfinite(s.presence_penalty), "presence_penalty", s.presence_penalty, "finite");
  check(std::isfinite(s.frequency_penalty), "frequency_penalty", s.frequency_penalty, "finite");
  return s;
}

Sampling read_sampling(const paritree_params& pairs, int64_t vocab) {
  const Params params(pairs);
  Sampling s = sampling_fields(params);
  static const char* const known[] = {"temperature", "top_k", "top_k_ties_all", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                                      "frequency_penalty", "seed"};
  for (int64_t i = 0; i < pairs.count; ++i) {
    const char* key = pairs.items[i].key;
    if (std::strncmp(key, kBias, sizeof kBias - 1) == 0) {
      const int64_t token = std::strtoll(key + sizeof kBias - 1, nullptr, 10);
      if (token < 0 || token >= vocab) invalid("logit_bias names token ", token, ", but the vocabulary has ", vocab);
      s.logit_bias.emplace_back(token, params.number(key));
    } else if (std::none_of(std::begin(known), std::end(known), [key](const char* name) { return std::strcmp(name, key) == 0; })) {
      invalid("sampling has no field ", key);
    }
  }
  return s;
}

int32_t draw(const Sampling& s, const float* logits, int64_t vocab, const std::vector<int32_t>& seen, int64_t prompt_len, const Place& place) {
  std::vector<double> z = penalised(s, logits, vocab, seen, prompt_len);
  const double top = *std::max_element(z.begin(), z.end());
  if (std::any_of(z.begin(), z.end(), [](double value) { return std::isnan(value); }) || !std::isfinite(top)) failed("a row of logits is no distribution");
#ifdef PARITREE_PLANT_SAMPLED_GREEDY
  const bool greedy = s.temperature >= 0;
#else
  const bool greedy = s.temperature == 0;
#endif
  if (greedy) return static_cast<int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
  for (double& value : z) value /= s.temperature;
  truncate(s, z);
  Philox noise(s.seed, static_cast<uint64_t>(place.position), static_cast<uint64_t>(place.sequence));
  int32_t best = -1;
  double best_key = -kInfinity;
  for (int64_t token = 0; token < vocab; ++token) {
    const double uniform = static_cast<double>((noise.next() >> 11) | 1) * 0x1p-53;
    const double key = z[static_cast<std::size_t>(token)] - std::log(-std::log(uniform));
    if (key > best_key) {
      best = static_cast<int32_t>(token);
      best_key = key;
    }
  }
  return best;
}

Philox::Philox(uint64_t seed, uint64_t position, uint64_t sequence) : key_{seed, position}, sequence_(sequence) {}

uint64_t Philox::next() {
  if (used_ == 4) {
    const auto high = [](uint64_t a, uint64_t b) {  // of the 128-bit product, by halves: there is no portable 128-bit integer
      const uint64_t a0 = a & 0xFFFFFFFF, a1 = a >> 32, b0 = b & 0xFFFFFFFF, b1 = b >> 32;
      const uint64_t middle = a1 * b0 + ((a0 * b0) >> 32);
      return a1 * b1 + (middle >> 32) + ((a0 * b1 + (middle & 0xFFFFFFFF)) >> 32);
    };
    uint64_t c[4] = {++block_, sequence_, 0, 0}, k0 = key_[0], k1 = key_[1];
    for (int round = 0; round < 10; ++round) {
      const uint64_t m0 = 0xD2E7470EE14C6C93, m1 = 0xCA5A826395121157;
      const uint64_t n0 = high(m1, c[2]) ^ c[1] ^ k0, n2 = high(m0, c[0]) ^ c[3] ^ k1;
      c[1] = m1 * c[2];
      c[3] = m0 * c[0];
      c[0] = n0;
      c[2] = n2;
      k0 += 0x9E3779B97F4A7C15;
      k1 += 0xBB67AE8584CAA73B;
    }
    std::copy_n(c, 4, words_);
    used_ = 0;
  }
  return words_[used_++];
}

}  // namespace paritree
