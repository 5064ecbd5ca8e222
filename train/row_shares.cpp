#include "train/row_shares.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "runtime/error.h"

namespace tessera::train {

double sampling_variance(const RowNorms& rows, int64_t k) {
  check(k >= 1 && rows.norms.size() == rows.squares.size(), "row shares: ", k, " of ", rows.norms.size(),
        " rows with ", rows.squares.size(), " squares");
  std::vector<double> falling = rows.norms;
  std::ranges::sort(falling, std::greater());
  std::vector<double> rest(falling.size() + 1, 0);  // sum of the norms from here on
  for (size_t i = falling.size(); i-- > 0;) rest[i] = rest[i + 1] + falling[i];
  // The largest norms have p = 1: each takes one of the k rows, and c is that of the others.
  size_t certain = 0;
  const auto left = [&] { return double(k - int64_t(certain)); };
  while (certain < falling.size() && int64_t(certain) < k && left() * falling[certain] >= rest[certain])
    certain += 1;
  if (rest[certain] <= 0 || left() == 0) return 0;
  const double c = left() / rest[certain];
  double variance = 0;
  for (size_t i = 0; i < rows.norms.size(); ++i)
    if (const double p = c * rows.norms[i]; p > 0 && p < 1) variance += (1 / p - 1) * rows.squares[i];
  return variance;
}

namespace {

/// The options of a group that may be taken, from all rows on: those on the lower convex hull of (variance,
/// seconds), with falling seconds.
std::vector<size_t> hull_of(const std::vector<ShareOption>& options) {
  std::vector<size_t> order(options.size() - 1);
  std::iota(order.begin(), order.end(), 1);
  std::ranges::stable_sort(order, {}, [&](size_t i) { return options[i].variance; });
  std::vector<size_t> hull{0};
  const auto slope = [&](size_t from, size_t to) {
    const double variance = options[to].variance - options[from].variance;
    const double saved = options[from].seconds - options[to].seconds;
    return variance > 0 ? saved / variance : INFINITY;
  };
  for (const size_t i : order) {
    if (options[i].seconds >= options[hull.back()].seconds) continue;
    while (hull.size() > 1 && slope(hull[hull.size() - 2], hull.back()) <= slope(hull.back(), i))
      hull.pop_back();
    hull.push_back(i);
  }
  return hull;
}

}  // namespace

std::vector<size_t> choose_options(const std::vector<std::vector<ShareOption>>& groups, double bound) {
  struct Step {
    size_t group, to;
    double rate, variance;  // seconds saved per variance; variance that it adds
  };
  std::vector<Step> steps;
  for (size_t g = 0; g < groups.size(); ++g) {
    check(!groups[g].empty() && groups[g][0].variance == 0,
          "row shares: the first option of a group is all rows");
    const std::vector<size_t> hull = hull_of(groups[g]);
    for (size_t i = 1; i < hull.size(); ++i) {
      const ShareOption &from = groups[g][hull[i - 1]], &to = groups[g][hull[i]];
      const double variance = to.variance - from.variance;
      steps.push_back({.group = g,
                       .to = hull[i],
                       .rate = variance > 0 ? (from.seconds - to.seconds) / variance : INFINITY,
                       .variance = variance});
    }
  }
  std::ranges::stable_sort(steps, std::greater(), &Step::rate);
  std::vector<size_t> chosen(groups.size(), 0);
  std::vector<bool> ended(groups.size(), false);
  double sum = 0;
  for (const Step& step : steps) {
    if (ended[step.group]) continue;
    if (!(sum + step.variance <= bound)) {
      ended[step.group] = true;  // further steps of the group begin where this one ends
      continue;
    }
    sum += step.variance;
    chosen[step.group] = step.to;
  }
  return chosen;
}

std::vector<double> share_steps() {
  std::vector<double> shares;
  for (int i = 0; i <= 24; ++i) shares.push_back(std::exp2(-i / 4.0));
  return shares;
}

double backward_seconds(double rows, double flops, double columns, double share, bool gpu) {
  if (!gpu) {
    // Norms, gathers and zeros next to GEMMs of some 50 GFLOP/s per core: a few passes over dy and x.
    constexpr double kFlops = 5e10, kPasses = 0.1;
    return flops / kFlops * (share < 1 ? share + kPasses : 1);
  }
  constexpr double kFlops = 6.1e14, kStart = 45e-6;               // the dense backward pass
  constexpr double kChoice = 70e-6, kElementsPerSecond = 2.6e11;  // launches of a choice; its passes over dy
  if (share >= 1) return kStart + flops / kFlops;
  return share * (kStart + flops / kFlops) + kChoice + rows * columns / kElementsPerSecond;
}

}  // namespace tessera::train
