#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "optim/bundled.h"
#include "optim/ema.h"
#include "optim/rounding.h"
#include "tests/errors.h"
#include "tests/optim/gradients.h"
#include "tests/tensors.h"

/// States in bf16, and bf16 weights without masters.

namespace tessera::optim {
namespace {

class ShortStates : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(On, ShortStates, testing::Values("cpu", "cuda"));

TEST(StochasticRounding, IsExactInTheMean) {
  for (const float value : {1.0f, 1.001f, -1.7e-3f, 3.3e38f, 2.5e-39f, -1e-40f, 0.0f, 12345.678f}) {
    double sum = 0;
    for (uint32_t random = 0; random < 65536; ++random)
      sum += double(float(round_stochastically(value, random)));
    EXPECT_EQ(sum / 65536, double(value)) << value;
  }
}

TEST(StochasticRounding, LeavesWhatBf16HoldsAndWhatIsNotFinite) {
  for (uint32_t high = 0; high < 65536; ++high) {
    const auto value = std::bit_cast<float>(high << 16);
    for (const uint32_t random : {0u, 1u, 0xFFFFu}) {
      const bf16 rounded = round_stochastically(value, random);
      if (std::isnan(value))
        EXPECT_TRUE(std::isnan(float(rounded))) << high;
      else
        EXPECT_EQ(rounded.bits, high);
    }
  }
  // A NaN whose payload lies in the bits that bf16 lacks must not become an infinity or wrap around.
  EXPECT_TRUE(std::isnan(float(round_stochastically(std::bit_cast<float>(0x7F80'0001u), 0))));
  EXPECT_TRUE(std::isnan(float(round_stochastically(std::bit_cast<float>(0xFFFF'FFFFu), 0xFFFF))));
}

TEST_P(ShortStates, SmallUpdatesOfABf16WeightAddUpOnAverage) {
  constexpr int64_t kCount = 1 << 16;
  Tensor weight = Tensor::full({kCount}, 1, DType::bf16, device());
  nn::make_parameter(weight);
  Sgd optimizer({{"weight", weight}}, {.lr = 1, .states = DType::bf16, .rounding_seed = 3});
  EXPECT_EQ(optimizer.masters().count(), 0);
  EXPECT_EQ(optimizer.states(), DType::bf16);
  for (int i = 0; i < 64; ++i) {
    arrive(weight, Tensor::full({kCount}, 1.0 / 1024, DType::f32, Device::cpu()));
    optimizer.step();
    optimizer.zero_grad();
  }
  double sum = 0;
  for (const double value : weight.detach().to_vector<double>()) sum += value;
  // 64 draws of a distance of 2^-8 with probability 1/4 each: a deviation of sqrt(64 3/16) 2^-8 per weight.
  EXPECT_NEAR(sum / kCount, 1 - 64.0 / 1024, 4 * std::sqrt(12.0) / 256 / std::sqrt(double(kCount)));
}

/// What a step of SGD without momentum makes of weights at these places in the arena, whose new values
/// before rounding are exact in f32.
void expect_rounded(const Tensor& weight, int64_t pitch, double value, uint64_t seed, uint64_t step) {
  const std::vector<float> values = weight.detach().to_vector<float>();
  const int64_t columns = weight.size(-1);
  for (int64_t i = 0; i < weight.count(); ++i) {
    const int64_t element = i / columns * pitch + i % columns;
    const uint32_t word = philox(seed, step, uint64_t(element / 4)).word[element % 4];
    ASSERT_EQ(values[size_t(i)], float(round_stochastically(float(value), word))) << i;
  }
}

TEST_P(ShortStates, RandomBitsAreThoseOfThePlaceInTheArena) {
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1} << 40}) {
    Tensor packed = Tensor::full({6, 100}, 1, DType::bf16, device()).clone();
    const Tensor wide = Tensor::full({4, 27}, 1, DType::bf16, device());
    Tensor ragged = wide.slice(1, 3, 16);  // unaligned: one by one
    for (Tensor* const weight : {&packed, &ragged}) {
      nn::make_parameter(*weight);
      Sgd optimizer({{"weight", *weight}}, {.lr = 1, .states = DType::bf16, .rounding_seed = seed});
      arrive(*weight, Tensor::full(weight->shape(), 1.0 / 1024, DType::f32, Device::cpu()));
      optimizer.step();
      expect_rounded(*weight, weight == &packed ? packed.row_stride() : 16, 1 - 1.0 / 1024, seed, 1);
    }
    for (const float value : wide.slice(1, 16, 27).to_vector<float>()) EXPECT_EQ(value, 1);
  }
}

TEST_P(ShortStates, AdamWFollowsItsF32Form) {
  const Shape shape{64, 32};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Tensor exact = new_parameter(1, shape, DType::f32, device()),
           near = new_parameter(1, shape, dtype, device());
    AdamW reference({{"weight", exact}}, {.lr = 1e-3, .max_grad_norm = 1});
    AdamW optimizer({{"weight", near}}, {.lr = 1e-3, .max_grad_norm = 1, .states = DType::bf16});
    EXPECT_LT(optimizer.bytes(), reference.bytes() * 2 / 3 + 1);
    for (int step = 0; step < 300; ++step) {
      const Tensor gradient = gradient_of(0, step % 7, shape);
      arrive(exact, gradient), arrive(near, gradient);
      reference.step(), optimizer.step();
      reference.zero_grad(), optimizer.zero_grad();
    }
    const std::vector<double> a = exact.detach().to_vector<double>(), b = near.detach().to_vector<double>();
    double difference = 0, bias = 0, moved = 0;
    const std::vector<double> start = numbers(1, shape.count());
    for (size_t i = 0; i < a.size(); ++i) {
      difference += (a[i] - b[i]) * (a[i] - b[i]), bias += a[i] - b[i];
      moved += (a[i] - start[i]) * (a[i] - start[i]);
    }
    // f32: each moment is off by up to 2^-9 of itself, some three times that in all. bf16: 300 roundings add
    // variances of at most a quarter of the squared distance of two numbers, 2^-8.4 in the mean over (-1, 1):
    // 0.026, where the weights have moved by 0.11.
    EXPECT_LT(std::sqrt(difference / moved), dtype == DType::f32 ? 0.01 : 0.24);
    EXPECT_LT(std::abs(bias) / double(a.size()), 1e-3);
    EXPECT_GT(std::sqrt(moved / double(a.size())), 0.02);
  }
}

TEST_P(ShortStates, TheSecondMomentHasNoBias) {
  // beta2 = 0.999: a step changes v by less than half the distance of two bf16 numbers once it is near g^2,
  // where rounding to nearest would stop.
  constexpr int64_t kCount = 4096;
  Tensor weight = Tensor::full({kCount}, 1, DType::f32, device());
  nn::make_parameter(weight);
  AdamW optimizer({{"weight", weight}}, {.lr = 0, .weight_decay = 0, .states = DType::bf16});
  for (int i = 0; i < 400; ++i) {
    arrive(weight, Tensor::full({kCount}, 1, DType::f32, Device::cpu()));
    optimizer.step();
    optimizer.zero_grad();
  }
  double sum = 0;
  optimizer.fields([&](const auto& name, auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Tensor>) {
      if (std::string(name) != "v.weight") return;
      EXPECT_EQ(value.dtype(), DType::bf16);
      for (const double v : value.template to_vector<double>()) sum += v;
    }
  });
  EXPECT_NEAR(sum / kCount, 1 - std::pow(0.999, 400), 1e-3);
}

TEST_P(ShortStates, ASkippedStepKeepsAllBitsAndANewSeedDrawsOthers) {
  const Shape shape{40, 40};
  std::vector<std::vector<float>> ends;
  for (const uint64_t seed : {0, 0, 1}) {
    Tensor weight = new_parameter(2, shape, DType::bf16, device());
    AdamW optimizer({{"weight", weight}}, {.lr = 0.01, .states = DType::bf16, .rounding_seed = seed});
    for (int step = 0; step < 5; ++step) {
      arrive(weight, gradient_of(0, step, shape));
      optimizer.step();
      optimizer.zero_grad();
    }
    const std::vector<float> before = weight.detach().to_vector<float>();
    arrive(weight, Tensor::full(shape, std::numeric_limits<double>::infinity(), DType::f32, Device::cpu()));
    optimizer.step();
    EXPECT_EQ(optimizer.skipped(), 1);
    EXPECT_EQ(weight.detach().to_vector<float>(), before);
    ends.push_back(before);
  }
  EXPECT_EQ(ends[0], ends[1]);
  EXPECT_NE(ends[0], ends[2]);
}

TEST_P(ShortStates, AveragesAreOfTheWeights) {
  Tensor weight = new_parameter(5, {8, 9}, DType::bf16, device());
  Sgd optimizer({{"weight", weight}}, {.lr = 0.1, .states = DType::bf16});
  Ema ema(optimizer, {.decay = 0.5, .warmup = false});
  arrive(weight, gradient_of(0, 0, {8, 9}));
  const std::vector<double> before = weight.detach().to_vector<double>();
  optimizer.step();
  ema.update();
  const std::vector<double> after = weight.detach().to_vector<double>(),
                            average = ema.average(0).to_vector<double>();
  for (size_t i = 0; i < after.size(); ++i) EXPECT_NEAR(average[i], (before[i] + after[i]) / 2, 1e-6);
}

TEST(ShortStatesRefused, RulesAndDtypesThatCannotHaveThem) {
  const auto make = [](const char* optimizer, DType dtype, DType states) {
    make_optimizer(optimizer, {{"weight", new_parameter(1, {8, 8}, dtype, Device::cpu())}},
                   {.lr = 0.1, .galore = {.rank = 4}, .states = states});
  };
  for (const char* const name : {"muon", "galore"})
    expect_error([&] { make(name, DType::f32, DType::bf16); }, {name, "f32"});
  expect_error([&] { make("adamw", DType::f16, DType::bf16); }, {"weight", "f16", "states in bf16"});
  expect_error([&] { make("sgd", DType::f64, DType::bf16); }, {"weight", "f64", "states in bf16"});
  expect_error([&] { make("adamw", DType::bf16, DType::f16); }, {"states in f16", "f32 or bf16"});
  make("muon", DType::f64, DType::f32);  // f64 parameters have f64 states
}

}  // namespace
}  // namespace tessera::optim
