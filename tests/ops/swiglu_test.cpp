#include "ops/swiglu/swiglu.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/shape/shape.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"

namespace tessera::ops {
namespace {

TEST(Swiglu, ThePackedFormIsThatOfItsHalves) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{1, -2, 0.5f, 3, 4, -1}, {1, 6}, device);
    const Tensor dy = Tensor::from(std::vector<float>{1, 2, -3}, {1, 3}, device);
    const auto halves = [](const Tensor& in) { return swiglu(slice(in, -1, 0, 3), slice(in, -1, 3, 6)); };
    const auto packed = [](const Tensor& in) { return swiglu(in); };
    EXPECT_EQ(packed(x).to_vector<float>(), halves(x).to_vector<float>());
    EXPECT_EQ(gradient_of(x, dy, packed).to_vector<float>(), gradient_of(x, dy, halves).to_vector<float>());
  }
}

TEST(Swiglu, ALargeNegativeGateClosesWithoutNaN) {
  for (const Device device : devices()) {
    const Tensor gate = Tensor::from(std::vector<float>{-200, 200}, {2}, device),
                 up = Tensor::from(std::vector<float>{3, 3}, {2}, device);
    const auto y = swiglu(gate, up).to_vector<float>();
    EXPECT_EQ(y[0], 0);
    EXPECT_EQ(y[1], 600);
    const auto dgate = gradient_of(gate, Tensor::full({2}, 1, DType::f32, device), [&](const Tensor& in) {
                         return swiglu(in, up);
                       }).to_vector<float>();
    EXPECT_EQ(dgate[0], 0);
    EXPECT_EQ(dgate[1], 3);
  }
}

TEST(Swiglu, OnlyWantedGradientsAreMade) {
  const Tensor gate = Tensor::full({3}, 2, DType::f32, Device::cpu());
  const auto dup =
      gradient_of(gate.clone(), gate, [&](const Tensor& up) { return swiglu(gate, up); }).to_vector<double>();
  for (const double value : dup) EXPECT_NEAR(value, 4 / (1 + std::exp(-2.0)), 1e-6);  // a few ulp of 3.5
}

TEST(Swiglu, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32, Device::cpu());
  EXPECT_EQ(message_of([&] { swiglu(x); }), "swiglu: x is f32[2, 3] on cpu; expected [..., 2F]: gate and up");
  EXPECT_EQ(message_of([&] { swiglu(x, x.slice(0, 0, 1)); }),
            "swiglu: gate is f32[2, 3] on cpu, but up is f32[1, 3] on cpu");
  EXPECT_EQ(message_of([&] { swiglu(x, Tensor()); }), "swiglu: up is undefined");
}

}  // namespace
}  // namespace tessera::ops
