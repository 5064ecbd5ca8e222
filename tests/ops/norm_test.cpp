#include "ops/norm/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/ops/expect.h"

namespace tessera::ops {
namespace {

TEST(Norm, LayernormWorkedByHand) {
  // Mean 2.5, variance (2.25 + 0.25 + 0.25 + 2.25) / 4 = 1.25; eps makes it 4, so rstd is 1/2.
  const Tensor x = Tensor::from(std::vector<double>{1, 2, 3, 4}, {1, 4});
  const Tensor weight = Tensor::from(std::vector<double>{1, 2, -1, 4}, {4});
  const Tensor bias = Tensor::from(std::vector<double>{0, 1, 0, -1}, {4});
  EXPECT_EQ(layernorm(x, {}, {}, 2.75).to_vector<double>(), (std::vector<double>{-0.75, -0.25, 0.25, 0.75}));
  EXPECT_EQ(layernorm(x, weight, {}, 2.75).to_vector<double>(), (std::vector<double>{-0.75, -0.5, -0.25, 3}));
  EXPECT_EQ(layernorm(x, {}, bias, 2.75).to_vector<double>(),
            (std::vector<double>{-0.75, 0.75, 0.25, -0.25}));
  EXPECT_EQ(layernorm(x, weight, bias, 2.75).to_vector<double>(),
            (std::vector<double>{-0.75, 0.5, -0.25, 2}));
  // dy = (1, 0, 0, 0), w = 1: mean(g) = 1/4, mean(g xhat) = -3/16; dx = (g - 1/4 + 3/16 xhat) / 2.
  const Tensor dy = Tensor::from(std::vector<double>{1, 0, 0, 0}, {1, 4});
  const auto dx = gradient_of(x, dy, [](const Tensor& in) { return layernorm(in, {}, {}, 2.75); });
  EXPECT_EQ(dx.to_vector<double>(), (std::vector<double>{0.3046875, -0.1484375, -0.1015625, -0.0546875}));
}

TEST(Norm, RmsnormWorkedByHand) {
  // mean(x^2) = (4 + 16 + 4 + 8) / 4 = 8; eps makes it 16, so rstd is 1/4.
  const Tensor x = Tensor::from(std::vector<double>{2, -4, 2, std::sqrt(8)}, {1, 4});
  const Tensor weight = Tensor::from(std::vector<double>{1, 3, -1, 0}, {4});
  const auto y = rmsnorm(x, weight, 8).to_vector<double>();
  const double expected[] = {0.5, -3, -0.5, 0};
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(y[i], expected[i]);
  // dy = (1, 0, 0, 0), w = 1: mean(g xhat) = 1/8; dx = (g - xhat / 8) / 4.
  const Tensor dy = Tensor::from(std::vector<double>{1, 0, 0, 0}, {1, 4});
  const auto dx = gradient_of(x, dy, [](const Tensor& in) { return rmsnorm(in, {}, 8); }).to_vector<double>();
  const double slope[] = {(1 - 0.5 / 8) / 4, 1.0 / 32, -0.5 / 32, -std::sqrt(8) / 4 / 32};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(dx[i], slope[i], 1e-16);  // half an ulp of 1/4, a few times
}

TEST(Norm, ParameterGradientsAddOverTheRows) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{1, 3, 5, 1, 2, 2}, {3, 2}, device);
    const Tensor ones = Tensor::full({3, 2}, 1.0, DType::f32, device);
    const Tensor weight = Tensor::full({2}, 1.0, DType::f32, device),
                 bias = Tensor::zeros({2}, DType::f32, device);
    // Variances 1, 4, 0; eps 0 would divide by zero in the last row: 12 makes rstd (13, 16, 12)^-1/2.
    const auto dbias = gradient_of(bias, ones, [&](const Tensor& b) { return layernorm(x, weight, b, 12); });
    EXPECT_EQ(dbias.to_vector<float>(), (std::vector<float>{3, 3}));
    const auto dweight =
        gradient_of(weight, ones, [&](const Tensor& w) { return layernorm(x, w, bias, 12); });
    const float expected = float(-1 / std::sqrt(13.0) + 2 / 4.0);
    EXPECT_NEAR(dweight.to_vector<float>()[0], expected, 2 * epsilon(DType::f32));  // of terms below 1
    EXPECT_NEAR(dweight.to_vector<float>()[1], -expected, 2 * epsilon(DType::f32));
  }
}

TEST(Norm, NoRowsGiveZeroParameterGradients) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::empty({0, 3}, DType::f32, device);
    const Tensor weight = Tensor::full({3}, 1.0, DType::f32, device);
    const Tensor dweight = gradient_of(weight, x, [&](const Tensor& w) { return rmsnorm(x, w); });
    EXPECT_EQ(dweight.to_vector<float>(), (std::vector<float>{0, 0, 0}));
  }
}

TEST(Norm, ALargeMeanCostsNoDigits) {
  // The squares of 10000 leave no room in f32 for a variance of 1.25: the mean must be taken off first.
  for (const Device device : devices()) {
    for (const int64_t width : {4, 1500, 9000}) {
      std::vector<float> values(static_cast<size_t>(width)), shifted(static_cast<size_t>(width));
      for (size_t i = 0; i < values.size(); ++i) values[i] = float(i % 4), shifted[i] = 10000 + float(i % 4);
      const auto plain = layernorm(Tensor::from(values, {1, width}, device)).to_vector<float>();
      const auto moved = layernorm(Tensor::from(shifted, {1, width}, device)).to_vector<float>();
      // The mean itself is rounded at 10000: half an ulp is 2^-11 of a deviation of about 1, a little more
      // for the rounding of a long sum.
      for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(plain[i], moved[i], 4.0 / 2048);
    }
  }
}

TEST(Norm, EqualRowsGiveTheBias) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::full({2, 8}, 3.0, DType::f32, device);
    const Tensor bias = Tensor::full({8}, 0.25, DType::f32, device);
    for (const float value : layernorm(x, {}, bias).to_vector<float>()) EXPECT_EQ(value, 0.25f);
    const Tensor zeros = Tensor::zeros({2, 8}, DType::f32, device);
    for (const float value : rmsnorm(zeros).to_vector<float>()) EXPECT_EQ(value, 0.0f);
  }
}

TEST(Norm, ANaNStaysInItsRow) {
  for (const Device device : devices()) {
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      const Tensor x = Tensor::full({3, 5}, 1.0, DType::f32, device);
      x.slice(1, 0, 1).copy_from(Tensor::full({3, 1}, 2.0, DType::f32, device));
      const Tensor element = x.slice(0, 1, 2).slice(1, 2, 3);
      element.fill(bad);
      for (const bool centred : {true, false}) {
        const auto y = (centred ? layernorm(x) : rmsnorm(x)).to_vector<float>();
        for (const size_t i : {0, 1, 2, 3, 4, 10, 11, 12, 13, 14}) EXPECT_TRUE(std::isfinite(y[i])) << i;
        EXPECT_TRUE(std::isnan(y[7]));
      }
    }
  }
}

TEST(Norm, TheGradientMayHaveAnyLayout) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 7, 6, 8, 9, 0, 1, 1}, {3, 4}, device);
    const Tensor weight = Tensor::from(std::vector<float>{1, -1, 2, 3}, {4}, device);
    const Tensor rows = Tensor::from(std::vector<float>{1, -2, 3, 0.5f}, {1, 4}, device).expand({3, 4});
    const auto of_x = [&](const Tensor& in) { return layernorm(in, weight); };
    const auto of_weight = [&](const Tensor& in) { return layernorm(x, in); };
    const auto dx = gradient_of(x, rows.clone(), of_x).to_vector<float>();
    const auto dweight = gradient_of(weight, rows.clone(), of_weight).to_vector<float>();
    for (const Tensor& dy : {rows, transposed_copy(rows)}) {
      EXPECT_EQ(gradient_of(x, dy, of_x).to_vector<float>(), dx);
      EXPECT_EQ(gradient_of(weight, dy, of_weight).to_vector<float>(), dweight);
    }
  }
}

TEST(Norm, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32, Device::cpu());
  const auto vector = [](int64_t size, DType dtype) { return Tensor::zeros({size}, dtype, Device::cpu()); };
  EXPECT_EQ(message_of([] { rmsnorm(Tensor()); }), "rmsnorm: x is undefined");
  EXPECT_EQ(message_of([] { layernorm(Tensor::zeros({}, DType::f32, Device::cpu())); }),
            "layernorm: x is f32[] on cpu, of rank 0; expected [..., C]");
  EXPECT_EQ(message_of([&] { layernorm(x, vector(2, DType::f32)); }),
            "layernorm: weight is f32[2] on cpu; expected [3], the last dimension of x [2, 3]");
  EXPECT_EQ(message_of([&] { layernorm(x, {}, x); }),
            "layernorm: bias is f32[2, 3] on cpu; expected [3], the last dimension of x [2, 3]");
  EXPECT_EQ(
      message_of([&] { rmsnorm(x, vector(3, DType::bf16)); }),
      "rmsnorm: weight is bf16[3] on cpu, but x is f32[2, 3] on cpu; convert one of them (ops::cast) or "
      "move it");
  EXPECT_EQ(message_of([&] { rmsnorm(x, {}, -1); }), "rmsnorm: eps is -1; expected 0 or more");
  EXPECT_EQ(message_of([] {
              layernorm(Tensor::zeros({2, 3}, DType::i64, Device::cpu()));
            }),
            "layernorm: dtype i64 is not supported; expected f64, f32, bf16 or f16");
}

TEST(Norm, LongSumsAreDoubleOnTheCpu) {
  // Added in f32, a million equal terms that are no powers of two are off by more than 1e-4.
  constexpr int64_t kLength = 1'000'000;
  const Tensor row = Tensor::full({1, kLength}, 0.1, DType::f32, Device::cpu());
  EXPECT_NEAR(rmsnorm(row, {}, 0).slice(1, 0, 1).item(), 1, 1e-6);  // a few ulp of f32
  const Tensor x = Tensor::full({kLength, 1}, 0.1, DType::f32, Device::cpu()),
               one = Tensor::full({1}, 1, DType::f32, Device::cpu());
  const Tensor dweight = gradient_of(one, x, [&](const Tensor& weight) { return rmsnorm(x, weight, 0); });
  EXPECT_NEAR(dweight.item() / (double(kLength) * double(0.1f)), 1, 1e-6);
  const Tensor dbias = gradient_of(one, x, [&](const Tensor& bias) { return layernorm(x, {}, bias); });
  EXPECT_NEAR(dbias.item() / (double(kLength) * double(0.1f)), 1, 1e-6);
}

}  // namespace
}  // namespace tessera::ops
