#include "ops/losses/losses.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/gradcheck.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

using Loss = Tensor (*)(const Tensor&, const Tensor&, Site);

Tensor huber(const Tensor& x, const Tensor& target, Site site) {
  return huber_loss(x, target, 1.5, site);
}

constexpr Loss kLosses[] = {mse_loss, l1_loss, huber, bce_with_logits};

TEST(Losses, AreMeansByHand) {
  const Tensor x = row({1, -2, 4}), target = row({0, -2, 1});
  EXPECT_DOUBLE_EQ(mse_loss(x, target).item(), (1.0 + 0 + 9) / 3);
  EXPECT_DOUBLE_EQ(l1_loss(x, target).item(), (1.0 + 0 + 3) / 3);
  EXPECT_DOUBLE_EQ(huber_loss(x, target).item(), (0.5 + 0 + 2.5) / 3);
  EXPECT_DOUBLE_EQ(huber_loss(x, target, 2).item(), (0.5 + 0 + 2 * (3 - 1)) / 3);
  EXPECT_DOUBLE_EQ(bce_with_logits(row({0, std::log(3.0)}), row({1, 0.25})).item(),
                   (std::log(2.0) - 0.25 * std::log(0.75) - 0.75 * std::log(0.25)) / 2);
  for (const Loss loss : kLosses) EXPECT_EQ(loss(x, target, Site::here()).shape(), Shape());
}

TEST(Losses, PassGradcheck) {
  // Errors of both signs, and on both sides of delta; none at a kink.
  const Tensor x = Tensor::from(std::vector<double>{0.3, -1.2, 2.5, -0.4, 0.9, -3}, {2, 3});
  const Tensor target = Tensor::from(std::vector<double>{0.9, 0.2, 0.1, 0.7, 0.4, 0.6}, {2, 3});
  for (const Loss loss : kLosses) {
    const auto f = [loss](const std::vector<Tensor>& in) {
      return std::vector{loss(in[0], in[1], Site::here())};
    };
    for (const bool turned : {false, true}) {
      const GradcheckResult result = gradcheck(f, {turned ? transposed_copy(x) : x, target});
      EXPECT_TRUE(result.ok) << result.message;
    }
  }
}

TEST(Losses, OfLogitsAreStableAndTheirGradientIsSigmoidMinusTarget) {
  const Tensor target = row({1, 0, 1, 0}), x = row({800, -800, -800, 800});
  EXPECT_EQ(bce_with_logits(x, target).item(), 400);
  EXPECT_EQ(bce_with_logits(row({40}), row({1})).item(), std::exp(-40.0));
  EXPECT_EQ(bce_with_logits(row({-40}), row({0})).item(), std::exp(-40.0));
  const Tensor gradient = gradient_of(x, Tensor::full({}, 4, DType::f64, kCpu),
                                      [&](const Tensor& leaf) { return bce_with_logits(leaf, target); });
  EXPECT_EQ(gradient.to_vector<double>(), (std::vector<double>{0, 0, -1, 1}));
}

TEST(Losses, GradientsWhereTheErrorIs0) {
  const Tensor dy = Tensor::full({}, 1, DType::f64, kCpu);
  for (const Loss loss : {Loss(mse_loss), Loss(l1_loss), Loss(huber)})
    EXPECT_EQ(
        gradient_of(row({2}), dy, [&](const Tensor& x) { return loss(x, row({2}), Site::here()); }).item(),
        0);
}

TEST(Losses, RunInEveryDTypeOnEveryDevice) {
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const Loss loss : kLosses) {
        const Tensor x = quarters({5, 7}).to(dtype).to(device),
                     target = Tensor::full({5, 7}, 0.5, dtype, device);
        const double expected = loss(quarters({5, 7}), target.to(kCpu).to(DType::f64), Site::here()).item();
        const Tensor y = loss(x, target, Site::here());
        EXPECT_EQ(y.dtype(), dtype);
        EXPECT_NEAR(y.item(), expected, 4 * epsilon(dtype) * expected) << name_of(dtype) << device.name();
      }
}

TEST(Losses, RefuseShapesThatWouldBroadcast) {
  const Tensor x = Tensor::zeros({4, 1}, DType::f32, kCpu), target = Tensor::zeros({4}, DType::f32, kCpu);
  for (const Loss loss : kLosses)
    expect_error([&] { loss(x, target, Site::here()); },
                 {"_", "f32[4, 1] on cpu", "f32[4] on cpu", "expected one shape"});
  expect_error([&] { mse_loss(Tensor(), target); }, {"mse_loss", "x is undefined"});
  expect_error([&] { huber_loss(target, target, 0); }, {"huber_loss", "delta is 0"});
}

}  // namespace
}  // namespace tessera::ops
