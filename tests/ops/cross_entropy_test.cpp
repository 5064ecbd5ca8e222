#include "ops/cross_entropy/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(CrossEntropy, WorkedByHand) {
  // softmax(0, log 2, log 5) = (1, 2, 5) / 8.
  const Tensor logits = Tensor::from(std::vector<double>{0, std::log(2), std::log(5)}, {1, 3});
  const Tensor target = labels({2});
  EXPECT_DOUBLE_EQ(cross_entropy(logits, target).item<double>(), std::log(8.0 / 5));
  const Tensor one = Tensor::full({}, 1.0, DType::f64, Device::cpu());
  const auto slope = gradient_of(logits, one, [&](const Tensor& in) {
                       return cross_entropy(in, target);
                     }).to_vector<double>();
  const double expected[] = {1.0 / 8, 2.0 / 8, -3.0 / 8};
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(slope[i], expected[i], 1e-15);  // a few ulp of 1
  // Smoothing 0.3: the target's distribution is (0.1, 0.1, 0.8).
  const CrossEntropyOptions smoothed{.label_smoothing = 0.3};
  EXPECT_DOUBLE_EQ(cross_entropy(logits, target, smoothed).item<double>(),
                   0.1 * std::log(8.0) + 0.1 * std::log(4.0) + 0.8 * std::log(8.0 / 5));
  const auto soft = gradient_of(logits, one, [&](const Tensor& in) {
                      return cross_entropy(in, target, smoothed);
                    }).to_vector<double>();
  const double soft_expected[] = {1.0 / 8 - 0.1, 2.0 / 8 - 0.1, 5.0 / 8 - 0.8};
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(soft[i], soft_expected[i], 1e-15);
}

TEST(CrossEntropy, TheMeanCountsTheTargetsThatAreNotIgnored) {
  for (const Device device : devices()) {
    const Tensor logits = Tensor::zeros({4, 8}, DType::f32, device);
    const Tensor targets = labels({3, -100, 0, -100}, device);
    const float each = std::log(8.0f);
    const auto reduced = [&](Reduction reduction) {
      return cross_entropy(logits, targets, {.reduction = reduction}).to_vector<float>();
    };
    const auto losses = reduced(Reduction::none);
    for (const size_t row : {0, 2}) EXPECT_FLOAT_EQ(losses[row], each);
    for (const size_t row : {1, 3}) EXPECT_EQ(losses[row], 0.0f);
    EXPECT_FLOAT_EQ(reduced(Reduction::mean)[0], each);
    EXPECT_FLOAT_EQ(reduced(Reduction::sum)[0], 2 * each);
    const auto slopes = gradient_of(logits, Tensor::full({}, 1.0, DType::f32, device), [&](const Tensor& in) {
                          return cross_entropy(in, targets);
                        }).to_vector<float>();
    for (size_t i = 0; i < 32; ++i) {
      if ((i / 8) % 2 == 1) {
        EXPECT_EQ(slopes[i], 0.0f) << i;
      } else {  // the probability is the exponential of a rounded logarithm: an ulp of 2 each
        EXPECT_NEAR(slopes[i], (0.125f - (i == 3 || i == 16 ? 1.0f : 0.0f)) / 2, 4 * epsilon(DType::f32))
            << i;
      }
    }
  }
}

TEST(CrossEntropy, AllIgnoredHaveNoMeanAndNoGradient) {
  for (const Device device : devices()) {
    const Tensor logits = Tensor::full({3, 5}, 2.0, DType::f32, device);
    const Tensor targets = labels({4, 4, 4}, device);
    CrossEntropyOptions options{.ignore_index = 4};  // a legal class, ignored
    EXPECT_TRUE(std::isnan(cross_entropy(logits, targets, options).item<float>()));
    const auto slopes = gradient_of(logits, Tensor::full({}, 1.0, DType::f32, device), [&](const Tensor& in) {
                          return cross_entropy(in, targets, options);
                        }).to_vector<float>();
    EXPECT_EQ(slopes, std::vector<float>(15, 0.0f));
    options.reduction = Reduction::sum;
    EXPECT_EQ(cross_entropy(logits, targets, options).item<float>(), 0.0f);
  }
}

TEST(CrossEntropy, HugeAndInfiniteLogits) {
  for (const Device device : devices()) {
    const std::vector<float> values{1e4f, 0, 0, 1e4f, -kInfF, 1, -kInfF, 1, 1e4f, 1e4f};
    const Tensor logits = Tensor::from(values, {5, 2}, device);
    const auto loss = [&](const std::vector<int64_t>& targets) {
      return cross_entropy(logits, labels(targets, device), {.reduction = Reduction::none})
          .to_vector<float>();
    };
    const auto near = [](const std::vector<float>& got, const std::vector<float>& expected) {
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_FLOAT_EQ(got[i], expected[i]) << i;
    };
    near(loss({0, 0, 1, 0, 0}), {0, 1e4f, 0, kInfF, std::log(2.0f)});
    // Smoothing gives the class of probability 0 a share: infinite, not NaN.
    const CrossEntropyOptions smoothed{.label_smoothing = 0.5, .reduction = Reduction::none};
    const auto soft = cross_entropy(logits, labels({0, 0, 1, 0, 0}, device), smoothed).to_vector<float>();
    near(soft, {2500, 7500, kInfF, kInfF, std::log(2.0f)});
    const auto slopes =
        gradient_of(logits, Tensor::full({5}, 1.0, DType::f32, device), [&](const Tensor& in) {
          return cross_entropy(in, labels({0, 0, 1, 0, 0}, device), {.reduction = Reduction::none});
        }).to_vector<float>();
    near(slopes, {0, 0, -1, 1, 0, 0, -1, 1, -0.5f, 0.5f});
  }
}

TEST(CrossEntropy, OneClassIsCertain) {
  for (const Device device : devices()) {
    const Tensor logits = Tensor::full({3, 1}, 17.0, DType::f32, device);
    const CrossEntropyOptions options{.label_smoothing = 0.1};
    EXPECT_EQ(cross_entropy(logits, labels({0, 0, 0}, device), options).item<float>(), 0.0f);
  }
}

TEST(CrossEntropy, ARowWithoutADistributionIsNaN) {
  for (const Device device : devices()) {
    for (const int64_t classes : {3, 1500}) {
      const Tensor logits = Tensor::full({2, classes}, double(-kInfF), DType::f32, device);
      const Tensor row = logits.slice(0, 1, 2);
      row.fill(0);
      const auto losses =
          cross_entropy(logits, labels({0, 1}, device), {.reduction = Reduction::none}).to_vector<float>();
      EXPECT_TRUE(std::isnan(losses[0]));
      EXPECT_FLOAT_EQ(losses[1], std::log(float(classes)));
    }
  }
}

TEST(CrossEntropy, TargetsMayBeI32AndOfAnyRankAndLayout) {
  for (const Device device : devices()) {
    const Tensor logits =
        Tensor::from(std::vector<float>{1, 2, 3, 0, 0, 1, 5, 5, 2, 1, 0, 0}, {2, 2, 3}, device);
    const Tensor narrow = Tensor::from(std::vector<int32_t>{2, 0, 1, 0}, {2, 2}, device);
    const Tensor wide = Tensor::from(std::vector<int64_t>{2, 1, 0, 0}, {2, 2}, device).transpose(0, 1);
    const CrossEntropyOptions each{.reduction = Reduction::none};
    const Tensor losses = cross_entropy(logits, narrow, each);
    EXPECT_EQ(losses.shape(), (Shape{2, 2}));
    EXPECT_EQ(losses.to_vector<float>(), cross_entropy(logits, wide, each).to_vector<float>());
    const Tensor single = Tensor::from(std::vector<float>{0, 0}, {2}, device);
    const Tensor target = Tensor::from(std::vector<int64_t>{1}, {}, device);
    EXPECT_FLOAT_EQ(cross_entropy(single, target).item<float>(), std::log(2.0f));
  }
}

TEST(CrossEntropy, ATargetOutOfRangeIsAnErrorOnTheCpu) {
  const Tensor logits = Tensor::zeros({4, 5}, DType::f32, Device::cpu());
  EXPECT_EQ(message_of([&] {
              cross_entropy(logits, labels({0, 4, 5, 1}));
            }),
            "cross_entropy: target 5 at position 2 of targets i64[4] on cpu is outside [0, 5) and is not "
            "ignore_index -100");
  EXPECT_EQ(message_of([&] {
              cross_entropy(logits, labels({-1, 4, 0, 1}), {.ignore_index = -2});
            }),
            "cross_entropy: target -1 at position 0 of targets i64[4] on cpu is outside [0, 5) and is not "
            "ignore_index -2");
}

TEST(CrossEntropy, ATargetOutOfRangeIsNaNOnAGpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  const Tensor logits = Tensor::zeros({3, 5}, DType::f32, gpu);
  const Tensor targets = labels({0, 5, -1}, gpu);
  const CrossEntropyOptions each{.reduction = Reduction::none};
  const auto losses = cross_entropy(logits, targets, each).to_vector<float>();
  EXPECT_TRUE(std::isfinite(losses[0]) && std::isnan(losses[1]) && std::isnan(losses[2]));
  EXPECT_TRUE(std::isnan(cross_entropy(logits, targets).item<float>()));
  const auto slopes = gradient_of(logits, Tensor::full({3}, 1.0, DType::f32, gpu), [&](const Tensor& in) {
                        return cross_entropy(in, targets, each);
                      }).to_vector<float>();
  for (size_t i = 0; i < 15; ++i) EXPECT_EQ(std::isnan(slopes[i]), i >= 5) << i;
}

TEST(CrossEntropy, ErrorsNameWhatIsWrong) {
  const auto zeros = [](const Shape& shape, DType dtype) {
    return Tensor::zeros(shape, dtype, Device::cpu());
  };
  const Tensor logits = zeros({2, 3}, DType::f32);
  EXPECT_EQ(message_of([&] {
              cross_entropy(Tensor(), labels({0, 1}));
            }),
            "cross_entropy: logits is undefined");
  EXPECT_EQ(
      message_of([&] { cross_entropy(logits, labels({0})); }),
      "cross_entropy: targets is i64[1] on cpu, but logits is f32[2, 3] on cpu; expected targets of shape "
      "[2]");
  EXPECT_EQ(message_of([&] { cross_entropy(logits, zeros({2}, DType::f32)); }),
            "cross_entropy: targets is f32[2] on cpu; expected i64 or i32");
  EXPECT_EQ(message_of([&] {
              cross_entropy(zeros({2, 0}, DType::f32), labels({0, 0}));
            }),
            "cross_entropy: logits is f32[2, 0] on cpu, without classes; expected [..., V] with V >= 1");
  EXPECT_EQ(message_of([&] {
              cross_entropy(logits, labels({0, 1}), {.label_smoothing = 1.5});
            }),
            "cross_entropy: label_smoothing is 1.5; expected 0 to 1");
}

TEST(CrossEntropy, ManyClassesAreSummedInDoubleOnTheCpu) {
  // Added in f32, a million equal terms that are no powers of two are off by more than 1e-4.
  constexpr int64_t kClasses = 1'000'000;
  const Tensor logits = Tensor::full({1, kClasses}, -2.3, DType::f32, Device::cpu());
  logits.slice(1, 0, 1).fill(0);
  const Tensor target = Tensor::zeros({1}, DType::i64, Device::cpu());
  const double log_sum = std::log(1 + double(kClasses - 1) * std::exp(double(-2.3f)));
  EXPECT_FLOAT_EQ(float(cross_entropy(logits, target).item()), float(log_sum));
  // With smoothing 1 the loss is the log-sum-exp less the mean logit.
  const double mean = double(-2.3f) * double(kClasses - 1) / double(kClasses);
  EXPECT_FLOAT_EQ(float(cross_entropy(logits, target, {.label_smoothing = 1}).item()), float(log_sum - mean));
}

TEST(CrossEntropy, AnyNumberOfClassesIsThatOfF64OnTheCpu) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t classes : {1, 15, 16, 17, 511, 512, 513, 1031})
      for (const double smoothing : {0.0, 0.25}) {
        const Tensor logits = quarters({4, classes}, dtype);
        const Tensor targets = labels({0, classes - 1, classes / 2, -100});
        const auto of = [&](const Tensor& in) {
          return cross_entropy(in, targets, {.label_smoothing = smoothing});
        };
        const double loss = of(logits).item(), exact = of(logits.to(DType::f64)).item();
        EXPECT_NEAR(loss, exact, 1e-6 * (1 + std::fabs(exact))) << classes;
        const auto dx = gradient_of(logits, ones({}, DType::f32), of).to_vector<double>(),
                   exact_dx =
                       gradient_of(logits.to(DType::f64), ones({}, DType::f64), of).to_vector<double>();
        for (size_t i = 0; i < dx.size(); ++i)
          ASSERT_NEAR(dx[i], exact_dx[i], epsilon(dtype) * std::fabs(exact_dx[i]) + 1e-7) << classes;
      }
}

TEST(CrossEntropy, OverwrittenLogitsHoldTheirGradient) {
  for (const Device device : devices()) {
    std::vector<float> values;
    for (int i = 0; i < 6 * 40; ++i) values.push_back(float((i * 37) % 101) / 25 - 2);
    const Tensor targets = labels({3, -100, 0, 39, 7, 7}, device);
    for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
      const CrossEntropyOptions kept{.label_smoothing = 0.1, .reduction = reduction};
      CrossEntropyOptions given = kept;
      given.overwrite_logits = true;
      Tensor x = Tensor::from(values, {6, 40}, device);
      require_grad(x);
      float loss = 0;
      std::vector<float> expected;
      {
        Tape tape;
        const Tensor result = cross_entropy(scale(x, 1.0), targets, kept);
        loss = result.item<float>();
        tape.backward(result);
        expected = grad(x).to_vector<float>();
      }
      zero_grad(x);
      Tape tape;
      const Tensor logits = scale(x, 1.0), result = cross_entropy(logits, targets, given);
      EXPECT_FLOAT_EQ(result.item<float>(), loss);
      tape.backward(result);
      const auto got = logits.detach().to_vector<float>();
      EXPECT_EQ(got, grad(x).to_vector<float>());
      // The row's two sums may be added in another order: an ulp of a probability.
      for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1.2e-7) << i;
    }
  }
}

TEST(CrossEntropy, OverwrittenLogitsAreRoundedAfterTheLossScale) {
  // p / R is 1.2e-7, two steps of f16 at 0: without a scale a quarter of it is lost.
  constexpr int64_t kRows = 4096, kClasses = 2000;
  std::vector<int64_t> targets(kRows, 0);
  std::vector<float> values;
  for (int64_t i = 0; i < kRows * kClasses; ++i) values.push_back(float((i * 37) % 101) / 100);
  const Tensor raw = Tensor::from(values, {kRows, kClasses}).to(DType::f16);
  for (const Device device : devices())
    for (const double factor : {1.0, 0.5}) {
      const auto gradient = [&](DType dtype, double begin, bool overwrite) {
        Tensor x = raw.to(dtype).to(device);
        require_grad(x);
        const Tensor loss_scale = begin == 1 ? Tensor() : Tensor::full({}, begin, DType::f32, device);
        Tape tape({.loss_scale = loss_scale});
        const Tensor loss =
            cross_entropy(scale(x, 1.0), labels(targets, device), {.overwrite_logits = overwrite});
        tape.backward(scale(loss, factor));
        auto got = grad(x).to(DType::f32).to_vector<double>();
        for (double& value : got) value /= begin * factor;
        return got;
      };
      const auto truth = gradient(DType::f32, 1, false), got = gradient(DType::f16, 0x1p16, true);
      double worst = 0;
      for (size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] / truth[i] - 1));
      // Rounded to f16 once, and again without an error when halved; probabilities of the GPU to 1e-6.
      EXPECT_LT(worst, 0x1p-11 + 1e-5) << device.name() << " " << factor;
    }
}

TEST(CrossEntropy, NothingIsOverwrittenWithoutATape) {
  const Tensor logits = Tensor::full({2, 3}, 0.5, DType::f32, Device::cpu());
  cross_entropy(logits, labels({0, 1}), {.overwrite_logits = true});
  EXPECT_EQ(logits.to_vector<float>(), std::vector<float>(6, 0.5f));
}

TEST(CrossEntropy, WhoKeptOverwrittenLogitsIsTold) {
  Tensor x = Tensor::full({2, 3}, 0.5, DType::f32, Device::cpu());
  require_grad(x);
  Tape tape;
  const Tensor logits = scale(x, 2.0), squares = mul(logits, logits);
  const Tensor loss = cross_entropy(logits, labels({0, 1}), {.overwrite_logits = true});
  const Tensor total = add(loss, sum(squares));
  EXPECT_NE(message_of([&] { tape.backward(total); }).find("written in place"), std::string::npos);
}

TEST(CrossEntropy, ErrorsSayWhatCannotBeOverwritten) {
  Tensor x = Tensor::zeros({2, 3}, DType::f32, Device::cpu());
  EXPECT_EQ(message_of([&] {
              cross_entropy(x, labels({0, 1}), {.reduction = Reduction::none, .overwrite_logits = true});
            }),
            "cross_entropy: overwrite_logits with the reduction none; expected mean or sum");
  require_grad(x);
  const Tape tape;
  EXPECT_EQ(
      message_of([&] {
        cross_entropy(x, labels({0, 1}), {.overwrite_logits = true});
      }),
      "cross_entropy: overwrite_logits, but logits f32[2, 3] on cpu is a leaf, or a view of one; expected a "
      "result of the tape with memory of its own");
  for (const Tensor& view : {reshape(x, {2, 3}), slice(x, 0, 0, 2)})
    expect_error([&] { cross_entropy(view, labels({0, 1}), {.overwrite_logits = true}); }, {"a view of one"});
  const Tensor row = scale(slice(x, 0, 0, 1), 1);
  expect_error(
      [&] {
        cross_entropy(expand(row, {2, 3}), labels({0, 1}), {.overwrite_logits = true});
      },
      {"expanded"});
}

}  // namespace
}  // namespace tessera::ops
