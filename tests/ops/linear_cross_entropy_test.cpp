#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/variant.h"
#include "runtime/allocator.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

/// [rows, 8]: the values in the first column, so that every row of the operator takes it.
Tensor column(const std::vector<float>& values, DType dtype, Device device) {
  const Tensor wide = Tensor::zeros({int64_t(values.size()), 8}, DType::f32, Device::cpu());
  const Tensor first = wide.slice(1, 0, 1);
  first.copy_from(Tensor::from(values, {int64_t(values.size()), 1}));
  return wide.to(dtype).to(device);
}

struct LossOutcome {
  double loss;
  std::vector<double> dx, dweight;
};

template <class F>
LossOutcome outcome_of(Tensor x, Tensor weight, F&& loss_of) {
  require_grad(x);
  require_grad(weight, x.dtype() == DType::f64 ? DType::f64 : DType::f32);
  Tape tape;
  const Tensor loss = loss_of(x, weight);
  tape.backward(loss);
  return {loss.item(), grad(x).to_vector<double>(), grad(weight).to_vector<double>()};
}

TEST(LinearCrossEntropy, WorkedByHand) {
  // x = 1, weight = (0, log 2, log 5): softmax (1, 2, 5) / 8.
  const Tensor x = Tensor::from(std::vector<double>{1}, {1, 1}),
               weight = Tensor::from(std::vector<double>{0, std::log(2), std::log(5)}, {3, 1});
  const LossOutcome got = outcome_of(
      x, weight, [](const Tensor& in, const Tensor& w) { return linear_cross_entropy(in, w, labels({2})); });
  EXPECT_DOUBLE_EQ(got.loss, std::log(8.0 / 5));
  const double slopes[] = {1.0 / 8, 2.0 / 8, -3.0 / 8};
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(got.dweight[i], slopes[i], 1e-15);  // a few ulp of 1
  EXPECT_NEAR(got.dx[0], 2.0 / 8 * std::log(2) - 3.0 / 8 * std::log(5), 1e-15);
}

TEST(LinearCrossEntropy, IsCrossEntropyOfLinearHoweverItIsCut) {
  const Device cpu = Device::cpu();
  const Tensor x = normal_on(cpu, {13, 6}, DType::f64, 1), weight = normal_on(cpu, {9, 6}, DType::f64, 2);
  const Tensor targets = labels({0, 8, -100, 3, 3, 1, 2, -100, 7, 6, 5, 4, 0});
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    const LossOutcome plain = outcome_of(x, weight, [&](const Tensor& in, const Tensor& w) {
      return cross_entropy(linear(in, w), targets, {.reduction = reduction});
    });
    for (const int64_t chunk : {0, 1, 4, 12, 13, 100}) {
      const LossOutcome cut = outcome_of(x, weight, [&](const Tensor& in, const Tensor& w) {
        return linear_cross_entropy(in, w, targets, {}, {.reduction = reduction, .chunk = chunk});
      });
      EXPECT_NEAR(cut.loss, plain.loss, 1e-14 * plain.loss);
      for (size_t i = 0; i < plain.dx.size(); ++i) EXPECT_NEAR(cut.dx[i], plain.dx[i], 1e-14) << chunk;
      for (size_t i = 0; i < plain.dweight.size(); ++i)
        EXPECT_NEAR(cut.dweight[i], plain.dweight[i], 1e-13) << chunk;  // sums of 13, of values near 4
    }
  }
}

TEST(LinearCrossEntropy, IgnoredTokensHaveNeitherLossNorGradient) {
  for (const Device device : devices()) {
    const Tensor x = normal_on(device, {3, 8}, DType::bf16, 1),
                 weight = normal_on(device, {9, 8}, DType::bf16, 2);
    const LossOutcome none = outcome_of(x, weight, [&](const Tensor& in, const Tensor& w) {
      return linear_cross_entropy(in, w, labels({4, 4, 4}, device), {}, {.ignore_index = 4});
    });
    EXPECT_TRUE(std::isnan(none.loss));  // 0 / 0, as cross_entropy
    EXPECT_EQ(none.dx, std::vector<double>(24, 0.0));
    EXPECT_EQ(none.dweight, std::vector<double>(72, 0.0));
    const Tensor targets = labels({1, -100, 3}, device);
    const auto losses =
        linear_cross_entropy(x, weight, targets, {}, {.reduction = Reduction::none}).to_vector<float>();
    EXPECT_EQ(losses[1], 0.0f);
    EXPECT_FLOAT_EQ(linear_cross_entropy(x, weight, targets).item<float>(), (losses[0] + losses[2]) / 2);
  }
}

TEST(LinearCrossEntropy, LogitsFarAboveTheTargetsDoNotOverflow) {
  // l = 300 k for class k: the target's exponential is 0, the largest's would be e^1800 times as large.
  for (const Device device : devices()) {
    const Tensor x = column({100, 100}, DType::bf16, device),
                 weight = column({0, 3, 6, 9, 12, 15, 18, 0, 0}, DType::bf16, device);
    const LossOutcome got = outcome_of(x, weight, [&](const Tensor& in, const Tensor& w) {
      return linear_cross_entropy(in, w, labels({0, 6}, device), {}, {.reduction = Reduction::sum});
    });
    EXPECT_NEAR(got.loss, 1800,
                0x1p-13 * 2);  // an ulp of the logits in f32, of which the loss is a difference
    for (size_t i = 0; i < 16; ++i) EXPECT_EQ(got.dx[i], i == 0 ? 18 : 0) << i;
    for (size_t i = 0; i < 72; ++i) EXPECT_EQ(got.dweight[i], i == 0 ? -100 : i == 48 ? 100 : 0) << i;
    // All logits alike and large: nothing depends on where they stand.
    const Tensor level = column(std::vector<float>(200, 30), DType::bf16, device);
    EXPECT_NEAR(linear_cross_entropy(x, level, labels({0, 199}, device)).item<float>(), std::log(200.0f),
                0x1p-12);  // likewise
  }
}

TEST(LinearCrossEntropy, ACertainTargetKeepsItsDigits) {
  // p = 1 - 8 e^-16: 1 - p is 9.0e-7, of which f32 would keep four bits next to the 1.
  if (Device::cuda_count() == 0 || Device::cuda(0).info().major != 9) GTEST_SKIP() << "row wgmma needs a GPU";
  const Device gpu = Device::cuda(0);
  const ForceVariant force("linear_cross_entropy", "wgmma");
  const double rest = 8 * std::exp(-16.0);
  const LossOutcome got = outcome_of(
      column({16}, DType::bf16, gpu), column({1, 0, 0, 0, 0, 0, 0, 0, 0}, DType::bf16, gpu),
      [&](const Tensor& in, const Tensor& w) { return linear_cross_entropy(in, w, labels({0}, gpu)); });
  EXPECT_NEAR(got.loss, std::log1p(rest), 1e-5 * rest);
  EXPECT_NEAR(got.dx[0], -rest / (1 + rest), rest / 128);  // rounded to bf16 twice
}

TEST(LinearCrossEntropy, ATargetOutOfRange) {
  const Device cpu = Device::cpu();
  EXPECT_EQ(message_of([&] {
              linear_cross_entropy(Tensor::zeros({3, 2}, DType::f32, cpu),
                                   Tensor::zeros({5, 2}, DType::f32, cpu), labels({0, 4, 5}), {},
                                   {.chunk = 2});
            }),
            "linear_cross_entropy: target 5 at position 2 of targets i64[3] on cpu is outside [0, 5) and is "
            "not ignore_index -100");
  if (Device::cuda_count() == 0) return;
  const Device gpu = Device::cuda(0);
  const Tensor x = normal_on(gpu, {3, 8}, DType::bf16, 1), weight = normal_on(gpu, {9, 8}, DType::bf16, 2);
  const Tensor targets = labels({0, 9, -1}, gpu);
  const auto losses =
      linear_cross_entropy(x, weight, targets, {}, {.reduction = Reduction::none}).to_vector<float>();
  EXPECT_TRUE(std::isfinite(losses[0]) && std::isnan(losses[1]) && std::isnan(losses[2]));
  const LossOutcome got = outcome_of(
      x, weight, [&](const Tensor& in, const Tensor& w) { return linear_cross_entropy(in, w, targets); });
  EXPECT_TRUE(std::isnan(got.loss));
  for (size_t i = 8; i < 24; ++i) EXPECT_TRUE(std::isnan(got.dx[i])) << i;
}

TEST(LinearCrossEntropy, ErrorsNameWhatIsWrong) {
  const auto zeros = [](const Shape& shape, DType dtype = DType::f32) {
    return Tensor::zeros(shape, dtype, Device::cpu());
  };
  const Tensor x = zeros({2, 3}), weight = zeros({5, 3});
  EXPECT_EQ(message_of([&] { linear_cross_entropy(x, weight, Tensor()); }),
            "linear_cross_entropy: targets is undefined");
  EXPECT_EQ(message_of([&] { linear_cross_entropy(x, weight, labels({0})); }),
            "linear_cross_entropy: targets is i64[1] on cpu, but x is f32[2, 3] on cpu; expected targets of "
            "shape [2]");
  EXPECT_EQ(message_of([&] { linear_cross_entropy(x, weight, zeros({2})); }),
            "linear_cross_entropy: targets is f32[2] on cpu; expected i64 or i32");
  EXPECT_EQ(message_of([&] {
              linear_cross_entropy(x, zeros({0, 3}), labels({0, 0}));
            }),
            "linear_cross_entropy: weight is f32[0, 3] on cpu, without classes; expected [V, d] with V >= 1");
  EXPECT_EQ(message_of([&] {
              linear_cross_entropy(x, weight, labels({0, 0}), {}, {.label_smoothing = -1});
            }),
            "linear_cross_entropy: label_smoothing is -1; expected 0 to 1");
  EXPECT_EQ(message_of([&] {
              linear_cross_entropy(x, weight, labels({0, 0}), {}, {.chunk = -1});
            }),
            "linear_cross_entropy: chunk is -1; expected 0 or more tokens");
}

TEST(LinearCrossEntropy, TheLogitsAreNeverThereAsAWhole) {
  // 4,096 tokens of 10,000 classes are 82 MB in bf16 and 164 in f32; a chunk of 256 a sixteenth of that.
  for (const Device device : devices())
    for (const bool records : {false, true}) {
      constexpr int64_t kTokens = 4096, kClasses = 10000, kWidth = 8, kChunk = 256;
      if (device.is_cpu() && records) continue;  // products of bf16 are widened to copies there
      Tensor x = normal_on(device, {kTokens, kWidth}, DType::bf16, 1),
             weight = normal_on(device, {kClasses, kWidth}, DType::bf16, 2);
      const Tensor targets = Tensor::zeros({kTokens}, DType::i64, device);
      if (records) require_grad(x), require_grad(weight, DType::f32);
      device.synchronize();
      device.allocator().reset_peaks();
      const size_t before = device.allocator().stats().allocated;
      {
        Tape tape;
        const Tensor loss = linear_cross_entropy(x, weight, targets, {}, {.chunk = kChunk});
        if (records) tape.backward(loss);
        EXPECT_GT(loss.item(), 0);
      }
      const size_t most = device.allocator().stats().allocated_peak - before;
      // Logits in f32 and dl in bf16; dweight twice (the leaf's own copy); and a few MB: products of the
      // backward split their sums.
      const size_t chunk = kChunk * kClasses * 6, gradients = 2 * kClasses * 32 + kTokens * 32;
      EXPECT_LT(most, chunk + gradients + 24'000'000) << device.name() << " " << records;
    }
}

/// dweight of mean reduction for a loss whose backward pass begins with `scale`, divided by it; `factor`
/// stands between the loss and what backward begins at.
std::vector<double> scaled_dweight(Tensor x, Tensor weight, const Tensor& targets, double begin,
                                   double factor = 1) {
  require_grad(x);
  require_grad(weight, x.dtype() == DType::f64 ? DType::f64 : DType::f32);
  const Tensor loss_scale = begin == 1 ? Tensor() : Tensor::full({}, begin, DType::f32, x.device());
  Tape tape({.loss_scale = loss_scale});
  tape.backward(scale(linear_cross_entropy(x, weight, targets), factor));
  std::vector<double> values = grad(weight).to_vector<double>();
  for (double& value : values) value /= begin * factor;
  return values;
}

TEST(LinearCrossEntropy, TheLossScaleKeepsTheGradientsOfManyTokensInF16) {
  // dl of a class that is no target is p / N, about 1.5e-8: f16 rounds what is below 3e-8 to 0.
  constexpr int64_t kTokens = 32768, kClasses = 2000, kTargets = 100, kWidth = 8;
  std::vector<int64_t> targets(kTokens);
  for (size_t i = 0; i < targets.size(); ++i) targets[i] = int64_t(i) * 7 % kTargets;
  const Tensor x = normal_on(Device::cpu(), {kTokens, kWidth}, DType::f16, 1),
               weight = normal_on(Device::cpu(), {kClasses, kWidth}, DType::f16, 2, 0.3);
  // f32 has eight digits of p / N: as good as f64 next to an error of 0.01.
  const std::vector<double> truth =
      scaled_dweight(x.to(DType::f32), weight.to(DType::f32), labels(targets), 1);
  const auto worst_error = [&](const std::vector<double>& got) {
    double worst = 0;
    for (size_t row = kTargets; row < kClasses; ++row) {
      double error = 0, size = 0;
      for (size_t i = row * kWidth; i < (row + 1) * kWidth; ++i)
        error += (got[i] - truth[i]) * (got[i] - truth[i]), size += truth[i] * truth[i];
      worst = std::max(worst, std::sqrt(error / size));
    }
    return worst;
  };
  for (const Device device : devices()) {
    const Tensor own_x = x.to(device), own_weight = weight.to(device), own = labels(targets, device);
    EXPECT_LE(worst_error(scaled_dweight(own_x, own_weight, own, 0x1p16)), 0.01) << device.name();
    EXPECT_GT(worst_error(scaled_dweight(own_x, own_weight, own, 1)), 0.5)
        << device.name();  // nothing is left
  }
}

TEST(LinearCrossEntropy, APowerOfTwoAsLossScaleRoundsNothing) {
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const double factor : {1.0, 0.25}) {
        const Tensor x = normal_on(device, {300, 40}, dtype, 3),
                     weight = normal_on(device, {201, 40}, dtype, 4, 0.3);
        std::vector<int64_t> targets(300);
        for (size_t i = 0; i < targets.size(); ++i) targets[i] = i % 5 ? int64_t(i * 13 % 201) : -100;
        const Tensor own = labels(targets, device);
        EXPECT_EQ(scaled_dweight(x, weight, own, 0x1p12, factor), scaled_dweight(x, weight, own, 1, 1))
            << device.name() << " " << dtype << " " << factor;
      }
}

}  // namespace
}  // namespace tessera::ops
