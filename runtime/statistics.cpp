#include "runtime/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "runtime/error.h"

namespace tessera {
namespace {

using Values = std::span<const double>;

constexpr double kUndefined = std::numeric_limits<double>::quiet_NaN();

/// By value: the rounded mean of equal values may differ from them.
bool is_constant(Values values) {
  return std::ranges::adjacent_find(values, std::ranges::not_equal_to()) == values.end();
}

bool has_nan(Values values) {
  return std::ranges::any_of(values, [](double value) { return std::isnan(value); });
}

double mean_of(Values values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

/// Ranks from 1; equal values share the mean of theirs.
std::vector<double> ranks_of(Values values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  for (size_t i = 0, end = 0; i < order.size(); i = end) {
    for (end = i + 1; end < order.size() && values[order[end]] == values[order[i]];) ++end;
    for (size_t k = i; k < end; ++k) ranks[order[k]] = double(i + end + 1) / 2;
  }
  return ranks;
}

}  // namespace

double pearson(Values x, Values y) {
  check(x.size() == y.size(), "correlation: ", x.size(), " and ", y.size(), " values; expected as many");
  if (x.size() < 2 || is_constant(x) || is_constant(y)) return kUndefined;
  const double mean_x = mean_of(x), mean_y = mean_of(y);
  double both = 0, of_x = 0, of_y = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double a = x[i] - mean_x, b = y[i] - mean_y;
    both += a * b, of_x += a * a, of_y += b * b;
  }
  return std::clamp(both / std::sqrt(of_x * of_y), -1.0, 1.0);  // but for rounding
}

double spearman(Values x, Values y) {
  if (has_nan(x) || has_nan(y)) return kUndefined;  // they have no order
  return pearson(ranks_of(x), ranks_of(y));
}

}  // namespace tessera
