#include "ops/activation/activation.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera::ops
