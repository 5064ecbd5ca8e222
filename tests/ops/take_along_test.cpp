#include "ops/take_along/take_along.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/reduce/reduce.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

Tensor table(const std::vector<int64_t>& values, const Shape& shape, Device device = kCpu) {
  return Tensor::from(values, shape, device);
}

TEST(TakeAlong, ByHandAlongEveryDimension) {
  for (const Device device : devices()) {
    const Tensor x = counting({2, 3}).to(DType::f32).to(device);
    for (const DType dtype : {DType::i64, DType::i32}) {
      EXPECT_EQ(take_along(x, table({2, 0, 0, 1}, {2, 2}, device).to(dtype), 1).to_vector<double>(),
                (std::vector<double>{2, 0, 3, 4}));
      EXPECT_EQ(take_along(x, table({1, 0, 1}, {1, 3}, device).to(dtype), 0).to_vector<double>(),
                (std::vector<double>{3, 1, 5}));
      EXPECT_EQ(take_along(x.transpose(0, 1), table({1, 0, 0, 0, 0, 1}, {3, 2}, device).to(dtype), -1)
                    .to_vector<double>(),
                (std::vector<double>{3, 0, 1, 1, 2, 5}));
    }
    EXPECT_EQ(take_along(x, table({}, {2, 0}, device), 1).shape(), (Shape{2, 0}));
  }
}

TEST(TakeAlong, MovesEveryDtypeBitForBit) {
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f8e4m3, DType::i64, DType::i32,
                              DType::u8, DType::boolean}) {
      const Tensor x = Tensor::from(std::vector<double>{1, 0, 3, 2}, {4}).to(dtype).to(device);
      EXPECT_EQ(take_along(x, table({3, 0, 0}, {3}, device), 0).to(DType::f32).to_vector<double>(),
                Tensor::from(std::vector<double>{2, 1, 1}, {3}).to(dtype).to_vector<double>())
          << dtype;
    }
}

TEST(TakeAlong, RepeatedElementsAddTheirGradients) {
  for (const Device device : devices()) {
    const Tensor x = counting({2, 3}).to(DType::f32).to(device),
                 at = table({1, 1, 0, 2, 0, 2}, {2, 3}, device);
    const Tensor dy = Tensor::from(std::vector<float>{1, 10, 100, 1, 10, 100}, {2, 3}, device);
    const auto take = [&](int dim) { return [&, dim](const Tensor& v) { return take_along(v, at, dim); }; };
    EXPECT_EQ(gradient_of(x, dy, take(1)).to_vector<double>(), (std::vector<double>{100, 11, 0, 10, 0, 101}));
  }
}

TEST(Scatter, ByHandAlongEveryDimension) {
  for (const Device device : devices()) {
    const Tensor src = Tensor::from(std::vector<float>{1, 10, 100, 2, 20, 200}, {2, 3}, device);
    const Tensor at = table({1, 3, 1, 0, 0, 2}, {2, 3}, device);
    EXPECT_EQ(scatter_add(src, at, 4, 1).to_vector<double>(),
              (std::vector<double>{0, 101, 0, 10, 22, 0, 200, 0}));
    EXPECT_EQ(scatter_add(src.transpose(0, 1), at.transpose(0, 1).to(DType::i32), 4, 0).shape(),
              (Shape{4, 2}));
    EXPECT_EQ(scatter_add(src, at, 4, 0).to_vector<double>(),
              (std::vector<double>{2, 20, 0, 1, 0, 100, 0, 0, 200, 0, 10, 0}));
    const Tensor x = Tensor::full({2, 4}, 7, DType::f32, device);
    EXPECT_EQ(scatter(x, at, src, -1).to_vector<double>(),
              (std::vector<double>{7, 100, 7, 10, 20, 7, 200, 7}))
        << "of several the last one";
    EXPECT_EQ(scatter(x, table({}, {2, 0}, device), src.slice(1, 0, 0), 1).to_vector<double>(),
              x.to_vector<double>());
    EXPECT_EQ(scatter(x.to(DType::i64), at, src.to(DType::i64), 1).to_vector<double>(),
              (std::vector<double>{7, 100, 7, 10, 20, 7, 200, 7}));
    // What a later one replaced has no gradient, and neither has what was replaced.
    const Tensor dy = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8}, {2, 4}, device);
    EXPECT_EQ(gradient_of(src, dy, [&](const Tensor& v) { return scatter(x, at, v, 1); }).to_vector<double>(),
              (std::vector<double>{0, 4, 2, 0, 5, 7}));
    EXPECT_EQ(gradient_of(x, dy, [&](const Tensor& v) { return scatter(v, at, src, 1); }).to_vector<double>(),
              (std::vector<double>{1, 0, 3, 0, 0, 6, 0, 8}));
    if (device.is_cpu()) continue;
    const Tensor outside = table({-1, 4, 3}, {1, 3}, device), three = src.slice(0, 0, 1);
    EXPECT_EQ(scatter_add(three, outside, 4, 1).to_vector<double>(), (std::vector<double>{0, 0, 0, 100}));
    EXPECT_EQ(scatter(x.slice(0, 0, 1), outside, three, 1).to_vector<double>(),
              (std::vector<double>{7, 7, 7, 100}));
  }
}

TEST(Scatter, ErrorsNameTheOperand) {
  const Tensor src = counting({2, 3}), at = table({0, 1, 2, 0, 1, 4}, {2, 3});
  expect_error([&] { scatter_add(src, at, 4, 1); }, {"scatter_add", "index 4 at [1, 2]", "outside the 4"});
  expect_error([&] { scatter_add(src, at, -1, 1); }, {"scatter_add", "size is -1"});
  expect_error([&] { scatter_add(src, at.slice(0, 0, 1), 5, 1); }, {"scatter_add", "one shape"});
  expect_error([&] { scatter_add(src.to(DType::i64), at, 5, 1); }, {"scatter_add", "i64", "f64, f32"});
  expect_error([&] { scatter(counting({2, 4}), at, src, 1); }, {"scatter", "index 4 at [1, 2]"});
  expect_error(
      [&] {
        scatter(counting({3, 5}), at, src, 1);
      },
      {"scatter", "equal sizes in every dimension but 1"});
  expect_error([&] { scatter(counting({2, 5}).to(DType::f32), at, src, 1); }, {"scatter", "one dtype"});
  expect_error([&] { scatter(src, at, src, 2); }, {"scatter", "dimension 2 is outside"});
}

/// Small whole numbers are exact in f32: comparisons and the sort of a GPU give the sums of the CPU.
TEST(TakeAlong, GradientsOfManyIndicesAreThoseOfTheCpu) {
  for (const auto& [lines, length, n] :
       {std::tuple<int64_t, int64_t, int64_t>{3, 5, 700}, {2, 4097, 50000}, {70, 4100, 1100}, {1, 1, 33}}) {
    std::vector<int64_t> at(size_t(lines * n));
    for (size_t i = 0; i < at.size(); ++i) at[i] = int64_t(i * i * 7 + i) % length;
    std::vector<float> values(at.size());
    for (size_t i = 0; i < at.size(); ++i) values[i] = float(i % 17);
    std::vector<double> expected(size_t(lines * length), 0.0);
    for (size_t i = 0; i < at.size(); ++i)
      expected[i / size_t(n) * size_t(length) + size_t(at[i])] += values[i];
    for (const Device device : devices()) {
      const Tensor indices = table(at, {lines, n}, device), dy = Tensor::from(values, {lines, n}, device);
      const Tensor dx = gradient_of(Tensor::zeros({lines, length}, DType::f32, device), dy,
                                    [&](const Tensor& x) { return take_along(x, indices, 1); });
      EXPECT_EQ(dx.to_vector<double>(), expected) << lines << " " << length << " " << n;
    }
  }
}

TEST(TakeAlong, GradientsOfSixteenBitsAreSummedUnrounded) {
  for (const Device device : devices()) {
    std::vector<double> dy(9, 1.0);
    dy[0] = 256;  // 256 + 1 is no bf16
    const Tensor dx = gradient_of(
        ones({1}, DType::bf16, device), row(dy).to(DType::bf16).to(device),
        [&](const Tensor& x) { return take_along(x, table(std::vector<int64_t>(9, 0), {9}, device), 0); });
    EXPECT_EQ(dx.item<double>(), 264);
  }
}

TEST(TakeAlong, ErrorsNamePositionAndValue) {
  const Tensor x = counting({2, 3});
  expect_error(
      [&] {
        take_along(x, table({0, 1, 2, 3}, {2, 2}), 1);
      },
      {"take_along", "index 3 at [1, 1]", "outside the 3 elements"});
  expect_error([&] { take_along(x, table({0, -1}, {2, 1}), -1); }, {"index -1 at [1, 0]"});
  expect_error(
      [&] {
        take_along(x, table({0}, {1, 1}), 1);
      },
      {"take_along", "i64[1, 1]", "f64[2, 3]", "equal sizes in every dimension but 1"});
  expect_error([&] { take_along(x, labels({0, 1}), 1); }, {"take_along", "i64[2]"});
  expect_error([&] { take_along(x, x, 1); }, {"take_along", "f64[2, 3]", "i64 or i32"});
  expect_error([&] { take_along(x, table({0}, {1, 1}), 2); }, {"take_along", "dimension 2"});
  expect_error([&] { take_along(Tensor(), labels({0}), 0); }, {"take_along", "x is undefined"});
  expect_error([&] { take_along(x, Tensor(), 0); }, {"take_along", "indices is undefined"});
  expect_error([&] { take_along(counting({2, 0}), table({0, 0}, {2, 1}), 1); }, {"outside the 0 elements"});
}

TEST(TakeAlong, AnIndexWrittenInPlaceIsNoticed) {
  const Tensor at = labels({0, 1});
  expect_error(
      [&] {
        gradient_of(counting({3}), counting({2}), [&](const Tensor& x) {
          Tensor y = take_along(x, at, 0);
          at.fill(2);
          return y;
        });
      },
      {"take_along", "written in place"});
}

TEST(TakeAlongCuda, OutOfRangeGivesNaNAndNoGradient) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda();
  for (const int64_t length : {3, 5000}) {  // compared, and sorted
    const int64_t n = length == 3 ? 4 : 70000;
    std::vector<int64_t> at(size_t(n), 1);
    at[1] = -1, at[2] = length;
    const Tensor indices = labels(at, gpu), x = Tensor::full({length}, 2, DType::f32, gpu);
    const auto y = take_along(x, indices, 0).to_vector<float>();
    EXPECT_EQ(y[0], 2);
    EXPECT_TRUE(std::isnan(y[1]) && std::isnan(y[2]));
    const auto dx = gradient_of(x, ones({n}, DType::f32, gpu), [&](const Tensor& v) {
                      return take_along(v, indices, 0);
                    }).to_vector<float>();
    EXPECT_EQ(dx[1], float(n - 2));
    EXPECT_EQ(dx[0] + dx[2], 0);
  }
  EXPECT_EQ(one_hot(labels({1, -1, 7}, gpu), 2).to_vector<float>(), (std::vector<float>{0, 1, 0, 0, 0, 0}));
}

TEST(OneHot, ByHandInEveryDtype) {
  for (const Device device : devices())
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8e4m3, DType::i64,
                              DType::i32, DType::u8, DType::boolean}) {
      const Tensor y = one_hot(labels({2, 0}, device), 3, dtype);
      EXPECT_EQ(y.dtype(), dtype);
      EXPECT_EQ(y.to(Device::cpu()).to_vector<double>(), (std::vector<double>{0, 0, 1, 1, 0, 0})) << dtype;
    }
  const Tensor wide = table({0, 1, 1, 0}, {2, 2});
  EXPECT_EQ(one_hot(wide.transpose(0, 1).to(DType::i32), 2).shape(), (Shape{2, 2, 2}));
  EXPECT_EQ(one_hot(wide.slice(0, 1, 2), 2).to_vector<double>(), (std::vector<double>{0, 1, 1, 0}));
  EXPECT_EQ(one_hot(labels({}), 3).shape(), (Shape{0, 3}));
  EXPECT_EQ(one_hot(Tensor::full({}, 1, DType::i64), 2).to_vector<double>(), (std::vector<double>{0, 1}));
}

TEST(OneHot, ErrorsNamePositionAndValue) {
  expect_error([] { one_hot(labels({0, 3}), 3); }, {"one_hot", "index 3 at [1]", "outside the 3 classes"});
  expect_error([] { one_hot(labels({-1}), 3); }, {"one_hot", "index -1 at [0]"});
  expect_error([] { one_hot(labels({0}), -1); }, {"one_hot", "-1 classes"});
  expect_error([] { one_hot(row({0}), 2); }, {"one_hot", "f64[1]", "i64 or i32"});
  expect_error([] { one_hot(Tensor(), 2); }, {"one_hot", "undefined"});
}

}  // namespace
}  // namespace tessera::ops
