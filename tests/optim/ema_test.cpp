#include "optim/ema.h"

#include <algorithm>

#include "gradients.h"

namespace tessera::optim {
namespace {

class EmaOn : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Device, EmaOn, testing::Values("cpu", "cuda"));

TEST_P(EmaOn, FollowsTheFormula) {
  for (const bool warmup : {false, true}) {
    Tensor weight = Tensor::full({3, 5}, 2, DType::f32, device());
    nn::make_parameter(weight);
    Ema ema({{"w", weight}}, {.decay = 0.5, .warmup = warmup});
    double expected = 2;
    for (int n = 1; n <= 12; ++n) {
      weight.fill(n);
      ema.update();
      const double decay = warmup ? std::min(0.5, (1.0 + n) / (10.0 + n)) : 0.5;
      expected = decay * expected + (1 - decay) * n;
    }
    // Twelve f32 updates of values below 12, each rounded to half of 2^-20.
    for (const double value : ema.average(0).to_vector<double>()) EXPECT_NEAR(value, expected, 12 * 0x1p-20);
  }
}

TEST_P(EmaOn, AppliesAndRestoresBitForBit) {
  Tensor weight = new_parameter(1, {4, 7}, DType::bf16, device());
  const std::vector<double> before = weight.detach().to_vector<double>();
  Ema ema({{"w", weight}}, {.decay = 0.9});
  weight.copy_from(new_parameter(2, {4, 7}, DType::bf16, device()));
  ema.update();
  const std::vector<double> trained = weight.detach().to_vector<double>();
  EXPECT_THROW(ema.restore(), Error);
  ema.apply();
  EXPECT_NE(weight.detach().to_vector<double>(), trained);
  EXPECT_EQ(weight.detach().to_vector<double>(), ema.average(0).to(DType::bf16).to_vector<double>());
  EXPECT_THROW(ema.apply(), Error);
  EXPECT_THROW(ema.update(), Error);
  ema.restore();
  EXPECT_EQ(weight.detach().to_vector<double>(), trained);
}

}  // namespace
}  // namespace tessera::optim
