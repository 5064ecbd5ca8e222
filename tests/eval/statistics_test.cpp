#include "eval/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "runtime/error.h"

namespace tessera::eval {
namespace {

const double kInfinity = std::numeric_limits<double>::infinity();

struct Known {
  double at, freedom, value;
};

// scipy 1.17.1: stats.t.ppf(at, freedom).
constexpr Known kQuantiles[] = {
    {0.975, 1, 12.706204736174694},    {0.975, 2, 4.3026527297494619},
    {0.975, 9, 2.2621571627982049},    {0.975, 5.882352941176471, 2.4588237096991459},
    {0.95, 3.5, 2.2224334936496004},   {0.995, 29, 2.7563859036706049},
    {0.975, 1000, 1.9623390808264083}, {0.025, 4, -2.7764451051977943},
    {0.6, 0.5, 0.3979754267847907},    {0.9999995, 7, 15.767009437672508}};
// scipy 1.17.1: 2 * stats.t.sf(abs(at), freedom).
constexpr Known kTails[] = {
    {1, 1, 0.50000000000000011},    {2.5, 4, 0.066766544811988141},      {0.1, 9, 0.92253644795668122},
    {12, 3, 0.0012450158007893362}, {-3.25, 9.5, 0.0093155420272100047}, {40, 2, 0.0006244146721847406},
    {1e-8, 5, 0.99999999240786619}, {6, 200, 9.1151203488103459e-09},    {1e6, 1, 6.3661977236736911e-07}};

TEST(Statistics, MedianIsTheMiddleOrTheMeanOfBoth) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({7}), 7);
  EXPECT_EQ(median({5, 1, 3}), 3);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
}

TEST(Statistics, TailsAndQuantilesOfStudentsTAreThoseOfScipy) {
  for (const Known& known : kQuantiles)
    EXPECT_NEAR(student_quantile(known.at, known.freedom), known.value, 1e-11 * std::abs(known.value))
        << known.at << " " << known.freedom;
  for (const Known& known : kTails)
    EXPECT_NEAR(student_tail(known.at, known.freedom), known.value, 1e-12 * known.value)
        << known.at << " " << known.freedom;
  EXPECT_EQ(student_quantile(0.5, 3), 0);
  EXPECT_EQ(student_tail(0, 3), 1);
  EXPECT_EQ(student_tail(kInfinity, 3), 0);
  for (const double p : {0.0, 1.0, -1.0, 2.0}) EXPECT_THROW(student_quantile(p, 3), Error) << p;
  EXPECT_THROW(student_tail(1, 0), Error);
}

// scipy 1.17.1: stats.ttest_rel(a, b) and its confidence_interval(0.95).
TEST(Statistics, APairedDifferenceIsThatOfScipy) {
  const Interval d = paired_difference({0.81, 0.79, 0.84, 0.80, 0.83}, {0.80, 0.80, 0.81, 0.78, 0.79});
  EXPECT_EQ(d.n, 5);
  EXPECT_NEAR(d.mean, 0.018, 1e-15);
  EXPECT_NEAR(d.deviation, 0.01923538406167131, 1e-15);
  EXPECT_NEAR(d.low(), -0.005883883880999793, 1e-13);
  EXPECT_NEAR(d.high(), 0.041883883880999735, 1e-13);
  EXPECT_NEAR(d.p, 0.10453999977837544, 1e-12);
  EXPECT_THROW(paired_difference({1, 2}, {1}), Error);
}

TEST(Statistics, AnIntervalOfOneValueOrOfEqualOnes) {
  const Interval one = interval_of({3});
  EXPECT_EQ(one.mean, 3);
  EXPECT_EQ(one.half, kInfinity);
  EXPECT_TRUE(std::isnan(one.p));
  const Interval equal = interval_of({2, 2, 2});
  EXPECT_EQ(equal.half, 0);
  EXPECT_TRUE(std::isnan(equal.p));
  EXPECT_EQ(interval_of({0.1, 0.1, 0.1}).mean, 0.1);  // their sum is rounded
  EXPECT_EQ(interval_of({0.1, 0.1, 0.1}).half, 0);
  EXPECT_EQ(paired_difference({1, 2}, {1, 2}).p, 1);
  EXPECT_THROW(interval_of({}), Error);
}

// Of scores of few examples: each difference is a tenth, rounded otherwise, which is no noise.
TEST(Statistics, EqualDifferencesTellNoNoiseHoweverTheyAreRounded) {
  const std::vector<double> a = {0.7, 0.4, 0.1}, b = {0.6, 0.3, 0.0};
  ASSERT_NE(a[0] - b[0], a[1] - b[1]);
  const Interval d = paired_difference(a, b);
  EXPECT_NEAR(d.mean, 0.1, 1e-15);
  EXPECT_EQ(d.deviation, 0);
  EXPECT_TRUE(std::isnan(d.p));
  EXPECT_EQ(paired_difference({0.1 + 0.2, 0.4}, {0.3, 0.4}).p, 1);  // 4e-17 and 0
  EXPECT_LT(paired_difference({1, 1}, {0.5, 0.5 + 1e-9}).p, 1e-8);  // small, but no rounding
}

// By hand: sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 are 0.04, 0.06, 0.06, 0.04; none below the one
// before.
TEST(Statistics, HolmsCorrectionByHand) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> corrected = holm({0.04, nan, 0.01, 0.03, 0.02});
  for (const auto& [i, value] : {std::pair(0, 0.06), {2, 0.04}, {3, 0.06}, {4, 0.06}})
    EXPECT_NEAR(corrected[size_t(i)], value, 1e-15) << i;
  EXPECT_TRUE(std::isnan(corrected[1]));
  EXPECT_EQ(holm({0.6, 0.7}), (std::vector<double>{1, 1}));
  EXPECT_EQ(holm({0.01}), std::vector<double>{0.01});
  EXPECT_TRUE(holm({}).empty());
}

// scipy 1.17.1: stats.ttest_ind(a, b, equal_var=False): 5.882 degrees of freedom.
TEST(Statistics, WelchsTestIsThatOfScipy) {
  const Difference d = welch({1, 2, 3, 4, 5}, {2, 4, 6, 8, 10});
  EXPECT_DOUBLE_EQ(d.difference, -3);
  EXPECT_NEAR(d.noise, 3.887741643736975, 1e-12);
  EXPECT_NEAR(d.p, 0.10753119493062718, 1e-12);
  EXPECT_LT(welch({1, 1.1, 0.9}, {2, 2.1, 1.9}).p, 0.001);
  EXPECT_TRUE(std::isnan(welch({1}, {1}).p));  // nothing is known of the noise
  // Nor of repeats, also where their mean is rounded.
  for (const std::vector<double>& other : {std::vector<double>{0.1, 0.1, 0.1}, {0.2, 0.2, 0.2}, {1, 2, 3}}) {
    EXPECT_TRUE(std::isinf(welch({0.1, 0.1, 0.1}, other).noise));
    EXPECT_TRUE(std::isnan(welch({0.1, 0.1, 0.1}, other).p));
  }
  EXPECT_THROW(welch({}, {1}), Error);
}

}  // namespace
}  // namespace tessera::eval
