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

TEST(VectorMath, TanhAndErfAreWithinTwoUlp) {
  EXPECT_LT(worst_ulp(vector_tanh, std::tanh), 2);
  EXPECT_LT(worst_ulp(vector_error_function, std::erf), 2);
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
  for (float (*const own)(float) : {vector_tanh, vector_error_function}) {
    EXPECT_TRUE(std::isnan(own(std::numeric_limits<float>::quiet_NaN())));
    EXPECT_EQ(own(kInfinity), 1);
    EXPECT_EQ(own(-kInfinity), -1);
    EXPECT_EQ(own(0.0f), 0);
    EXPECT_TRUE(std::signbit(own(-0.0f)));
  }
}

}  // namespace
}  // namespace tessera::ops
