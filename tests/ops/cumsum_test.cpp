#include "ops/cumsum/cumsum.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/parallel.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(Cumsum, ByHandAlongEveryDimension) {
  for (const Device device : devices()) {
    const Tensor x = counting({2, 3}, 1).to(DType::f32).to(device);  // 1 2 3, 4 5 6
    EXPECT_EQ(cumsum(x, 1).to_vector<double>(), (std::vector<double>{1, 3, 6, 4, 9, 15}));
    EXPECT_EQ(cumsum(x, -2).to_vector<double>(), (std::vector<double>{1, 2, 3, 5, 7, 9}));
    EXPECT_EQ(cumsum(x.transpose(0, 1), 0).to_vector<double>(), (std::vector<double>{1, 4, 3, 9, 6, 15}));
    EXPECT_EQ(cumsum(x.slice(1, 0, 3, 2), 1).to_vector<double>(), (std::vector<double>{1, 4, 4, 10}));
    EXPECT_EQ(cumsum(Tensor::zeros({3, 0}, DType::f32, device), 0).shape(), (Shape{3, 0}));
  }
}

TEST(Cumsum, TheGradientSumsFromTheEnd) {
  for (const Device device : devices()) {
    const Tensor dy = Tensor::from(std::vector<float>{1, 10, 100, 1000}, {4}, device);
    const Tensor dx =
        gradient_of(ones({4}, DType::f32, device), dy, [](const Tensor& x) { return cumsum(x, 0); });
    EXPECT_EQ(dx.to_vector<double>(), (std::vector<double>{1111, 1110, 1100, 1000}));
  }
}

TEST(Cumsum, WholeNumbersAndBoolsGiveI64) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<int64_t>{3, -1, int64_t(1) << 40, 2}, {4}, device);
    const Tensor y = cumsum(x, 0);
    EXPECT_EQ(y.dtype(), DType::i64);
    EXPECT_EQ(y.to_vector<int64_t>(),
              (std::vector<int64_t>{3, 2, (int64_t(1) << 40) + 2, (int64_t(1) << 40) + 4}));
    const Tensor narrow = Tensor::from(std::vector<int32_t>{2147483647, 1, 1}, {3}, device);
    EXPECT_EQ(cumsum(narrow, 0).to_vector<int64_t>(),
              (std::vector<int64_t>{2147483647, 2147483648, 2147483649}));
    const Tensor mask = Tensor::from(std::vector<bool>{true, false, true, true}, {2, 2}, device);
    EXPECT_EQ(cumsum(mask, 0).to_vector<int64_t>(), (std::vector<int64_t>{1, 0, 2, 1}));
  }
}

/// Sums of whole numbers are exact, so that every cut of the lines gives the same; each is also an f32.
TEST(Cumsum, LongLinesAreTheSameInEveryCut) {
  for (const Device device : devices())
    for (const int64_t length : {1, 31, 33, 255, 256, 257, 8191, 8192, 8193, 70001})
      for (const int64_t lines : {1, 3}) {
        std::vector<int64_t> values(size_t(length * lines)), along(values.size()), across(values.size());
        for (size_t i = 0; i < values.size(); ++i) values[i] = int64_t(i * 7 % 11) - 5;
        for (int64_t line = 0; line < lines; ++line)
          for (int64_t i = 0, sum = 0; i < length; ++i)
            along[size_t(line * length + i)] = sum += values[size_t(line * length + i)];
        for (int64_t line = 0; line < lines; ++line)
          for (int64_t i = 0, sum = 0; i < length; ++i)
            across[size_t(i * lines + line)] = sum += values[size_t(i * lines + line)];
        for (const DType dtype : {DType::i64, DType::i32, DType::f32, DType::bf16, DType::f16}) {
          SCOPED_TRACE(name_of(dtype));
          const auto made = [&](const Shape& shape) {
            return Tensor::from(values, shape).to(dtype).to(device);
          };
          EXPECT_EQ(cumsum(made({lines, length}), 1).to_vector<int64_t>(), along) << length;
          EXPECT_EQ(cumsum(made({length, lines}), 0).to_vector<int64_t>(), across) << length;
        }
      }
}

TEST(Cumsum, SumsOfSixteenBitsAreRoundedOnce) {
  for (const Device device : devices()) {
    const Tensor x = ones({400}, DType::bf16, device);  // added up in bf16 they would stay at 256
    EXPECT_EQ(cumsum(x, 0).to_vector<double>().back(), 400);
    // Eight elements are beyond f32's range, a running sum of two of them beyond bf16's.
    std::vector<float> large(256);
    for (size_t i = 0; i < large.size(); ++i) large[i] = i % 4 < 2 ? 3e38f : -3e38f;
    const auto y = cumsum(Tensor::from(large, {256}).to(DType::bf16).to(device), 0).to_vector<float>();
    EXPECT_EQ(y[1], kInfF);
    EXPECT_EQ(y[254], y[0]);
    EXPECT_EQ(y[255], 0);
  }
}

TEST(Cumsum, ANaNStaysFromWhereItIs) {
  std::vector<float> values(300, 1);  // of a line that a GPU adds up in several rounds
  values[1] = kInfF, values[290] = kNanF;
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto y = cumsum(Tensor::from(values, {300}).to(dtype).to(device), 0).to_vector<float>();
      EXPECT_EQ(y[0], 1);
      EXPECT_EQ(y[2], kInfF);
      EXPECT_EQ(y[289], kInfF);
      EXPECT_TRUE(std::isnan(y[290]) && std::isnan(y[299]));
    }
}

TEST(Cumsum, ErrorsNameTheOperand) {
  const Tensor x = counting({2, 3});
  expect_error([&] { cumsum(x, 2); }, {"cumsum", "dimension 2 is outside f64[2, 3] on cpu"});
  expect_error([&] { cumsum(x, -3); }, {"cumsum", "dimension -3"});
  expect_error([&] { cumsum(Tensor(), 0); }, {"cumsum", "undefined"});
  expect_error([&] { cumsum(x.to(DType::u8), 0); }, {"cumsum", "u8", "i64, i32 or bool"});
  expect_error([&] { cumsum(x.to(DType::f8e4m3), 0); }, {"cumsum", "f8e4m3"});
}

}  // namespace
}  // namespace tessera::ops
