#include "ops/keep_largest/keep_largest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/errors.h"

namespace tessera::ops {
namespace {

using Keep = std::vector<uint8_t>;

Keep kept_scores(const std::vector<float>& scores, int64_t rows, const KeepLargest& how,
                 Device device = Device::cpu()) {
  const Shape shape{rows, int64_t(scores.size()) / rows};
  return keep_largest(Tensor::from(scores, shape, device), how).to_vector<uint8_t>();
}

TEST(KeepLargest, DropsTheLowestIndexOfEqualScores) {
  EXPECT_EQ(kept_scores({2, 1, 1, 1, 3, 1}, 1, {.zeros = 2}), (Keep{1, 0, 0, 1, 1, 1}));
  EXPECT_EQ(kept_scores({1, 1, 1, 1}, 2, {.within = KeepWithin::matrix, .zeros = 3}), (Keep{0, 0, 0, 1}));
  EXPECT_EQ(kept_scores({1, 1, 1, 1, 0, 5}, 1, {.within = KeepWithin::group, .zeros = 1, .group = 3}),
            (Keep{0, 1, 1, 1, 0, 1}));
}

TEST(KeepLargest, ZeroHasNoSignAndNanIsLargest) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = INFINITY,
              tiny = std::numeric_limits<float>::denorm_min();
  for (const KeepLargest& how :
       {KeepLargest{.zeros = 2}, KeepLargest{.within = KeepWithin::matrix, .zeros = 2},
        KeepLargest{.within = KeepWithin::group, .zeros = 2, .group = 4}}) {
    EXPECT_EQ(kept_scores({0.0f, -0.0f, tiny, 0.0f}, 1, how), (Keep{0, 0, 1, 1}));
    EXPECT_EQ(kept_scores({-0.0f, tiny, 0.0f, -0.0f}, 1, how), (Keep{0, 1, 0, 1}));
    EXPECT_EQ(kept_scores({nan, inf, -nan, 1}, 1, how), (Keep{1, 0, 1, 0}));
    EXPECT_EQ(kept_scores({-inf, -1, -2, -tiny}, 1, how), (Keep{0, 1, 0, 1}));
  }
}

TEST(KeepLargest, CountsAreExact) {
  std::vector<float> scores;
  for (int i = 0; i < 60; ++i) scores.push_back(float(i * 37 % 11));
  for (int64_t zeros = 0; zeros <= 20; ++zeros) {
    const Keep rows = kept_scores(scores, 3, {.zeros = zeros}),
               all = kept_scores(scores, 3, {.within = KeepWithin::matrix, .zeros = 3 * zeros});
    EXPECT_EQ(std::count(all.begin(), all.end(), 0), 3 * zeros);
    for (int r = 0; r < 3; ++r)
      EXPECT_EQ(std::count(rows.begin() + 20 * r, rows.begin() + 20 * (r + 1), 0), zeros);
  }
}

TEST(KeepLargest, SaysWhatIsWrong) {
  const Tensor scores = Tensor::zeros({2, 6}, DType::f32, Device::cpu());
  expect_error([&] { keep_largest({}, {}); }, {"scores is undefined"});
  expect_error([&] { keep_largest(scores.to(DType::i32), {}); },
               {"scores is i32[2, 6]", "expected f64, f32"});
  expect_error([&] { keep_largest(scores.packed().reshape({12}), {}); }, {"[rows, columns]"});
  expect_error([&] { keep_largest(scores, {.zeros = 7}); }, {"7 zeros among 6 elements of a row", "0 to 6"});
  expect_error([&] { keep_largest(scores, {.zeros = -1}); }, {"-1 zeros"});
  expect_error([&] { keep_largest(scores, {.within = KeepWithin::matrix, .zeros = 13}); },
               {"among 12 elements of a matrix"});
  expect_error([&] { keep_largest(scores, {.within = KeepWithin::group, .zeros = 1, .group = 4}); },
               {"groups of 4 in rows of 6 columns"});
  expect_error(
      [&] {
        keep_largest(scores.slice(1, 0, 1).expand({2, int64_t{1} << 31}), {.zeros = 1});
      },
      {"4294967296 elements; expected at most 4294967295"});
  expect_error([&] { keep_largest(scores, {.within = KeepWithin::group, .zeros = 1}); }, {"groups of 0"});
}

}  // namespace
}  // namespace tessera::ops
