#include "sparsity/nulls.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "ops/bits/bits.h"

namespace tessera::sparsity {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kTradesPerFeature = 5;

Features zeros_like(const Features& observed) {
  return {Tensor::zeros(observed.bits.shape(), DType::i32, Device::cpu()), observed.length};
}
uint32_t* row_of(const Features& features, int64_t index) {
  return static_cast<uint32_t*>(features.bits.raw()) + index * features.bits.row_stride();
}

/// 32 bits that are each 1 with probability `odds` / 2^24: from the lowest set bit of odds upwards, a random
/// bit halves what has come so far and adds one half where odds has a one.
uint32_t random_word(uint32_t odds, Draws& draws) {
  if (odds == 0) return 0;
  if (odds >> 24) return ~0u;
  uint32_t word = 0;
  for (int bit = std::countr_zero(odds); bit < 24; ++bit)
    word = odds >> bit & 1 ? word | draws.word() : word & draws.word();
  return word;
}

void draw_independent(const Features& drawn, double density, Draws& draws) {
  const auto odds = uint32_t(std::llround(density * double(1 << 24)));
  const int64_t words = drawn.bits.size(1), tail = drawn.length % 32;
  for (int64_t i = 0; i < drawn.count(); ++i) {
    for (int64_t w = 0; w < words; ++w) row_of(drawn, i)[w] = random_word(odds, draws);
    if (tail > 0) row_of(drawn, i)[words - 1] &= (1u << tail) - 1;
  }
}

void draw_shuffled(const Features& drawn, const Features& observed, Draws& draws) {
  const Tensor counts = ops::count_bits(observed.bits);
  std::vector<uint32_t> positions(static_cast<size_t>(observed.length));
  for (int64_t i = 0; i < drawn.count(); ++i) {
    std::iota(positions.begin(), positions.end(), 0u);
    for (int64_t n = 0; n < counts.data<int32_t>()[i]; ++n) {
      const auto at = size_t(n + draws.below(observed.length - n));
      std::swap(positions[size_t(n)], positions[at]);
      row_of(drawn, i)[positions[size_t(n)] / 32] |= 1u << positions[size_t(n)] % 32;
    }
  }
}

/// The positions that only one of two features keeps are dealt out again, each feature getting as many.
void trade(uint32_t* a, uint32_t* b, int64_t words, std::vector<uint32_t>& open, Draws& draws) {
  open.clear();
  int64_t of_a = 0;
  for (int64_t w = 0; w < words; ++w) {
    of_a += std::popcount(a[w] & ~b[w]);
    for (uint32_t rest = a[w] ^ b[w]; rest != 0; rest &= rest - 1)
      open.push_back(uint32_t(32 * w + std::countr_zero(rest)));
  }
  const auto count = int64_t(open.size());
  if (of_a == 0 || of_a == count) return;
  for (int64_t n = 0; n < count; ++n) {
    if (n < of_a) std::swap(open[size_t(n)], open[size_t(n + draws.below(count - n))]);
    const uint32_t w = open[size_t(n)] / 32, bit = 1u << open[size_t(n)] % 32;
    (n < of_a ? a : b)[w] |= bit;
    (n < of_a ? b : a)[w] &= ~bit;
  }
}

void draw_traded(const Features& drawn, const Features& observed, Draws& draws) {
  const int64_t n = drawn.count(), words = drawn.bits.size(1);
  for (int64_t i = 0; i < n; ++i) std::memcpy(row_of(drawn, i), row_of(observed, i), size_t(words) * 4);
  if (n < 2) return;
  std::vector<uint32_t> open;
  for (int64_t step = 0; step < kTradesPerFeature * n; ++step) {
    const int64_t i = draws.below(n);
    int64_t j = draws.below(n - 1);
    j += j >= i;
    trade(row_of(drawn, i), row_of(drawn, j), words, open, draws);
  }
}

}  // namespace

const char* name_of(NullModel model) {
  return model == NullModel::independent     ? "independent"
         : model == NullModel::rows_shuffled ? "rows_shuffled"
                                             : "sums_kept";
}

Features draw_null(const Features& observed, NullModel model, uint64_t seed, uint64_t number) {
  Features drawn = zeros_like(observed);
  Draws draws(seed, DrawFor::null_model, number * std::size(kNullModels) + uint64_t(model));
  if (model == NullModel::independent) draw_independent(drawn, observed.density(), draws);
  if (model == NullModel::rows_shuffled) draw_shuffled(drawn, observed, draws);
  if (model == NullModel::sums_kept) draw_traded(drawn, observed, draws);
  return drawn;
}

double quantile(std::span<const double> sorted, double q) {
  if (sorted.empty()) return kNan;
  const double at = q * double(sorted.size() - 1);
  const auto below = size_t(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - double(below)) * (sorted[above] - sorted[below]);
}

ChanceLevel chance_level(double observed, std::vector<double> draws) {
  std::erase_if(draws, [](double value) { return std::isnan(value); });
  if (draws.empty() || std::isnan(observed)) return {0, kNan, kNan, kNan, kNan, kNan, kNan};
  std::sort(draws.begin(), draws.end());
  const Summary summary = summarise(draws);
  ChanceLevel level{.draws = int64_t(draws.size()),
                    .mean = summary.mean,
                    .sd = summary.sd,
                    .low = quantile(draws, 0.025),
                    .high = quantile(draws, 0.975)};
  // Draws and observed figures are the same sums: what differs by rounding of the mean alone is equal.
  const double slack = 1e-12 * std::max(1.0, std::abs(summary.mean)),
               away = std::abs(observed - summary.mean);
  level.effect = away <= slack ? 0 : summary.sd > 0 ? (observed - summary.mean) / summary.sd : kNan;
  const auto as_far = std::count_if(draws.begin(), draws.end(), [&](double value) {
    return std::abs(value - summary.mean) + slack >= away;
  });
  level.p = double(1 + as_far) / double(1 + draws.size());
  return level;
}

Interval bootstrap_mean(std::span<const double> values, int64_t resamples, Draws draws) {
  if (values.empty()) return {kNan, kNan};
  std::vector<double> means;
  for (int64_t resample = 0; resample < resamples; ++resample) {
    double sum = 0;
    for (size_t i = 0; i < values.size(); ++i) sum += values[size_t(draws.below(int64_t(values.size())))];
    means.push_back(sum / double(values.size()));
  }
  std::sort(means.begin(), means.end());
  return {quantile(means, 0.025), quantile(means, 0.975)};
}

}  // namespace tessera::sparsity
