#include "optim/ema.h"

#include <algorithm>
#include <optional>

#include "gradients.h"
#include "optim/sgd.h"
#include "tests/errors.h"

namespace tessera::optim {
namespace {

class EmaOn : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Device, EmaOn, testing::Values("cpu", "cuda"));

TEST_P(EmaOn, FollowsTheFormula) {
  for (const bool warmup : {false, true}) {
    Tensor weight = Tensor::full({3, 5}, 2, DType::f32, device());
    nn::make_parameter(weight);
    const Sgd optimizer({{"w", weight}});
    Ema ema(optimizer, {.decay = 0.5, .warmup = warmup});
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
  const Sgd optimizer({{"w", weight}});
  Ema ema(optimizer, {.decay = 0.9});
  weight.copy_from(new_parameter(2, {4, 7}, DType::bf16, device()));
  optimizer.sync_masters();
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

TEST_P(EmaOn, RefusesAStepWhileItsAveragesAreInTheWeightsPlace) {
  Tensor weight = new_parameter(1, {4, 7}, DType::f32, device());
  Sgd optimizer({{"w", weight}}, {.lr = 0.5});
  std::optional<Ema> ema(std::in_place, optimizer);
  weight.fill(3);
  ema->update();
  ema->apply();
  const std::vector<double> averages = weight.detach().to_vector<double>();
  arrive(weight, Tensor::full({4, 7}, 1, DType::f32, device()));
  expect_error([&] { optimizer.step(); }, {"the averages of an Ema are in the weights' place", "restore()"});
  EXPECT_EQ(weight.detach().to_vector<double>(), averages);
  EXPECT_EQ(optimizer.steps(), 0);
  ema->restore();
  EXPECT_EQ(weight.detach().to_vector<double>(), std::vector<double>(28, 3.0));
  optimizer.step();  // with the gradient that had arrived
  EXPECT_EQ(weight.detach().to_vector<double>(), std::vector<double>(28, 2.5));
  ema->apply();
  Ema moved(std::move(*ema));
  ema.reset();
  EXPECT_THROW(optimizer.step(), Error);
  moved.restore();
  optimizer.step();
  moved.apply();
  { const Ema ends = std::move(moved); }  // the averages stay, and are trained on
  optimizer.step();
  EXPECT_EQ(optimizer.steps(), 3);
}

TEST_P(EmaOn, AveragesTheMastersOfNarrowParameters) {
  // 64 steps of 2^-12 each, from 1 on: below half an ulp of bf16 (2^-9 below 2), so the parameter itself does
  // not move for a long time, while the master and its average do. Next to it an f32 parameter, which is its
  // own master and takes the same steps.
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Tensor narrow = Tensor::full({3, 5}, 1, dtype, device()),
           wide = Tensor::full({7}, 1, DType::f32, device());
    nn::make_parameter(narrow), nn::make_parameter(wide);
    Sgd optimizer({{"wide", wide}, {"narrow", narrow}}, {.lr = 0x1p-12});
    Ema ema(optimizer, {.decay = 0.5, .warmup = false});
    double expected = 1;
    for (int step = 1; step <= 64; ++step) {
      optimizer.zero_grad();
      arrive(narrow, Tensor::full({3, 5}, -1, DType::f32, device()));
      arrive(wide, Tensor::full({7}, -1, DType::f32, device()));
      optimizer.step();
      ema.update();
      expected = 0.5 * expected + 0.5 * (1 + step * 0x1p-12);
    }
    // The weights are exact in f32; 64 updates, each rounded to half an ulp of numbers below 2.
    for (const size_t parameter : {size_t{0}, size_t{1}})
      for (const double value : ema.average(parameter).to_vector<double>())
        EXPECT_NEAR(value, expected, 64 * 0x1p-24) << dtype << " " << parameter;
  }
}

}  // namespace
}  // namespace tessera::optim
