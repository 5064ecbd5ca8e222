#include "ops/vector_math_internal.h"

#include "ops/pointwise/exp_log_internal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

// Functions of f32 that vectorise, next to those of the C library in f64.

namespace tessera::ops {
namespace {

/// The largest error in ulp of the result, over floats of every exponent and both signs.
double worst_ulp(float (*own)(float), double (*exact)(double)) {
  double worst = 0;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 65521) {
    const float x = std::bit_cast<float>(uint32_t(bits));
    if (!std::isfinite(x)) continue;
    const double right = exact(double(x));
    const float rounded = std::fabs(float(right));
    if (!std::isfinite(rounded)) continue;
    const double ulp =
        double(std::nextafter(rounded, std::numeric_limits<float>::infinity())) - double(rounded);
    worst = std::max(worst, std::fabs(double(own(x)) - right) / ulp);
  }
  return worst;
}

TEST(VectorMath, TanhIsWithinTwoUlp) {
  EXPECT_LT(worst_ulp(vector_tanh, std::tanh), 2);
}

double normal_cdf(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}

TEST(VectorMath, TheNormalDistributionIsAccurateInItsTail) {
  const auto upper = [](float x) { return vector_normal(std::fabs(x)).cdf; };
  EXPECT_LT(worst_ulp(upper, [](double x) { return normal_cdf(std::fabs(x)); }), 1.5);
  for (float x = -6; x < 0; x += 0.001f) {
    EXPECT_NEAR(vector_normal(x).cdf / normal_cdf(double(x)), 1, 4e-5) << x;
    EXPECT_NEAR(vector_normal(x).bell / std::exp(-0.5 * double(x) * double(x)), 1, 4e-6) << x;
  }
}

TEST(VectorMath, TheNormalDistributionHasItsLimits) {
  for (const float x : {17.0f, 1e13f, 1e30f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(vector_normal(x).cdf, 1);
    EXPECT_EQ(vector_normal(-x).cdf, 0);
    EXPECT_EQ(vector_normal(x).bell, 0);
    EXPECT_EQ(vector_normal(-x).bell, 0);
  }
  for (const float x : {0.0f, -0.0f, 1e-30f, -std::numeric_limits<float>::denorm_min()}) {
    EXPECT_EQ(vector_normal(x).cdf, 0.5f);
    EXPECT_EQ(vector_normal(x).bell, 1);
  }
  EXPECT_TRUE(std::isnan(vector_normal(std::numeric_limits<float>::quiet_NaN()).cdf));
  EXPECT_TRUE(std::isnan(vector_normal(std::bit_cast<float>(0xFFC12345u)).cdf));
}

/// Flushed to 0 below 2^-126.
double flushed_exponential(double x) {
  return x < -87.33654 ? 0 : std::exp(x);
}

TEST(VectorMath, ExponentialOfNormalNumbersIsWithinOneUlp) {
  EXPECT_LT(worst_ulp(vector_exponential, flushed_exponential), 1);
  EXPECT_NEAR(vector_exponential(88.72283f) / std::exp(double(88.72283f)), 1, 1e-7);
  EXPECT_NEAR(vector_exponential(-87.33654f) / std::exp(double(-87.33654f)), 1, 1e-7);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float x : {88.72284f, 200.0f, std::numeric_limits<float>::max(), kInfinity})
    EXPECT_EQ(vector_exponential(x), kInfinity) << x;
  for (const float x : {-87.33655f, -200.0f, std::numeric_limits<float>::lowest(), -kInfinity})
    EXPECT_EQ(vector_exponential(x), 0) << x;
  // NaN with any payload: its low bits must not become an exponent.
  for (const uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7FC00001u, 0xFFC001FFu, 0x7FFFFFFFu})
    EXPECT_TRUE(std::isnan(vector_exponential(std::bit_cast<float>(bits)))) << bits;
}

TEST(VectorMath, ExpAndLogAreWithinOneAndAHalfUlpOverTheWholeRange) {
  EXPECT_LT(worst_ulp(full_exponential, std::exp), 1.5);
  EXPECT_LT(worst_ulp(full_logarithm, std::log), 1.5);
}

TEST(VectorMath, ExpAndLogHaveTheLibrarysSpecialValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                  kSmallest = std::numeric_limits<float>::denorm_min(),
                  kLargest = std::numeric_limits<float>::max(),
                  kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const float x : {0.0f, -0.0f, 1.0f, kSmallest, -kSmallest, 88.7228f, 88.7229f, 89.0f, 200.0f, kLargest,
                        kInfinity, -87.4f, -103.9f, -103.98f, -200.0f, -kLargest, -kInfinity})
    EXPECT_FLOAT_EQ(full_exponential(x), std::exp(x)) << x;
  EXPECT_EQ(full_exponential(-103.9f), kSmallest);
  for (const float x : {0.0f, -0.0f, 1.0f, kSmallest, 3 * kSmallest, kLargest, kInfinity})
    EXPECT_FLOAT_EQ(full_logarithm(x), std::log(x)) << x;
  for (const float x : {-kSmallest, -1.0f, -kInfinity, kNaN, -kNaN})
    EXPECT_TRUE(std::isnan(full_logarithm(x))) << x;
  for (const float x : {kNaN, -kNaN}) EXPECT_TRUE(std::isnan(full_exponential(x))) << x;
}

TEST(VectorMath, SpecialValuesAreThoseOfTheLibrary) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isnan(vector_tanh(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(vector_tanh(kInfinity), 1);
  EXPECT_EQ(vector_tanh(-kInfinity), -1);
  EXPECT_EQ(vector_tanh(0.0f), 0);
  EXPECT_TRUE(std::signbit(vector_tanh(-0.0f)));
}

}  // namespace
}  // namespace tessera::ops
