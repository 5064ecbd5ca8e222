#include "eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "runtime/error.h"

namespace tessera::eval {
namespace {

/// The continued fraction of the incomplete beta function (Abramowitz and Stegun 26.5.8), evaluated from the
/// front by Lentz's method; converges fast for x < (a + 1) / (a + b + 2).
double beta_fraction(double x, double a, double b) {
  constexpr double kTiny = 1e-300, kEnough = 1e-16;
  constexpr int kMost = 10'000;  // some sqrt(max(a, b)) terms are needed
  const auto away_from_zero = [](double value) { return std::abs(value) < kTiny ? kTiny : value; };
  double c = 1, d = 1 / away_from_zero(1 - (a + b) * x / (a + 1)), sum = d;
  for (int m = 1; m <= kMost; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    double step = 1;
    for (const double term : {even, odd}) {
      d = 1 / away_from_zero(1 + term * d);
      c = away_from_zero(1 + term / c);
      step = c * d;
      sum *= step;
    }
    if (std::abs(step - 1) < kEnough) break;
  }
  return sum;
}

/// The regularised incomplete beta function I_x(a, b); `y` is 1 - x, which the caller knows without
/// cancellation.
double beta_share(double x, double y, double a, double b) {
  if (x <= 0) return 0;
  if (y <= 0) return 1;
  const double front =
      std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log(y));
  if (x < (a + 1) / (a + b + 2)) return front * beta_fraction(x, a, b) / a;
  return 1 - front * beta_fraction(y, b, a) / b;
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

Spread spread_of(const std::vector<double>& values) {
  if (!values.empty() && !tells_noise(values)) return {values.front(), 0};  // their sum is rounded
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return {mean, values.size() > 1 ? std::sqrt(squares / double(values.size() - 1)) : 0};
}

double student_tail(double t, double freedom) {
  check(freedom > 0, "Student's t: ", freedom, " degrees of freedom; expected more than 0");
  if (std::isinf(t)) return 0;
  const double square = t * t, sum = freedom + square;
  return beta_share(freedom / sum, square / sum, freedom / 2, 0.5);
}

double student_quantile(double p, double freedom) {
  check(p > 0 && p < 1, "Student's t: the quantile of ", p, "; expected a probability between 0 and 1");
  if (p == 0.5) return 0;
  const double tail = 2 * std::min(p, 1 - p);
  double low = 0, high = 1;
  while (student_tail(high, freedom) > tail && high < 1e300) low = high, high *= 2;
  // Until no number lies between the two.
  for (double middle = (low + high) / 2; middle > low && middle < high; middle = (low + high) / 2)
    (student_tail(middle, freedom) > tail ? low : high) = middle;
  return p < 0.5 ? -high : high;
}

Interval interval_of(const std::vector<double>& values) {
  check(!values.empty(), "statistics: an interval of no values");
  const Spread spread = spread_of(values);
  Interval result{.n = int64_t(values.size()), .mean = spread.mean, .deviation = spread.deviation};
  if (values.size() == 1) {
    result.half = std::numeric_limits<double>::infinity();
    result.p = std::numeric_limits<double>::quiet_NaN();
    return result;
  }
  const double freedom = double(values.size() - 1),
               error = spread.deviation / std::sqrt(double(values.size()));
  result.half = student_quantile(0.975, freedom) * error;
  result.p = error > 0          ? student_tail(spread.mean / error, freedom)
             : spread.mean == 0 ? 1
                                : std::numeric_limits<double>::quiet_NaN();
  return result;
}

Interval paired_difference(const std::vector<double>& a, const std::vector<double>& b) {
  check(a.size() == b.size(), "statistics: ", a.size(), " values cannot be paired with ", b.size());
  std::vector<double> differences;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    differences.push_back(a[i] - b[i]);
    largest = std::max({largest, std::abs(a[i]), std::abs(b[i])});
  }
  // Scores of few examples are shares that a few operations have rounded.
  const double rounding = 16 * std::numeric_limits<double>::epsilon() * largest;
  if (differences.empty()) return interval_of(differences);  // throws
  if (const auto [least, most] = std::ranges::minmax(differences); most - least <= rounding)
    std::ranges::fill(differences, std::abs(least) <= rounding && std::abs(most) <= rounding ? 0 : least);
  return interval_of(differences);
}

bool tells_noise(const std::vector<double>& values) {
  return std::ranges::adjacent_find(values, std::ranges::not_equal_to()) != values.end();
}

Difference welch(const std::vector<double>& a, const std::vector<double>& b) {
  check(!a.empty() && !b.empty(), "welch: an empty sample");
  const Spread of_a = spread_of(a), of_b = spread_of(b);
  Difference result{of_a.mean - of_b.mean, std::numeric_limits<double>::infinity(),
                    std::numeric_limits<double>::quiet_NaN()};
  if (!tells_noise(a) || !tells_noise(b)) return result;
  const double error_a = of_a.deviation * of_a.deviation / double(a.size()),
               error_b = of_b.deviation * of_b.deviation / double(b.size()), both = error_a + error_b;
  const double freedom =
      both * both / (error_a * error_a / double(a.size() - 1) + error_b * error_b / double(b.size() - 1));
  result.noise = student_quantile(0.975, freedom) * std::sqrt(both);
  result.p = student_tail(result.difference / std::sqrt(both), freedom);
  return result;
}

std::vector<double> holm(const std::vector<double>& p) {
  std::vector<size_t> order;
  for (size_t i = 0; i < p.size(); ++i)
    if (!std::isnan(p[i])) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] < p[b]; });
  std::vector<double> corrected = p;
  double largest = 0;
  for (size_t rank = 0; rank < order.size(); ++rank) {
    largest = std::max(largest, double(order.size() - rank) * p[order[rank]]);
    corrected[order[rank]] = std::min(1.0, largest);
  }
  return corrected;
}

}  // namespace tessera::eval
