#include "ops/gmm_nll/gmm_nll.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <optional>
#include <utility>

#include "ops/pointwise/pointwise.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

const double kHalfLogTwoPi = 0.5 * std::log(2 * std::numbers::pi);

TEST(GmmNll, OneComponentIsAGaussian) {
  const std::vector<double> y{-1, 0.5, 3}, mu{0, 0.25, 1}, log_sigma{0, -1, 0.5};
  std::vector<double> params;
  for (size_t i = 0; i < 3; ++i) params.insert(params.end(), {7.5 - double(i), mu[i], log_sigma[i]});
  const Tensor theta = Tensor::from(params, {3, 1, 3}), target = Tensor::from(y, {3});
  const auto losses = gmm_nll(theta, target, Reduction::none).to_vector<double>();
  const auto slopes =
      gradient_of(theta, Tensor::full({3}, 1.0, DType::f64, Device::cpu()), [&](const Tensor& in) {
        return gmm_nll(in, target, Reduction::none);
      }).to_vector<double>();
  for (size_t i = 0; i < 3; ++i) {
    const double z = (y[i] - mu[i]) / std::exp(log_sigma[i]);
    EXPECT_DOUBLE_EQ(losses[i], z * z / 2 + log_sigma[i] + kHalfLogTwoPi);
    EXPECT_EQ(slopes[3 * i], 0.0);  // one weight is always 1
    EXPECT_DOUBLE_EQ(slopes[3 * i + 1], -z / std::exp(log_sigma[i]));
    EXPECT_DOUBLE_EQ(slopes[3 * i + 2], 1 - z * z);
  }
}

TEST(GmmNll, TwoComponentsWorkedByHand) {
  // Weights 1/4 and 3/4, both sigma 1, means 0 and 2, at y = 0: the density is
  // (1/4 + 3/4 exp(-2)) / sqrt(2 pi), and the second component's share of it is r.
  const Tensor theta = Tensor::from(std::vector<double>{0, 0, 0, std::log(3), 2, 0}, {2, 3});
  const Tensor y = Tensor::zeros({}, DType::f64, Device::cpu());
  const double first = 0.25, second = 0.75 * std::exp(-2), r = second / (first + second);
  EXPECT_DOUBLE_EQ(gmm_nll(theta, y).item<double>(), kHalfLogTwoPi - std::log(first + second));
  const Tensor one = Tensor::full({}, 1.0, DType::f64, Device::cpu());
  const auto slopes =
      gradient_of(theta, one, [&](const Tensor& in) { return gmm_nll(in, y); }).to_vector<double>();
  // z = 0 and -2: dw = pi - r, dmu = -r z, dlog_sigma = r (1 - z^2).
  const double expected[] = {0.25 - (1 - r), 0, 1 - r, 0.75 - r, 2 * r, -3 * r};
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(slopes[i], expected[i], 1e-15) << i;  // a few ulp of 1
  const auto dy = gradient_of(y, one, [&](const Tensor& in) { return gmm_nll(theta, in); });
  EXPECT_NEAR(dy.item<double>(), -2 * r, 1e-15);
}

TEST(GmmNll, AShiftOfAllLogitsChangesNothing) {
  for (const Device device : devices()) {
    std::vector<float> plain, shifted;
    for (int k = 0; k < 10; ++k) {
      plain.insert(plain.end(), {float(k), 0.5f * float(k), -0.25f});
      shifted.insert(shifted.end(), {float(k) + 1e4f, 0.5f * float(k), -0.25f});
    }
    const Tensor y = Tensor::full({1}, 1.5, DType::f32, device);
    const Tensor a = Tensor::from(plain, {1, 10, 3}, device), b = Tensor::from(shifted, {1, 10, 3}, device);
    EXPECT_EQ(gmm_nll(a, y).item<float>(), gmm_nll(b, y).item<float>());
    const Tensor one = Tensor::full({}, 1.0, DType::f32, device);
    const auto f = [&](const Tensor& in) { return gmm_nll(in, y); };
    EXPECT_EQ(gradient_of(a, one, f).to_vector<float>(), gradient_of(b, one, f).to_vector<float>());
  }
}

TEST(GmmNll, AWeightOfZeroSwitchesTheComponentOff) {
  for (const Device device : devices()) {
    for (const bool first : {true, false}) {
      const std::vector<float> on{1, 0.5f, 0.25f}, off{-kInfF, 3, 0};
      std::vector<float> params = first ? off : on;
      params.insert(params.end(), (first ? on : off).begin(), (first ? on : off).end());
      const Tensor two = Tensor::from(params, {1, 2, 3}, device), one = Tensor::from(on, {1, 1, 3}, device);
      const Tensor y = Tensor::full({1}, 2.0, DType::f32, device);
      EXPECT_EQ(gmm_nll(two, y).item<float>(), gmm_nll(one, y).item<float>());
      const auto slopes = gradient_of(two, Tensor::full({}, 1.0, DType::f32, device), [&](const Tensor& in) {
                            return gmm_nll(in, y);
                          }).to_vector<float>();
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(slopes[(first ? 0 : 3) + i], 0.0f);
    }
  }
}

TEST(GmmNll, AFarTargetHasAFiniteLossAndPullsTheNearestComponent) {
  for (const Device device : devices()) {
    const Tensor theta = Tensor::from(std::vector<float>{0, 0, 0, 0, 1000, 0}, {1, 2, 3}, device);
    const Tensor y = Tensor::full({1}, 11000.0, DType::f32, device);
    // z = 10000 of the second component; the first one's 11000 adds nothing. log 2 and log(2 pi) / 2 are
    // below half an ulp of 5e7.
    EXPECT_EQ(gmm_nll(theta, y).item<float>(), 5e7f);
    const auto slopes = gradient_of(theta, Tensor::full({}, 1.0, DType::f32, device), [&](const Tensor& in) {
                          return gmm_nll(in, y);
                        }).to_vector<float>();
    EXPECT_EQ(slopes, (std::vector<float>{0.5f, 0, 0, -0.5f, -1e4f, 1 - 1e8f}));
  }
}

TEST(GmmNll, AComponentFarBeyondReachHasNoGradientButItsWeights) {
  // z = e^60 of the first: its square is infinite in f32, and its share of the density 0. `fill` components
  // of weight 0: 0 of them run in registers on a GPU, 30 in the kernel of a warp per token.
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int fill : {0, 30}) {
        std::vector<float> params{0, 0, -60, 0, 0.5f, 0};
        for (int k = 0; k < fill; ++k) params.insert(params.end(), {-kInfF, 0, 0});
        const Tensor theta = Tensor::from(params, {1, 2 + fill, 3}, device).to(dtype);
        const Tensor y = Tensor::full({1}, 1.0, dtype, device);
        // Gradients made in forward (dloss = 1) and in backward (dloss = 2).
        for (const float above : {1.0f, 2.0f}) {
          auto slopes =
              gradient_of(theta, Tensor::full({}, above, DType::f32, device), [&](const Tensor& in) {
                return gmm_nll(in, y);
              }).to_vector<float>();
          slopes.resize(6);
          for (float& slope : slopes) slope /= above;
          EXPECT_EQ(slopes, (std::vector<float>{0.5f, 0, 0, -0.5f, -0.5f, 0.75f}))
              << device.name() << " " << dtype << " " << fill << " " << above;
        }
      }
}

TEST(GmmNll, IsFiniteAtTheMeanForAnyLogSigma) {
  // exp(100) is infinite in f32; at y = mu the loss is log_sigma + log(2 pi) / 2, and dlog_sigma = 1.
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int fill : {0, 30})
        for (const float log_sigma : {-100.0f, -1000.0f, 100.0f}) {
          std::vector<float> params{0, 0.5f, log_sigma};
          for (int k = 0; k < fill; ++k) params.insert(params.end(), {-kInfF, 0, 0});
          const Tensor theta = Tensor::from(params, {1, 1 + fill, 3}, device).to(dtype);
          const Tensor y = Tensor::full({1}, 0.5, dtype, device);
          EXPECT_FLOAT_EQ(gmm_nll(theta, y).item<float>(), log_sigma + float(kHalfLogTwoPi))
              << device.name() << " " << dtype;
          const auto [params_slope, y_slope] =
              std::pair(gradient_of(theta, Tensor::full({}, 1.0, DType::f32, device),
                                    [&](const Tensor& in) { return gmm_nll(in, y); })
                            .to_vector<float>(),
                        gradient_of(y, Tensor::full({}, 1.0, DType::f32, device), [&](const Tensor& in) {
                          return gmm_nll(theta, in);
                        }).to_vector<float>()[0]);
          EXPECT_EQ(params_slope[0], 0.0f);
          EXPECT_EQ(params_slope[1], 0.0f);
          EXPECT_EQ(params_slope[2], 1.0f);
          EXPECT_EQ(y_slope, 0.0f) << device.name() << " " << dtype << " " << log_sigma;
        }
}

TEST(GmmNll, ReductionsAgree) {
  for (const Device device : devices()) {
    std::vector<float> params, targets;
    for (int t = 0; t < 300; ++t) {
      for (int k = 0; k < 4; ++k)
        params.insert(params.end(), {float((t + k) % 5) - 2, float(t % 7) - 3 + float(k), 0.1f * float(k)});
      targets.push_back(float(t % 11) - 5);
    }
    const Tensor theta = Tensor::from(params, {3, 100, 4, 3}, device),
                 y = Tensor::from(targets, {3, 100}, device);
    const Tensor each = gmm_nll(theta, y, Reduction::none);
    EXPECT_EQ(each.shape(), (Shape{3, 100}));
    double total = 0;
    for (const float loss : each.to_vector<float>()) total += double(loss);
    EXPECT_FLOAT_EQ(gmm_nll(theta, y, Reduction::sum).item<float>(), float(total));
    EXPECT_FLOAT_EQ(gmm_nll(theta, y, Reduction::mean).item<float>(), float(total / 300));
  }
}

TEST(GmmNll, NoTargetsHaveNoMean) {
  for (const Device device : devices()) {
    const Tensor theta = Tensor::empty({0, 2, 3}, DType::f32, device),
                 y = Tensor::empty({0}, DType::f32, device);
    EXPECT_TRUE(std::isnan(gmm_nll(theta, y).item<float>()));
    EXPECT_EQ(gmm_nll(theta, y, Reduction::sum).item<float>(), 0.0f);
    EXPECT_EQ(gmm_nll(theta, y, Reduction::none).shape(), Shape{0});
  }
}

TEST(GmmNll, TheLossIsF32ForHalfPrecision) {
  const Tensor theta = Tensor::zeros({4, 2, 3}, DType::bf16, Device::cpu());
  const Tensor y = Tensor::zeros({4}, DType::bf16, Device::cpu());
  const Tensor loss = gmm_nll(theta, y);
  EXPECT_EQ(loss.dtype(), DType::f32);
  EXPECT_FLOAT_EQ(loss.item<float>(), float(kHalfLogTwoPi));
}

/// params [T, K, 3] and y [T] with losses of a few nats.
Tensor some_params(int64_t count, int64_t components, DType dtype, Device device) {
  std::vector<float> values;
  for (int64_t i = 0; i < count * components * 3; ++i) values.push_back(float((i * 37) % 101) / 50 - 1);
  return Tensor::from(values, {count, components, 3}, device).to(dtype);
}
Tensor some_targets(int64_t count, Device device) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(float((i * 29) % 83) / 40 - 1);
  return Tensor::from(values, {count}, device);
}

/// Gradients of params and y by tape.backward(loss), or with `dloss` above the loss.
std::pair<Tensor, Tensor> gmm_nll_gradients(const Tensor& params, const Tensor& y, Reduction reduction,
                                            std::optional<float> dloss) {
  Tensor theta = params.detach(), target = y.detach();
  require_grad(theta), require_grad(target);
  Tape tape;
  const Tensor loss = gmm_nll(theta, target, reduction);
  if (dloss) {
    const Tensor above = Tensor::full({}, *dloss, DType::f32, params.device());
    tape.backward(std::span(&loss, 1), std::span(&above, 1));
  } else {
    tape.backward(loss);
  }
  return {grad(theta), grad(target)};
}

TEST(GmmNll, GradientsMadeInForwardAreThoseMadeInBackward) {
  // A factor of 2 only shifts exponents, so the gradients of backward's own kernel are twice, bit for bit,
  // those that are there when 1 arrives. 300 tokens: whole tiles and a rest; every number of components in
  // registers, and a warp's.
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const Reduction reduction : {Reduction::mean, Reduction::sum})
        for (const int64_t components : {3, 4, 7, 10, 15, 20, 33}) {
          const Tensor theta = some_params(300, components, dtype, device), y = some_targets(300, device);
          const auto once = gmm_nll_gradients(theta, y, reduction, {}),
                     twice = gmm_nll_gradients(theta, y, reduction, 2.0f);
          auto params = once.first.to_vector<double>(), target = once.second.to_vector<double>();
          for (double& value : params) value *= 2;
          for (double& value : target) value *= 2;
          EXPECT_EQ(params, twice.first.to_vector<double>())
              << device.name() << " " << dtype << " " << components;
          EXPECT_EQ(target, twice.second.to_vector<double>())
              << device.name() << " " << dtype << " " << components;
          EXPECT_NE(params, std::vector<double>(params.size(), 0.0));
        }
}

TEST(GmmNll, TheLossScaleReachesGradientsBeforeTheyAreRounded) {
  // Of a mean over 32,768 tokens: below 3e-5, where f16 loses digits.
  for (const Device device : devices())
    for (const int64_t components : {3, 25}) {
      const Tensor params = some_params(32768, components, DType::f16, device),
                   y = some_targets(32768, device);
      const auto dparams = [&](const Tensor& theta, const Tensor& target, double begin, double factor) {
        Tensor leaf = theta.detach();
        require_grad(leaf);
        const Tensor loss_scale = begin == 1 ? Tensor() : Tensor::full({}, begin, DType::f32, leaf.device());
        Tape tape({.loss_scale = loss_scale});
        tape.backward(scale(gmm_nll(leaf, target), factor));
        auto values = grad(leaf).to_vector<double>();
        for (double& value : values) value /= begin * factor;
        return values;
      };
      const auto truth =
          dparams(params.to(Device::cpu()).to(DType::f64), y.to(Device::cpu()).to(DType::f64), 1, 1);
      double size = 0;
      for (const double value : truth) size += value * value;
      for (const double factor : {1.0, 0.25}) {
        const auto got = dparams(params, y, 0x1p16, factor);
        double error = 0;
        for (size_t i = 0; i < got.size(); ++i) error += (got[i] - truth[i]) * (got[i] - truth[i]);
        EXPECT_LT(std::sqrt(error / size), 0x1p-11) << device.name() << " " << components << " " << factor;
      }
    }
}

TEST(GmmNll, TargetsOfF32BesideNarrowParametersLoseNothing) {
  const Device cpu = Device::cpu();
  for (const Device device : devices())
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const Tensor theta = some_params(97, 5, dtype, device), y = some_targets(97, device);
      const auto narrow = gmm_nll_gradients(theta, y, Reduction::sum, {}),
                 exact = gmm_nll_gradients(theta.to(cpu).to(DType::f32), y.to(cpu), Reduction::sum, {});
      EXPECT_EQ(narrow.first.dtype(), dtype);
      EXPECT_EQ(narrow.second.dtype(), DType::f32);
      const Tensor loss = gmm_nll(theta, y, Reduction::none),
                   exact_loss = gmm_nll(theta.to(cpu).to(DType::f32), y.to(cpu), Reduction::none);
      const auto got = loss.to_vector<float>(), want = exact_loss.to_vector<float>();
      const auto dy = narrow.second.to_vector<float>(), want_dy = exact.second.to_vector<float>();
      // The same arithmetic on the CPU; the GPU's exponentials differ by a few ulp of numbers up to 10.
      const float tolerance = device.is_cpu() ? 0.0f : 1e-5f;
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_NEAR(got[i], want[i], tolerance) << i;
        EXPECT_NEAR(dy[i], want_dy[i], tolerance) << i;
      }
      const auto rounded = narrow.first.to_vector<double>(), unrounded = exact.first.to_vector<double>();
      for (size_t i = 0; i < rounded.size(); ++i)
        EXPECT_NEAR(rounded[i], unrounded[i], epsilon(dtype) * std::abs(unrounded[i]) + tolerance) << i;
    }
}

TEST(GmmNll, ErrorsNameWhatIsWrong) {
  const auto zeros = [](const Shape& shape, DType dtype = DType::f32) {
    return Tensor::zeros(shape, dtype, Device::cpu());
  };
  EXPECT_EQ(message_of([&] { gmm_nll(zeros({2, 3}), Tensor()); }), "gmm_nll: y is undefined");
  EXPECT_EQ(
      message_of([&] {
        gmm_nll(zeros({5, 2, 4}), zeros({5}));
      }),
      "gmm_nll: params is f32[5, 2, 4] on cpu; expected [..., K, 3] with K >= 1 and (logit, mu, log_sigma) "
      "innermost");
  EXPECT_EQ(
      message_of([&] {
        gmm_nll(zeros({5, 0, 3}), zeros({5}));
      }),
      "gmm_nll: params is f32[5, 0, 3] on cpu; expected [..., K, 3] with K >= 1 and (logit, mu, log_sigma) "
      "innermost");
  EXPECT_EQ(message_of([&] {
              gmm_nll(zeros({5, 2, 3}), zeros({5, 1}));
            }),
            "gmm_nll: y is f32[5, 1] on cpu, but params is f32[5, 2, 3] on cpu; expected y of shape [5]");
  EXPECT_EQ(
      message_of([&] {
        gmm_nll(zeros({5, 2, 3}), zeros({5}, DType::bf16));
      }),
      "gmm_nll: y is bf16[5] on cpu, but params is f32[5, 2, 3] on cpu; expected y of the same dtype, or "
      "f32 next to bf16 or f16, on one device");
  EXPECT_EQ(
      message_of([&] {
        gmm_nll(zeros({5, 2, 3}, DType::f64), zeros({5}));
      }),
      "gmm_nll: y is f32[5] on cpu, but params is f64[5, 2, 3] on cpu; expected y of the same dtype, or "
      "f32 next to bf16 or f16, on one device");
  EXPECT_EQ(message_of([] { parse_reduction("average"); }),
            "loss: there is no reduction \"average\"; expected mean, sum or none");
}

}  // namespace
}  // namespace tessera::ops
