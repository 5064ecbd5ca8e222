#include "ops/softmax/softmax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

Tensor line(const std::vector<double>& values) {
  return Tensor::from(values, {1, int64_t(values.size())});
}

TEST(Softmax, WorkedByHand) {
  // exp(0, log 2, log 5) = (1, 2, 5), whose sum is 8.
  const Tensor x = line({0, std::log(2), std::log(5)});
  const auto y = softmax(x).to_vector<double>(), log_y = log_softmax(x).to_vector<double>();
  const double expected[] = {1.0 / 8, 2.0 / 8, 5.0 / 8};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_DOUBLE_EQ(y[i], expected[i]);
    EXPECT_DOUBLE_EQ(log_y[i], std::log(expected[i]));
  }
  // dy = (1, 0, 0): sum(y dy) = 1/8, and sum(dy) = 1.
  const Tensor dy = line({1, 0, 0});
  const auto dx = gradient_of(x, dy, [](const Tensor& in) { return softmax(in); }).to_vector<double>();
  const auto dlog = gradient_of(x, dy, [](const Tensor& in) { return log_softmax(in); }).to_vector<double>();
  const double slope[] = {7.0 / 64, -2.0 / 64, -5.0 / 64}, log_slope[] = {7.0 / 8, -2.0 / 8, -5.0 / 8};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(dx[i], slope[i], 1e-16);  // half an ulp of 1/8 in each of a few operations
    EXPECT_NEAR(dlog[i], log_slope[i], 1e-15);
  }
}

TEST(Softmax, EqualElementsShareEvenly) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::full({3, 7}, -2.5, DType::f32, device);
    for (const float value : softmax(x).to_vector<float>()) EXPECT_EQ(value, 1.0f / 7.0f);
  }
}

TEST(Softmax, HugeLogitsNeitherOverflowNorLoseDigits) {
  for (const Device device : devices()) {
    const std::vector<float> values{1e4f, 1e4f - 1, -1e4f, -1e4f - 1, -1e4f - 1, -3e4f};
    const Tensor x = Tensor::from(values, {2, 3}, device);
    const auto y = softmax(x).to_vector<float>(), log_y = log_softmax(x).to_vector<float>();
    const float large = 1 / (1 + std::exp(-1.0f)), small = 1 - large;
    // Rows (1e4, 1e4 - 1, -1e4) and (-1e4 - 1, -1e4 - 1, -3e4).
    const float expected[] = {large, small, 0, 0.5f, 0.5f, 0};
    const float slack = 4 * float(epsilon(DType::f32));  // an exponential, a sum and a quotient
    for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(y[i], expected[i], slack) << i;
    EXPECT_NEAR(log_y[1], std::log(small), 2 * slack);
    EXPECT_EQ(log_y[2], -2e4f + log_y[0]);
  }
}

TEST(Softmax, MinusInfinityIsProbabilityZero) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{-kInfF, 2, 2}, {1, 3}, device);
    EXPECT_EQ(softmax(x).to_vector<float>(), (std::vector<float>{0, 0.5f, 0.5f}));
    EXPECT_EQ(log_softmax(x).to_vector<float>()[0], -kInfF);
    const Tensor dy = Tensor::from(std::vector<float>{3, 1, -1}, {1, 3}, device);
    const auto dx = gradient_of(x, dy, [](const Tensor& in) { return softmax(in); }).to_vector<float>();
    EXPECT_EQ(dx, (std::vector<float>{0, 0.5f, -0.5f}));
    const auto dlog = gradient_of(x, dy, [](const Tensor& in) { return log_softmax(in); }).to_vector<float>();
    EXPECT_EQ(dlog[0], 3);
  }
}

TEST(Softmax, ALineWithoutADistributionIsNaNAndLeavesItsNeighboursAlone) {
  for (const Device device : devices()) {
    for (const float bad : {-kInfF, kInfF, std::numeric_limits<float>::quiet_NaN()}) {
      // Widths of every kernel: a warp's row, a block's, and longer than both.
      for (const int64_t width : {3, 1500, 9000}) {
        const Tensor x = Tensor::full({3, width}, 1.0, DType::f32, device);
        const Tensor row = x.slice(0, 1, 2);
        bad == -kInfF ? row.fill(-kInf) : row.slice(1, 1, 2).fill(double(bad));
        for (const bool log : {false, true}) {
          const auto y = (log ? log_softmax(x) : softmax(x)).to_vector<float>();
          for (int64_t c = 0; c < width; ++c) {
            EXPECT_TRUE(std::isfinite(y[size_t(c)]) && std::isfinite(y[size_t(2 * width + c)]));
            EXPECT_TRUE(std::isnan(y[size_t(width + c)])) << bad << " in " << width << ", column " << c;
          }
        }
      }
    }
  }
}

TEST(Softmax, OneElementIsCertain) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{-7, 1e30f}, {2, 1}, device);
    EXPECT_EQ(softmax(x).to_vector<float>(), (std::vector<float>{1, 1}));
    EXPECT_EQ(log_softmax(x).to_vector<float>(), (std::vector<float>{0, 0}));
  }
}

TEST(Softmax, EveryDimensionIsTheLastOneOfATransposedTensor) {
  // Few neighbouring lines, more than are computed together, and some of them.
  for (const Device device : devices())
    for (const Shape& shape : {Shape{4, 5, 6}, Shape{3, 5, 150}, Shape{3, 70, 17}}) {
      const Tensor x = normal_on(device, shape, DType::f32, 1, 3),
                   dy = normal_on(device, shape, DType::f32, 2);
      for (const auto f : {softmax, log_softmax})
        for (const int dim : {0, 1, -3, -2}) {
          const auto last = [&](const Tensor& t) { return t.transpose(dim, -1).clone(); };
          const auto along = [&](const Tensor& in) { return f(in, dim, Site::here()); };
          const auto along_last = [&](const Tensor& in) { return f(in, -1, Site::here()); };
          const auto y = last(along(x)).to_vector<float>(), turned = along_last(last(x)).to_vector<float>();
          const auto dx = last(gradient_of(x, dy, along)).to_vector<float>(),
                     turned_dx = gradient_of(last(x), last(dy), along_last).to_vector<float>();
          for (size_t i = 0; i < y.size(); ++i) {  // the sums' orders differ
            ASSERT_NEAR(y[i], turned[i], 4 * epsilon(DType::f32) * std::max(1.0f, std::fabs(y[i]))) << dim;
            ASSERT_NEAR(dx[i], turned_dx[i], 16 * epsilon(DType::f32) * std::max(1.0f, std::fabs(dx[i])))
                << dim;
          }
        }
    }
}

TEST(Softmax, TheGradientMayHaveAnyLayout) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 7, 6, 8, 9, 0, 1, 1}, {3, 4}, device);
    const Tensor row = Tensor::from(std::vector<float>{1, -2, 3, 0.5f}, {1, 4}, device);
    const Tensor rows = row.expand({3, 4});
    for (const int dim : {0, 1}) {
      const auto f = [dim](const Tensor& in) { return softmax(in, dim); };
      const auto expected = gradient_of(x, rows.clone(), f).to_vector<float>();
      EXPECT_EQ(gradient_of(x, rows, f).to_vector<float>(), expected);
      EXPECT_EQ(gradient_of(x, transposed_copy(rows), f).to_vector<float>(), expected);
    }
  }
}

TEST(Softmax, ErrorsNameWhatIsWrong) {
  EXPECT_EQ(message_of([] { softmax(Tensor()); }), "softmax: x is undefined");
  EXPECT_EQ(message_of([] { log_softmax(Tensor::zeros({}, DType::f32, Device::cpu())); }),
            "log_softmax: x is f32[] on cpu, of rank 0; reshape it to [1] first");
  EXPECT_EQ(message_of([] {
              softmax(Tensor::zeros({2, 3}, DType::f32, Device::cpu()), 2);
            }),
            "softmax: x is f32[2, 3] on cpu and has no dimension 2; expected -2 to 1");
  EXPECT_EQ(message_of([] {
              softmax(Tensor::zeros({2, 3}, DType::i32, Device::cpu()));
            }),
            "softmax: dtype i32 is not supported; expected f64, f32, bf16 or f16");
}

TEST(Softmax, LongLinesAreSummedInDoubleOnTheCpu) {
  // Added in f32, a million equal terms that are no powers of two are off by more than 1e-4.
  constexpr int64_t kLength = 1'000'000;
  const Tensor x = Tensor::full({kLength}, -2.3, DType::f32, Device::cpu());
  x.slice(0, 0, 1).fill(0);
  const double term = std::exp(double(-2.3f)), total = 1 + double(kLength - 1) * term;
  EXPECT_NEAR(softmax(x).slice(0, 0, 1).item() * total, 1, 1e-6);  // a few ulp of f32
  const Tensor dy = Tensor::full({kLength}, 0.1, DType::f32, Device::cpu());
  const auto dx = gradient_of(x, dy, [](const Tensor& in) { return log_softmax(in); });
  const double expected = double(0.1f) * (1 - double(kLength) / total);
  EXPECT_NEAR(dx.slice(0, 0, 1).item() / expected, 1, 4e-6);  // exp of y, which is near -11.5: 11.5 ulp of 1
}

TEST(Softmax, EveryLengthIsThatOfF64OnTheCpu) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t length : {1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 1031}) {
      const Tensor x = quarters({3, length}, dtype), dy = quarters({3, length}, dtype, 3);
      for (const auto f : {softmax, log_softmax})
        for (const bool turned : {false, true}) {
          const auto of = [&](const Tensor& in) { return f(in, turned ? 0 : 1, Site::here()); };
          const auto laid = [&](const Tensor& in) { return turned ? in.transpose(0, 1) : in; };
          const auto y = of(laid(x)).to_vector<double>(),
                     exact = of(laid(x.to(DType::f64))).to_vector<double>();
          const auto dx = gradient_of(laid(x), laid(dy), of).to_vector<double>(),
                     exact_dx =
                         gradient_of(laid(x).to(DType::f64), laid(dy).to(DType::f64), of).to_vector<double>();
          for (size_t i = 0; i < y.size(); ++i) {
            ASSERT_NEAR(y[i], exact[i], 4 * epsilon(dtype) * std::max(1.0, std::fabs(exact[i]))) << length;
            ASSERT_NEAR(dx[i], exact_dx[i], 16 * epsilon(dtype) * std::max(1.0, std::fabs(exact_dx[i])))
                << length;
          }
        }
    }
}

}  // namespace
}  // namespace tessera::ops
