#pragma once

#include <cstdint>
#include <vector>

/// Statistics of a few runs: means with intervals by Student's t distribution, paired differences, and
/// Holm's correction where several are tested at once.

namespace tessera::eval {

/// The middle of the values, of an even number of them the mean of both middles; 0 if there are none.
double median(std::vector<double> values);

/// Mean and standard deviation (of the sample, with n - 1; 0 for one value) of one value or more.
struct Spread {
  double mean = 0, deviation = 0;
};
Spread spread_of(const std::vector<double>& values);

/// P(|T| > |t|) of Student's t distribution with `freedom` > 0 degrees of freedom, which need not be whole;
/// relative error below 1e-12 up to 100 degrees of freedom, 1e-8 up to a million. 0 for an infinite t.
double student_tail(double t, double freedom);
/// The t with P(T <= t) = p, 0 < p < 1.
double student_quantile(double p, double freedom);

/// The mean of a sample with its 95 % interval mean +- half, and the p-value of the mean being 0 (two-sided
/// t-test). One value tells nothing about the noise: `half` is infinite and p is NaN. Values that are all
/// equal do not tell it either: `half` is 0, and p is NaN, or 1 if they are 0.
struct Interval {
  int64_t n = 0;
  double mean = 0, deviation = 0, half = 0, p = 0;
  double low() const { return mean - half; }
  double high() const { return mean + half; }
};
/// Of one value or more.
Interval interval_of(const std::vector<double>& values);
/// Of the differences a[i] - b[i] (the paired t-test). Those that differ by rounding alone are equal.
Interval paired_difference(const std::vector<double>& a, const std::vector<double>& b);

/// Whether a sample tells the noise: of one value, or of values that are all equal, as those of one run that
/// was repeated, it does not.
bool tells_noise(const std::vector<double>& values);

/// The difference of the means of two samples, the half width of its 95 % interval and the p-value of it
/// being 0, by Welch's t-test (B. L. Welch, Biometrika 34, 1947): variances may differ, runs are independent.
/// Where a sample does not tell the noise, `noise` is infinite and p is NaN.
struct Difference {
  double difference = 0, noise = 0, p = 0;
};
Difference welch(const std::vector<double>& a, const std::vector<double>& b);

/// p-values corrected for being tested together (S. Holm, Scandinavian Journal of Statistics 6, 1979), in the
/// order given: the probability of a wrong rejection among all is at most the level. NaN stays, and does not
/// count as a test.
std::vector<double> holm(const std::vector<double>& p);

/// The level of all tests here: what a p-value, corrected where several are tested together, must be below
/// for a difference to be beyond the noise.
inline constexpr double kLevel = 0.05;

}  // namespace tessera::eval
