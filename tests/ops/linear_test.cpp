#include "ops/linear/linear.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "ops/random/random.h"
#include "runtime/capture.h"
#include "tests/errors.h"
#include "tests/ops/guarded.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

// x = {1, 2}, weight = {{1, 0}, {3, 4}, {-1, 1}}, bias = {10, 20, 30}: y = {11, 31, 31}; dy = {1, 2, 3} gives
// dx = {1 + 6 - 3, 8 + 3}, dweight = dy x^T, dbias = dy.
TEST(Linear, ByHandOnAVector) {
  Tensor x = Tensor::from(std::vector<double>{1, 2}, {2});
  Tensor weight = Tensor::from(std::vector<double>{1, 0, 3, 4, -1, 1}, {3, 2});
  Tensor bias = Tensor::from(std::vector<double>{10, 20, 30}, {3});
  require_grad(x), require_grad(weight), require_grad(bias);
  Tape tape;
  const Tensor y = linear(x, weight, bias);
  ASSERT_EQ(y.shape(), Shape({3}));
  EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{11, 31, 31}));
  tape.backward(std::vector{y}, std::vector{Tensor::from(std::vector<double>{1, 2, 3}, {3})});
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{4, 11}));
  EXPECT_EQ(grad(weight).to_vector<double>(), (std::vector<double>{1, 2, 2, 4, 3, 6}));
  EXPECT_EQ(grad(bias).to_vector<double>(), (std::vector<double>{1, 2, 3}));
}

// 1001 is not a bf16 (its neighbours are 1000 and 1004): parameters' gradients keep f32 if the leaf wants it.
TEST(Linear, ParameterGradientsComeInF32) {
  const Tensor x = ones({1001, 2}, DType::bf16);
  Tensor weight = ones({9, 2}, DType::bf16), bias = ones({9}, DType::bf16);
  require_grad(weight, DType::f32), require_grad(bias, DType::f32);
  const void* address = nullptr;
  for (int step = 1; step <= 3; ++step) {  // the second and third write into the leaf's buffer
    Tape tape;
    const Tensor y = linear(x, weight, bias);
    tape.backward(std::vector{y}, std::vector{ones({1001, 9}, DType::bf16)});
    EXPECT_EQ(grad(weight).to_vector<double>(), std::vector<double>(18, 1001.0 * step));
    EXPECT_EQ(grad(bias).to_vector<double>(), std::vector<double>(9, 1001.0 * step));
    if (step > 1) {
      EXPECT_EQ(grad(weight).raw(), address);
    }
    address = grad(weight).raw();
  }
  zero_grad(weight);
  Tape tape;
  tape.backward(std::vector{linear(x, weight)}, std::vector{ones({1001, 9}, DType::bf16)});
  EXPECT_EQ(grad(weight).to_vector<double>(), std::vector<double>(18, 1001.0));
  EXPECT_EQ(grad(weight).raw(), address);
}

// The second product of dx lands in the first's memory, or a fan-out would lose one branch.
TEST(Linear, TheInputsGradientIsTheSumOverItsReaders) {
  Tensor x = ones({3, 2}, DType::f32);
  const Tensor first = Tensor::full({4, 2}, 1, DType::f32, Device::cpu()),
               second = Tensor::full({4, 2}, 2, DType::f32, Device::cpu());
  require_grad(x);
  Tape tape;
  const std::vector<Tensor> results{linear(x, first), linear(x, second)};
  tape.backward(results, std::vector{ones({3, 4}, DType::f32), ones({3, 4}, DType::f32)});
  EXPECT_EQ(grad(x).to_vector<double>(), std::vector<double>(6, 4 * 1 + 4 * 2));
}

TEST(Linear, AnyGradientBufferIsFilled) {
  const Tensor x = ones({5, 3}, DType::f32);
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16})
    for (const bool transposed : {false, true}) {
      Tensor weight = ones({4, 3}, DType::f32);
      require_grad(weight, dtype);
      Tensor buffer = transposed ? Tensor::empty({3, 4}, dtype, Device::cpu()).transpose(0, 1)
                                 : Tensor::empty({4, 3}, dtype, Device::cpu());
      set_grad_buffer(weight, buffer);
      for (int step = 1; step <= 2; ++step) {
        Tape tape;
        const Tensor y = linear(x, weight);
        tape.backward(std::vector{y}, std::vector{ones({5, 4}, DType::f32)});
        EXPECT_EQ(buffer.to_vector<double>(), std::vector<double>(12, 5.0 * step)) << dtype << transposed;
      }
    }
}

TEST(Linear, FrozenPartsGetNothing) {
  for (int wanted = 0; wanted < 3; ++wanted) {
    std::vector<Tensor> in{ones({4, 3}, DType::f64), ones({2, 3}, DType::f64), ones({2}, DType::f64)};
    require_grad(in[size_t(wanted)]);
    Tape tape;
    tape.backward(std::vector{linear(in[0], in[1], in[2])}, std::vector{ones({4, 2}, DType::f64)});
    const double each[] = {2, 4, 4};
    for (const double value : grad(in[size_t(wanted)]).to_vector<double>()) EXPECT_EQ(value, each[wanted]);
  }
}

TEST(Linear, NoRowsGiveGradientsOfZero) {
  Tensor weight = ones({2, 3}, DType::f32), bias = ones({2}, DType::f32);
  require_grad(weight), require_grad(bias);
  Tape tape;
  tape.backward(std::vector{linear(ones({0, 3}, DType::f32), weight, bias)},
                std::vector{ones({0, 2}, DType::f32)});
  EXPECT_EQ(grad(weight).to_vector<double>(), std::vector<double>(6, 0.0));
  EXPECT_EQ(grad(bias).to_vector<double>(), std::vector<double>(2, 0.0));
}

TEST(Linear, ColumnSumsTakeAnyLayout) {
  std::vector<double> values(600 * 3 * 70);
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(int64_t(i % 17) - 8);
  const Tensor x = Tensor::from(values, {600, 3, 70});
  std::vector<double> by_group(210), all(70);
  for (size_t i = 0; i < values.size(); ++i) by_group[i % 210] += values[i], all[i % 70] += values[i];
  EXPECT_EQ(column_sums(x).to_vector<double>(), all);
  EXPECT_EQ(column_sums(x, true).to_vector<double>(), by_group);
  const Tensor turned = x.transpose(1, 2).clone().transpose(1, 2);
  EXPECT_EQ(column_sums(turned, true).to_vector<double>(), by_group);
  EXPECT_EQ(column_sums(ones({}, DType::f64).expand({7, 5})).to_vector<double>(),
            std::vector<double>(5, 7.0));
}

/// Variant "wgmma" makes the bias's gradient in the product that makes the weight's.
class LinearCuda : public GuardedCuda<9> {};

TEST_F(LinearCuda, BiasGradientsComeWithTheWeights) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const auto& [tokens, in, out] : {std::array<int64_t, 3>{1000, 72, 136},
                                          {77, 1365, 513},
                                          {5000, 200, 1365},
                                          {4096, 768, 3072},
                                          {8192, 3072, 768}}) {
      const ForceVariant force("linear", "wgmma");
      const Tensor dy = small_numbers({tokens, out}, 3),
                   x = small_numbers({tokens, in}, 1).to(dtype).to(gpu());
      const auto want = column_sums(dy).to_vector<float>();
      Tensor weight = Tensor::full({out, in}, 1, dtype, gpu()), bias = Tensor::full({out}, 1, dtype, gpu());
      require_grad(weight, DType::f32), require_grad(bias, DType::f32);
      const Tensor buffer = Tensor::empty_packed({out}, DType::f32, gpu());
      buffer.fill(std::numeric_limits<double>::quiet_NaN());
      set_grad_buffer(bias, buffer);
      for (const float times : {1.0f, 2.0f, 3.0f, 1.0f}) {  // overwritten, added to, added to, overwritten
        if (times == 1) zero_grad(weight), zero_grad(bias);
        Tape tape;
        const Tensor y = linear(x, weight, bias);
        tape.backward(std::vector{y}, std::vector{dy.to(dtype).to(gpu())});
        auto sums = want;
        for (float& sum : sums) sum *= times;
        ASSERT_EQ(buffer.to_vector<float>(), sums) << tokens << " " << in << " " << out << " " << dtype;
      }
    }
}

// Of numbers whose sums are not exact: a replayed graph adds in the order of the eager run.
TEST_F(LinearCuda, BiasGradientsRepeatInAGraph) {
  Rng rng{7};
  for (const auto& [tokens, in, out] :
       {std::array<int64_t, 3>{4096, 768, 768}, {8191, 768, 2304}, {20000, 3072, 768}}) {
    const auto normals = [&](const Shape& shape) {
      const Tensor drawn = Tensor::empty(shape, DType::bf16, gpu());
      fill_normal(drawn, 0, 1, rng);
      return drawn;
    };
    const Tensor dy = normals({tokens, out}), x = normals({tokens, in});
    Tensor weight = Tensor::full({out, in}, 1, DType::bf16, gpu()),
           bias = Tensor::full({out}, 1, DType::bf16, gpu());
    require_grad(weight, DType::f32), require_grad(bias, DType::f32);
    set_grad_buffer(weight, Tensor::empty({out, in}, DType::f32, gpu()));
    set_grad_buffer(bias, Tensor::empty_packed({out}, DType::f32, gpu()));
    Captured step(gpu(), [&] {
      zero_grad(weight), zero_grad(bias);
      Tape tape;
      const Tensor y = linear(x, weight, bias);
      tape.backward(std::vector{y}, std::vector{dy});
    });
    step();
    const auto eager = grad(bias).to_vector<float>();
    for (int replay = 0; replay < 3; ++replay) {
      step();
      ASSERT_EQ(grad(bias).to_vector<float>(), eager) << tokens << " " << in << " " << out;
    }
    EXPECT_TRUE(step.is_graph());
  }
}

TEST(Linear, MessagesNameWhatDisagrees) {
  const Tensor x = ones({4, 3}, DType::f32);
  EXPECT_EQ(message_of([&] {
              linear(x, ones({5, 2}, DType::f32));
            }),
            "linear: weight [5, 2] takes 2 features, but its input has 3; expected [out, 3]");
  EXPECT_EQ(message_of([&] { linear(x, ones({3}, DType::f32)); }),
            "linear: weight [3] is not a matrix; expected [out, in]");
  EXPECT_EQ(message_of([&] {
              linear(x, ones({5, 3}, DType::f32), ones({4}, DType::f32));
            }),
            "linear: bias [4] does not go with weight [5, 3]; expected [5]");
  EXPECT_EQ(message_of([&] {
              linear(x, ones({5, 3}, DType::bf16));
            }),
            "linear: weight is bf16[5, 3] on cpu, but the first operand is f32[4, 3] on cpu; cast or move "
            "one of them");
  EXPECT_EQ(message_of([&] {
              linear(ones({}, DType::f32), ones({5, 3}, DType::f32));
            }),
            "linear: x is a scalar; expected [..., in]");
  EXPECT_EQ(message_of([&] { linear(Tensor(), x); }), "linear: x is undefined");
}

}  // namespace
}  // namespace tessera::ops
