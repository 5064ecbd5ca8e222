#include "models/generate.h"

#include <cmath>
#include <numeric>

#include "runtime/philox.h"

namespace tessera::models {

void Sampling::validate() const {
  check(temperature >= 0 && std::isfinite(temperature), "sampling: temperature is ", temperature,
        "; expected 0 (greedy) or more");
  check(top_k >= 0, "sampling: top_k is ", top_k, "; expected 0 (all) or more");
  check(top_p > 0 && top_p <= 1, "sampling: top_p is ", top_p, "; expected more than 0 and at most 1");
}

double choice_number(uint64_t seed, uint64_t index) {
  const Uint4 random = philox(seed, 0, index);
  // 53 bits: with 24, tokens of small probability behind a long tail could never be drawn.
  return double((uint64_t(random.word[0]) << 21) ^ (random.word[1] >> 11)) * 0x1p-53;
}

int64_t sample(std::span<const float> logits, const Sampling& sampling, double random) {
  std::vector<int64_t> order;
  for (size_t i = 0; i < logits.size(); ++i) {
    check(!std::isnan(logits[i]), "sampling: the logit of token ", i, " is NaN");
    if (logits[i] > -INFINITY) order.push_back(int64_t(i));
  }
  check(!order.empty(), "sampling: no token of ", logits.size(), " can be chosen; all logits are -inf");
  const auto larger = [&](int64_t a, int64_t b) {
    const float x = logits[size_t(a)], y = logits[size_t(b)];
    return x != y ? x > y : a < b;
  };
  if (sampling.temperature == 0) return *std::min_element(order.begin(), order.end(), larger);
  const bool cuts = sampling.top_k > 0 && sampling.top_k < int64_t(order.size());
  if (cuts) {
    std::nth_element(order.begin(), order.begin() + (sampling.top_k - 1), order.end(), larger);
    order.resize(size_t(sampling.top_k));
  }
  if (cuts || sampling.top_p < 1) std::sort(order.begin(), order.end(), larger);
  const double top = logits[size_t(*std::min_element(order.begin(), order.end(), larger))];
  std::vector<double> weights;
  for (const int64_t token : order)
    weights.push_back(std::exp((double(logits[size_t(token)]) - top) / sampling.temperature));
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (sampling.top_p < 1) {
    double sum = 0;
    size_t kept = 0;
    while (kept < weights.size() && sum < sampling.top_p * total) sum += weights[kept++];
    weights.resize(kept);
    total = sum;
  }
  double left = random * total;
  for (size_t i = 0; i < weights.size(); ++i) {
    left -= weights[i];
    if (left < 0) return order[i];
  }
  return order[weights.size() - 1];  // rounding: random was next to 1
}

}  // namespace tessera::models
