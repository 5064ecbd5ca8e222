#include "ops/generation/sample.h"

#include <algorithm>
#include <cmath>

#include "ops/generation/sample_kernels.h"
#include "ops/generation/sample_math.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"
#include "tensor/transfer.h"

namespace tessera::ops {

void Sampling::validate() const {
  check(temperature >= 0 && std::isfinite(temperature), "sampling: temperature is ", temperature,
        "; expected 0 (greedy) or more");
  check(top_k >= 0, "sampling: top_k is ", top_k, "; expected 0 (all) or more");
  check(top_p > 0 && top_p <= 1, "sampling: top_p is ", top_p, "; expected more than 0 and at most 1");
}

double choice_number(uint64_t seed, uint64_t index, uint64_t sequence) {
  return double(choice_bits(seed, sequence, index)) * 0x1p-53;
}

int64_t sample(std::span<const float> logits, const Sampling& sampling, double random, Site site) {
  const CallScope call(site);
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
  const int64_t first = *std::min_element(order.begin(), order.end(), larger);
  if (sampling.temperature == 0) return first;
  const auto weight = [&](int64_t token) {
    return logit_weight(logits[size_t(token)], logits[size_t(first)], sampling.temperature);
  };
  const auto sum_of = [&] {
    uint64_t sum = 0;
    for (const int64_t token : order) sum += weight(token);
    return sum;
  };
  if (sampling.top_k > 0 && sampling.top_k < int64_t(order.size())) {
    std::nth_element(order.begin(), order.begin() + (sampling.top_k - 1), order.end(), larger);
    order.resize(size_t(sampling.top_k));
  }
  if (sampling.top_p < 1) {
    std::sort(order.begin(), order.end(), larger);
    const uint64_t need = needed_weight(sampling.top_p, sum_of());
    uint64_t sum = 0;
    size_t kept = 0;
    while (sum < need) sum += weight(order[kept++]);
    order.resize(kept);
  }
  std::sort(order.begin(), order.end());
  const uint64_t place = place_of(uint64_t(random * 0x1p53), sum_of());
  uint64_t sum = 0;
  for (const int64_t token : order) {
    sum += weight(token);
    if (sum > place) return token;
  }
  fail_at(Site::here(), "sampling: the random number ", random, " is not below 1");
}

Choices::Choices(int64_t batch, int64_t most, Device device)
    : next(Tensor::zeros({batch, 1}, DType::i64, device)),
      counts(Tensor::zeros({batch}, DType::i64, device)),
      seed(Tensor::zeros({1}, DType::i64, device)),
      history(Tensor::empty_pinned({batch, std::max<int64_t>(1, most)}, DType::i64)) {
  history.fill(double(kNone));
}

void Choices::restart(uint64_t given) const {
  counts.fill(0);
  seed.copy_from(Tensor::from(std::vector<int64_t>{int64_t(given)}, {1}));
}

void sample_cpu(const Choices& choices, const Tensor& logits, const Sampling& sampling) {
  const Tensor rows = logits.to(DType::f32);
  const uint64_t seed = uint64_t(choices.seed.data<int64_t>()[0]);
  for (int64_t b = 0; b < rows.size(0); ++b) {
    const auto row = rows.select(0, b).to_vector<float>();
    const int64_t at = choices.counts.data<int64_t>()[b]++;
    const int64_t token = sample(row, sampling, choice_number(seed, uint64_t(at), uint64_t(b)));
    choices.next.data<int64_t>()[b] = token;
    if (at < choices.history.size(1))
      choices.history.data<int64_t>()[b * choices.history.size(1) + at] = token;
  }
}

void sample(const Choices& choices, const Tensor& logits, const Sampling& sampling, Site site) {
  const CallScope call(site);
  sampling.validate();
  check(logits.defined() && logits.rank() == 2 && is_floating(logits.dtype()), "sample: logits is ",
        logits.defined() ? describe(logits) : Describe{choices.next}, "; expected floating [B, V]");
  check(logits.size(0) == choices.counts.size(0) && logits.size(1) >= 1, "sample: logits is ",
        describe(logits), "; expected rows of ", choices.counts.size(0), " sequences");
  check(logits.device() == choices.counts.device(), "sample: logits is ", describe(logits),
        ", but the choices are on ", choices.counts.device().name());
  choices.next.bump_version();
  const Tensor rows = logits.detach().with_rows();
  if (logits.device().is_cpu()) {
    sample_cpu(choices, rows, sampling);
  } else if constexpr (kCuda) {
    sample_cuda(choices, rows, sampling);
    keep_until_done(choices.history, logits.device());
  }
}

Tensor advance(const Tensor& lengths, int64_t n, Site site) {
  const CallScope call(site);
  check(lengths.defined() && lengths.rank() == 1 && lengths.dtype() == DType::i32, "advance: lengths is ",
        describe(lengths), "; expected i32 [B]");
  check(lengths.layout().is_packed(), "advance: lengths ", describe(lengths),
        " is not packed; it is written in place");
  check(n >= 1, "advance: ", n, " tokens; expected 1 or more");
  const Tensor positions = Tensor::empty_packed({lengths.size(0), n}, DType::i32, lengths.device());
  lengths.bump_version();
  if (lengths.device().is_cpu()) {
    for (int64_t b = 0; b < lengths.size(0); ++b) {
      int32_t& length = lengths.data<int32_t>()[b];
      for (int64_t i = 0; i < n; ++i) positions.data<int32_t>()[b * n + i] = length + int32_t(i);
      length += int32_t(n);
    }
  } else if constexpr (kCuda) {
    advance_cuda(lengths, positions);
  }
  return positions;
}

}  // namespace tessera::ops
