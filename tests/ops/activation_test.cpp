#include "ops/activation/activation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/ops/expect.h"

namespace tessera::ops {
namespace {

TEST(Activation, NaNKeepsItsGradientThroughRelu) {
  // A broken value must not look like a unit that is merely off: PyTorch passes the gradient, too.
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{-1, 0, 2, float(nan)}, {4}).to(device);
    const Tensor dy = Tensor::from(std::vector<float>{3, 3, 3, 3}, {4}).to(device);
    const auto dx = gradient_of(x, dy, [](const Tensor& in) { return relu(in); }).to_vector<double>();
    EXPECT_EQ(dx, (std::vector<double>{0, 0, 3, 3}));
    const auto squared =
        gradient_of(x, dy, [](const Tensor& in) { return relu_squared(in); }).to_vector<double>();
    EXPECT_EQ(std::vector<double>(squared.begin(), squared.end() - 1), (std::vector<double>{0, 0, 12}));
    EXPECT_TRUE(std::isnan(squared[3]));
  }
}

TEST(Activation, GeluTanhsSlopeIsNoughtOrOneWhereTheSquareOverflows) {
  // The bounds of f32 and of bf16 are near 3.4e38, squares overflow from 1.8e19 on.
  const std::vector<float> values{1e15f, -1e15f, 3e19f, -3e19f, 3e38f, -3e38f};
  for (const Device device : devices())
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      if (dtype == DType::f64 && device.is_cuda()) continue;
      const Tensor x = Tensor::from(values, {6}).to(dtype).to(device);
      const Tensor dy = Tensor::full({6}, 3, dtype, device);
      const auto dx = gradient_of(x, dy, [](const Tensor& in) { return gelu_tanh(in); }).to_vector<double>();
      EXPECT_EQ(dx, (std::vector<double>{3, 0, 3, 0, 3, 0})) << name_of(dtype);
    }
}

TEST(Activation, GradientsInF32AreThoseOfF64OverTheWholeRange) {
  // Of gelu that is erf, exp and their choice by range in one loop; 1031 is no multiple of a vector's length.
  std::vector<float> values;
  for (int i = 0; i < 1031; ++i) values.push_back(float(i - 515) / 64);
  for (const float more : {0.0f, 1e-30f, 20.0f, 1e10f, 3e38f}) values.insert(values.end(), {more, -more});
  const auto count = int64_t(values.size());
  const Tensor x = Tensor::from(values, {count}), dy = Tensor::full({count}, 3, DType::f32, Device::cpu());
  for (const auto f : {relu, relu_squared, silu, gelu, gelu_tanh}) {
    const auto of = [&](const Tensor& in) { return f(in, Site::here()); };
    const auto dx = gradient_of(x, dy, of).to_vector<double>();
    const auto expected = gradient_of(x.to(DType::f64), dy.to(DType::f64), of).to_vector<double>();
    for (size_t i = 0; i < dx.size(); ++i) {
      if (float(expected[i]) > std::numeric_limits<float>::max()) continue;  // relu_squared of 3e38
      EXPECT_NEAR(dx[i], expected[i], 2e-6 * std::max(1.0, std::fabs(expected[i]))) << values[i];
    }
  }
}

}  // namespace
}  // namespace tessera::ops
