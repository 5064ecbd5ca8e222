#include "sparsity/scores.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/activation/activation.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "runtime/parallel.h"

namespace tessera::sparsity {
namespace {

/// One over x, and 0 where x is 0: x >= 0.
Tensor reciprocal(const Tensor& x) {
  const std::vector<float> values = x.to_vector<float>();
  std::vector<float> inverse(values.size());
  for (size_t i = 0; i < values.size(); ++i) inverse[i] = values[i] > 0 ? 1 / values[i] : 0;
  return Tensor::from(inverse, x.shape(), x.device());
}

/// The scores of each row in ascending order with their places, and their sums up to there.
struct SortedRow {
  std::vector<int64_t> order;
  std::vector<double> sums;
};

std::vector<SortedRow> sorted_rows(const std::vector<float>& scores, int64_t rows, int64_t columns) {
  std::vector<SortedRow> sorted(static_cast<size_t>(rows));
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* const row = scores.data() + r * columns;
      SortedRow& one = sorted[size_t(r)];
      one.order.resize(size_t(columns));
      std::iota(one.order.begin(), one.order.end(), 0);
      std::stable_sort(one.order.begin(), one.order.end(),
                       [&](int64_t a, int64_t b) { return row[a] < row[b]; });
      double sum = 0;
      for (const int64_t c : one.order) one.sums.push_back(sum += row[c]);
    }
  });
  return sorted;
}

int64_t dropped_of(const SortedRow& row, double alpha) {
  return std::upper_bound(row.sums.begin(), row.sums.end(), alpha * row.sums.back()) - row.sums.begin();
}

}  // namespace

Tensor magnitude(const Tensor& x) {
  return ops::add(ops::relu(x), ops::relu(ops::scale(x, -1)));
}

Tensor input_norms(const InputStatistics& inputs, int64_t samples) {
  return ops::sqrt(ops::scale(inputs.squares(), 1 / double(samples))).to(DType::f32);
}

Tensor score_matrix(const Tensor& weight, const InputStatistics* inputs, int64_t samples,
                    const PruneOptions& options) {
  const Tensor sizes = magnitude(weight);
  if (options.score == Score::magnitude) return sizes;
  check(inputs != nullptr, "prune: the score ", name_of(options.score), " needs statistics of the inputs");
  const Tensor norms = input_norms(*inputs, samples);
  if (options.score == Score::wanda) return ops::mul(sizes, norms);
  check(options.score == Score::ria, "prune: the score ", name_of(options.score),
        " belongs to the update's Hessian");
  const Tensor of_rows = reciprocal(ops::sum(sizes, 1, true)),
               of_columns = reciprocal(ops::sum(sizes, 0, true));
  const Tensor relative = ops::add(ops::mul(sizes, of_columns), ops::mul(sizes, of_rows));
  std::vector<float> powers = norms.to_vector<float>();
  for (float& norm : powers) norm = std::pow(norm, float(options.ria_power));
  return ops::mul(relative, Tensor::from(powers, norms.shape(), norms.device()));
}

Tensor keep_by_score(const Tensor& scores, double sparsity, const PruneOptions& options,
                     const std::string& matrix) {
  if (options.pattern.structured())
    return ops::keep_largest(
        scores,
        {.within = ops::KeepWithin::group, .zeros = options.pattern.zeros, .group = options.pattern.group});
  if (options.variant) return keep_by_row_sums(scores, sparsity, matrix);
  const ops::KeepWithin within = options.keep_within();
  const int64_t among = within == ops::KeepWithin::row ? scores.size(1) : scores.count();
  return ops::keep_largest(scores,
                           {.within = within, .zeros = int64_t(double(among) * sparsity), .group = 0});
}

Tensor keep_by_row_sums(const Tensor& scores, double sparsity, const std::string& matrix) {
  const int64_t rows = scores.size(0), columns = scores.size(1);
  const std::vector<SortedRow> sorted = sorted_rows(scores.to_vector<float>(), rows, columns);
  if (std::ranges::all_of(sorted, [](const SortedRow& row) { return row.sums.back() == 0; }))
    return ops::keep_largest(
        scores, {.within = ops::KeepWithin::row, .zeros = int64_t(double(columns) * sparsity), .group = 0});
  const auto reached = [&](double alpha) {
    int64_t dropped = 0;
    for (const SortedRow& row : sorted) dropped += dropped_of(row, alpha);
    return double(dropped) / double(rows * columns);
  };
  constexpr double kEnough = 0.001, kMostOff = 0.01;
  double low = 0, high = 0.8, alpha = 0.4, share = reached(alpha), best = alpha;
  double off = std::abs(share - sparsity);
  for (int step = 0; step < 60 && off > kEnough; ++step) {
    (share > sparsity ? high : low) = alpha;
    alpha = (low + high) / 2;
    share = reached(alpha);
    if (std::abs(share - sparsity) < off) off = std::abs(share - sparsity), best = alpha;
  }
  alpha = best;
  check(off <= kMostOff, "prune: Wanda's variant drops a share of ", reached(alpha), " of ", matrix,
        " at the nearest, not ", sparsity, "; choose another sparsity, or leave out --variant");
  std::vector<uint8_t> keep(size_t(rows * columns), 1);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < dropped_of(sorted[size_t(r)], alpha); ++i)
      keep[size_t(r * columns + sorted[size_t(r)].order[size_t(i)])] = 0;
  return Tensor::from(keep, scores.shape(), scores.device());
}

}  // namespace tessera::sparsity
