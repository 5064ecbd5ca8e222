#include "ops/vector_math_internal.h"

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
