#include "ops/dropout/dropout.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/checkpoint.h"
#include "ops/pointwise/pointwise.h"
#include "runtime/capture.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(Dropout, TheMaskIsThePhiloxStreamInRowMajorOrder) {
  constexpr double kP = 0.25;
  Rng rng(9);
  rng.reserve(kCpu);  // so that the stream is number 1
  const auto y = dropout(ones({7, 13}), kP, rng).to_vector<float>();
  for (size_t i = 0; i < y.size(); ++i) {
    const bool keeps = philox(9, 1, i / 4).word[i % 4] >= uint32_t(kP * 4294967296.0);
    EXPECT_EQ(y[i], keeps ? float(1 / (1 - kP)) : 0.0f) << i;
  }
}

TEST(Dropout, LayoutAndDTypeDoNotChangeTheMask) {
  const auto run = [](const Tensor& x) {
    Rng rng(3);
    return dropout(x, 0.5, rng).to_vector<float>();
  };
  for (const int64_t width : {8, 11, 37, 300, 1365}) {
    const Shape shape{11, width};
    const auto expected = run(ones(shape));
    for (const Device device : devices()) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
        EXPECT_EQ(run(ones(shape, dtype, device)), expected) << width << name_of(dtype) << device.name();
      const Tensor turned = ones({width, 11}, DType::bf16, device).transpose(0, 1),
                   part =
                       ones({22, width + 3}, DType::bf16, device).slice(0, 0, 22, 2).slice(1, 3, width + 3);
      for (const Tensor& x : {turned, part, ones({}, DType::f32, device).expand(shape)})
        EXPECT_EQ(run(x), expected) << width << device.name();
    }
  }
}

TEST(Dropout, DropsTheRightShare) {
  constexpr int64_t kCount = 1'000'000;
  for (const double p : {0.001, 0.1, 0.5, 0.999}) {
    Rng rng(17);
    double kept = 0;
    for (const float value : dropout(ones({kCount}), p, rng).to_vector<float>()) kept += value != 0;
    // Five standard deviations of the binomial distribution: one seed in 1.7 million fails by chance.
    EXPECT_NEAR(kept, kCount * (1 - p), 5 * std::sqrt(kCount * p * (1 - p))) << p;
  }
}

TEST(Dropout, KeepsNaNInBothDirections) {
  // Whole packs, ragged ends and a strided view; nine tenths of the elements are dropped.
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const int64_t width : {64, 37}) {
        const Tensor wide = Tensor::full({8, 80}, std::nan(""), dtype, device);
        const Tensor x = wide.slice(1, 3, 3 + width);
        Rng rng(5), again(5);
        const Tensor dy = Tensor::full({8, width}, std::nan(""), dtype, device);
        for (const double value : dropout(x, 0.9, rng).to_vector<double>()) EXPECT_TRUE(std::isnan(value));
        const Tensor dx = gradient_of(ones({8, width}, dtype, device), dy,
                                      [&](const Tensor& in) { return dropout(in, 0.9, again); });
        for (const double value : dx.to_vector<double>()) EXPECT_TRUE(std::isnan(value));
      }
}

TEST(Dropout, EachCallDrawsANewMask) {
  Rng rng(1);
  const auto first = dropout(ones({64}), 0.5, rng).to_vector<float>();
  EXPECT_NE(dropout(ones({64}), 0.5, rng).to_vector<float>(), first);
}

TEST(Dropout, BackwardUsesTheMaskOfForward) {
  Tensor x = ones({5, 9});
  require_grad(x);
  Rng rng(2);
  Tape tape;
  const Tensor y = dropout(x, 0.5, rng);
  dropout(x, 0.5, rng);
  tape.backward(std::vector{y}, std::vector{ones({}).expand({5, 9})});
  EXPECT_EQ(grad(x).to_vector<float>(), y.to_vector<float>());
}

TEST(Dropout, ARecomputedFunctionSeesTheSameMask) {
  Tensor x = ones({5, 9});
  require_grad(x);
  Rng rng(2);
  Tape tape;
  const Tensor y = checkpoint([&](const Tensor& v) { return dropout(mul(v, v), 0.5, rng); }, x);
  dropout(x, 0.5, rng);
  tape.backward(std::vector{y}, std::vector{ones({5, 9})});
  EXPECT_EQ(grad(x).to_vector<float>(), scale(y.detach(), 2).to_vector<float>());
}

TEST(Dropout, ZeroIsTheIdentityAndDrawsNothing) {
  Tensor x = ones({3});
  require_grad(x);
  Rng rng(4);
  Tape tape;
  const Tensor y = dropout(x, 0, rng);
  EXPECT_TRUE(y.shares_storage(x));
  EXPECT_EQ(rng.state().offset, 0u);
  tape.backward(std::vector{y}, std::vector{ones({3})});
  EXPECT_EQ(grad(x).to_vector<float>(), (std::vector<float>(3, 1)));
}

TEST(Dropout, RefusesWhatIsNoProbability) {
  Rng rng(1);
  for (const double p : {-0.1, 1.0, 2.0, double(NAN), double(INFINITY)}) try {
      dropout(ones({2, 3}), p, rng);
      FAIL() << "expected an error for " << p;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("f32[2, 3] on cpu; expected 0 <= p < 1"), std::string::npos)
          << error.what();
    }
  EXPECT_THROW(dropout(Tensor(), 0.5, rng), Error);
  EXPECT_THROW(dropout(Tensor::zeros({2}, DType::i32, kCpu), 0.5, rng), Error);
}

TEST(Dropout, AGraphDrawsTheMasksThatEagerCallsDraw) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  const Shape shape{33, 129};
  Rng on_cpu(6), on_gpu(6);
  Tensor x = ones(shape, DType::f32, gpu), y;
  require_grad(x);
  Captured step(gpu, [&] {
    Tape tape;
    y = dropout(x, 0.3, on_gpu);
    zero_grad(x);
    tape.backward(std::vector{y}, std::vector{ones(shape, DType::f32, gpu)});
  });
  for (int call = 0; call < 5; ++call) {
    step();
    const auto expected = dropout(ones(shape), 0.3, on_cpu).to_vector<float>();
    EXPECT_EQ(y.to_vector<float>(), expected) << call;
    EXPECT_EQ(grad(x).to_vector<float>(), expected) << call;
  }
  EXPECT_TRUE(step.is_graph());
}

}  // namespace
}  // namespace tessera::ops
