#include "nn/init.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace tessera::nn {
namespace {

constexpr int64_t kOut = 300, kIn = 200;

std::vector<double> filled(const std::function<void(const Tensor&, Rng&)>& fill, uint64_t seed = 1,
                           DType dtype = DType::f32, Device device = Device::cpu()) {
  const Tensor tensor = Tensor::empty({kOut, kIn}, dtype, device);
  Rng rng(seed);
  fill(tensor, rng);
  return tensor.to_vector<double>();
}

/// Mean, standard deviation and largest size as expected of 60,000 draws. `kurtosis`: fourth moment over the
/// square of the variance, which decides the error of the deviation. Six standard errors.
void expect_moments(const std::vector<double>& values, double mean, double deviation, double kurtosis) {
  const double n = double(values.size());
  double sum = 0, square = 0;
  for (const double value : values) sum += value;
  for (const double value : values) square += (value - sum / n) * (value - sum / n);
  EXPECT_NEAR(sum / n, mean, 6 * deviation / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(square / n), deviation, 6 * deviation * std::sqrt((kurtosis - 1) / n) / 2);
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

TEST(Init, EachChoiceHasItsSpread) {
  const auto choose = [](Init choice) {
    return filled([=](const Tensor& tensor, Rng& rng) { init::apply(choice, tensor, rng); });
  };
  const auto expect_uniform = [&](Init choice, double bound) {
    const std::vector<double> values = choose(choice);
    expect_moments(values, 0, bound / std::sqrt(3.0), 1.8);
    EXPECT_LE(largest(values), bound * (1 + 0x1p-23));
    EXPECT_GT(largest(values), bound * 0.999);  // 60,000 draws: all below with probability e^-60
  };
  expect_uniform(Init::fan_in, 1 / std::sqrt(200.0));
  expect_uniform(Init::kaiming_uniform, std::sqrt(6 / 200.0));
  expect_uniform(Init::xavier_uniform, std::sqrt(6 / 500.0));
  expect_moments(choose(Init::kaiming_normal), 0, std::sqrt(2 / 200.0), 3);
  expect_moments(choose(Init::xavier_normal), 0, std::sqrt(2 / 500.0), 3);
  EXPECT_EQ(largest(choose(Init::zeros)), 0);
  // A normal cut at two deviations has 0.8796 of the deviation and a kurtosis of 2.37.
  const std::vector<double> cut = choose(Init::truncated_normal);
  expect_moments(cut, 0, 0.02 * 0.87963, 2.37);
  EXPECT_LE(largest(cut), 0.04 * (1 + 0x1p-23));
  expect_moments(filled([](const Tensor& t, Rng& rng) { init::normal(t, rng, 3, 2); }), 3, 2, 3);
  expect_moments(filled([](const Tensor& t, Rng& rng) { init::uniform(t, rng, 1, 3); }), 2,
                 1 / std::sqrt(3.0), 1.8);
}

TEST(Init, IsAFunctionOfTheSeedAndMovesOn) {
  const auto normal = [](const Tensor& tensor, Rng& rng) { init::normal(tensor, rng); };
  EXPECT_EQ(filled(normal, 1), filled(normal, 1));
  EXPECT_NE(filled(normal, 1), filled(normal, 2));
  const auto second = [](const Tensor& tensor, Rng& rng) {
    init::normal(tensor, rng), init::normal(tensor, rng);
  };
  EXPECT_NE(filled(normal, 1), filled(second, 1));
}

TEST(Init, TheGpuGetsTheNumbersOfTheCpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "no GPU";
  const auto normal = [](const Tensor& tensor, Rng& rng) { init::truncated_normal(tensor, rng, 0, 1); };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    EXPECT_EQ(filled(normal, 1, dtype), filled(normal, 1, dtype, Device::cuda()));
}

TEST(Init, RefusesWhatHasNoFan) {
  Rng rng(1);
  const Tensor vector = Tensor::empty({4}, DType::f32, Device::cpu());
  EXPECT_THROW(init::apply(Init::kaiming_normal, vector, rng), Error);
  EXPECT_NO_THROW(init::apply(Init::zeros, vector, rng));
  EXPECT_THROW(init::uniform(vector, rng, 1, 0), Error);
  EXPECT_THROW(init::truncated_normal(vector, rng, 0, 1, 0.01), Error);
}

}  // namespace
}  // namespace tessera::nn
