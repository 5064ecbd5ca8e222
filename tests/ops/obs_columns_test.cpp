#include "ops/obs_columns/obs_columns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/inverse_factor/inverse_factor.h"
#include "tests/errors.h"

namespace tessera::ops {
namespace {

Tensor matrix_of(const std::vector<double>& values, const Shape& shape) {
  return Tensor::from(values, shape);
}

TEST(ObsColumns, PassesErrorsOnToLaterColumns) {
  const Tensor u = matrix_of({2, 1, 3, 0, 4, 2, 0, 0, 5}, {3, 3});
  const Tensor keep = Tensor::from(std::vector<uint8_t>{0, 1, 0}, {1, 3});
  const ObsBlock done = obs_columns(matrix_of({6, 7, 8}, {1, 3}), u, {.keep = keep});
  // 6 is dropped: error 3; then 7 - 3 = 4 stays, and 8 - 9 = -1 is dropped: error -0.2.
  EXPECT_EQ(done.weight.to_vector<double>(), (std::vector<double>{0, 4, 0}));
  EXPECT_EQ(done.error.to_vector<double>(), (std::vector<double>{3, 0, -0.2}));
}

TEST(ObsColumns, GroupsChooseByTheFactorAndTheWeightsOfThatTime) {
  const Tensor u = matrix_of({1, 0, 2, 0, 0, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, {4, 4});
  // (3 / 1)^2 > (8 / 4)^2: the larger weight is dropped. Then 1 and 2 are as they were: column 2 gets nothing
  // of column 1.
  const ObsBlock done = obs_columns(matrix_of({3, 8, 1, 2}, {1, 4}), u, {.zeros = 1, .group = 2});
  EXPECT_EQ(done.weight.to_vector<double>(), (std::vector<double>{3, 0, 0, 2}));
  // Here column 0 is dropped, and 2 of its error 2 turn 1 into -3 before the second group is looked at.
  const ObsBlock later = obs_columns(matrix_of({2, 12, 1, 2}, {1, 4}), u, {.zeros = 1, .group = 2});
  EXPECT_EQ(later.weight.to_vector<double>(), (std::vector<double>{0, 12, -3, 0}));
  // Equal ones, (2 / 1)^2 = (8 / 4)^2 and then |5 - 2 * 2|^2 < 5^2: the lowest index.
  const ObsBlock equal = obs_columns(matrix_of({2, 8, 5, 5}, {1, 4}), u, {.zeros = 1, .group = 2});
  EXPECT_EQ(equal.weight.to_vector<double>(), (std::vector<double>{0, 8, 0, 5}));
}

TEST(ObsColumns, RoundsToTheGridTiesToEven) {
  const Tensor u = matrix_of({1, 0, 0, 0, 1, 0, 0, 0, 1}, {3, 3});
  const RoundingGrid grid{.scale = matrix_of({2}, {1}), .zero = matrix_of({1}, {1}), .levels = 4};
  const Tensor keep = Tensor::from(std::vector<uint8_t>{1, 1, 1}, {1, 3});
  // Levels -2, 0, 2, 4: 1 is half way and goes to 0, 3 to 4; 9 and -9 to the ends.
  EXPECT_EQ(
      obs_columns(matrix_of({1, 3, 9}, {1, 3}), u, {.keep = keep, .grid = grid}).weight.to_vector<double>(),
      (std::vector<double>{0, 4, 4}));
  EXPECT_EQ(obs_columns(matrix_of({-9, -1, 0.9}, {1, 3}), u, {.keep = keep, .grid = grid})
                .weight.to_vector<double>(),
            (std::vector<double>{-2, 0, 0}));
}

TEST(ObsColumns, KeepsANanAndDropsTheSmallestOfItsGroup) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const auto run = [](const std::vector<double>& weight, const ObsColumns& how, Device device) {
    const DType dtype = device.is_cpu() ? DType::f64 : DType::f32;
    const Tensor u = matrix_of({1, 0, 0, 0, 1, 0, 0, 0, 1}, {3, 3});
    return obs_columns(matrix_of(weight, {1, 3}).to(dtype).to(device), u.to(dtype).to(device), how)
        .weight.to_vector<double>();
  };
  for (int gpus = 0; gpus <= std::min(1, Device::cuda_count()); ++gpus) {
    const Device device = gpus == 0 ? Device::cpu() : Device::cuda();
    // The error of a NaN is one, too, and goes to all later columns: what is dropped shows as 0.
    for (const std::vector<double>& weight : {std::vector<double>{kNan, 1, 2}, {1, kNan, 2}, {2, 1, kNan}}) {
      const auto got = run(weight, {.zeros = 2, .group = 3}, device);
      EXPECT_EQ(std::ranges::count(got, 0.0), 2);
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(std::isnan(got[i]), std::isnan(weight[i])) << i;
    }
    const DType dtype = device.is_cpu() ? DType::f64 : DType::f32;
    const auto on = [&](double value) { return matrix_of({value}, {1}).to(dtype).to(device); };
    const auto rounded = run({2, 1, kNan},
                             {.keep = Tensor::from(std::vector<uint8_t>{1, 1, 1}, {1, 3}).to(device),
                              .grid = {.scale = on(2), .zero = on(1), .levels = 4}},
                             device);
    EXPECT_TRUE(std::isnan(rounded[2]));
  }
}

TEST(ObsColumns, SaysWhatIsWrong) {
  const Tensor w = Tensor::zeros({2, 4}, DType::f32, Device::cpu()),
               u = Tensor::zeros({4, 4}, DType::f32, Device::cpu());
  expect_error([&] { obs_columns({}, u, {}); }, {"undefined"});
  expect_error([&] { obs_columns(w.to(DType::bf16), u, {}); }, {"weight is bf16[2, 4]", "expected f32"});
  expect_error([&] { obs_columns(w, u.slice(0, 0, 3), {}); }, {"factor is f32[3, 4]", "expected f32 [4, 4]"});
  expect_error([&] { obs_columns(w, u, {}); }, {"expected keep, or a group that divides the columns"});
  expect_error([&] { obs_columns(w, u, {.zeros = 1, .group = 3}); }, {"1 zeros in groups of 3 of 4 columns"});
  expect_error([&] { obs_columns(w, u, {.keep = w}); }, {"keep is f32[2, 4]", "expected u8"});
  expect_error(
      [&] {
        obs_columns(w, u, {.zeros = 1, .group = 2, .grid = {w, w, 4}});
      },
      {"the grid's scale and zero"});
}

TEST(InverseFactor, FactorsTheInverse) {
  // diag(4, 9) + shift (0, 7): the inverse is diag(1/4, 1/16).
  const auto u = inverse_factor(matrix_of({4, 0, 0, 9}, {2, 2}), matrix_of({0, 7}, {2}));
  ASSERT_TRUE(u.has_value());
  EXPECT_EQ(u->to_vector<double>(), (std::vector<double>{0.5, 0, 0, 0.25}));
  // [[2, 1], [1, 1]]^-1 = [[1, -1], [-1, 2]] = U^T U with U = [[1, -1], [0, 1]]; the lower triangle is not
  // read.
  const auto v = inverse_factor(matrix_of({2, 1, 99, 1}, {2, 2}), matrix_of({0, 0}, {2}));
  ASSERT_TRUE(v.has_value());
  const std::vector<double> values = v->to_vector<double>(), expected{1, -1, 0, 1};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(values[i], expected[i], 1e-15);
}

TEST(InverseFactor, SaysWhereThereIsNone) {
  const Tensor none = matrix_of({0, 0}, {2});
  EXPECT_FALSE(inverse_factor(matrix_of({1, 2, 2, 1}, {2, 2}), none).has_value());
  EXPECT_FALSE(inverse_factor(matrix_of({1, 1, 1, 1}, {2, 2}), none).has_value());
  EXPECT_FALSE(inverse_factor(matrix_of({NAN, 0, 0, 1}, {2, 2}), none).has_value());
  EXPECT_TRUE(inverse_factor(matrix_of({1, 2, 2, 1}, {2, 2}), matrix_of({2, 2}, {2})).has_value());
  expect_error([&] { inverse_factor(matrix_of({1, 2}, {1, 2}), none); }, {"a is f64[1, 2]", "square"});
  expect_error(
      [&] {
        inverse_factor(matrix_of({1}, {1, 1}), none);
      },
      {"shift is f64[2]", "expected f64 [1]"});
  expect_error(
      [&] {
        inverse_factor(matrix_of({1}, {1, 1}).to(DType::bf16), none);
      },
      {"a is bf16[1, 1]", "expected f32"});
}

}  // namespace
}  // namespace tessera::ops
