#include "ops/pointwise/pointwise.h"
#include "tests/errors.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "tests/ops/tensors.h"
namespace tessera::ops {
namespace {

Tensor row(std::vector<double> values) {
  return Tensor::from(values, {int64_t(values.size())});
}

TEST(Pointwise, BroadcastsAsNumpyDoes) {
  const Tensor a = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor b = Tensor::from(std::vector<float>{10, 20}, {2, 1});
  EXPECT_EQ(add(a, b).to_vector<float>(), (std::vector<float>{11, 12, 13, 24, 25, 26}));
  EXPECT_EQ(sub(b, a).to_vector<float>(), (std::vector<float>{9, 8, 7, 16, 15, 14}));
  const Tensor scalar = Tensor::full({}, 2, DType::f32, kCpu);
  EXPECT_EQ(div(a, scalar).to_vector<float>(), (std::vector<float>{0.5f, 1, 1.5f, 2, 2.5f, 3}));
  EXPECT_EQ(mul(scalar, scalar).shape(), Shape());
  EXPECT_EQ(mul(Tensor::zeros({0, 3}, DType::f32, kCpu), a.slice(0, 0, 1)).shape(), (Shape{0, 3}));
}

TEST(Pointwise, GradientsOfBroadcastOperandsAreSums) {
  Tensor a = Tensor::from(std::vector<double>{1, 2, 3, 4, 5, 6}, {2, 3});
  Tensor b = row({10, 20, 30}), c = Tensor::full({}, 3, DType::f64, kCpu);
  for (Tensor* leaf : {&a, &b, &c}) require_grad(*leaf);
  Tape tape;
  const Tensor y = mul(sub(a, b), c);
  const Tensor dy = Tensor::from(std::vector<double>{1, 0, -1, 2, 0, 5}, {2, 3});
  tape.backward(std::vector{y}, std::vector{dy});
  EXPECT_EQ(grad(a).to_vector<double>(), (std::vector<double>{3, 0, -3, 6, 0, 15}));
  EXPECT_EQ(grad(b).to_vector<double>(), (std::vector<double>{-9, 0, -12}));
  // -9 * 1 + -27 * -1 + -6 * 2 + -24 * 5
  EXPECT_EQ(grad(c).item(), -9 + 27 - 12 - 120);
}

TEST(Pointwise, AnOperandUsedTwiceGetsBothGradients) {
  Tensor x = row({2, -3});
  require_grad(x);
  Tape tape;
  const Tensor y = add(mul(x, x), add(x, x));
  tape.backward(std::vector{y}, std::vector{row({1, 1})});
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{6, -4}));  // 2 x + 2
}

TEST(Pointwise, GradientOfALeafIsItsOwn) {
  // add hands dy on as it is: a leaf must not share memory with a gradient that is kept.
  Tensor x = row({1, 2});
  require_grad(x);
  Tape tape;
  const Tensor late = scale(x, 5);
  Tensor y = add(x, row({3, 3}));
  retain_grad(y);
  tape.backward(std::vector{y, late}, std::vector{row({1, 1}), row({1, 1})});
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{6, 6}));
  EXPECT_EQ(grad(y).to_vector<double>(), (std::vector<double>{1, 1}));
}

TEST(Pointwise, TakesExpandedGradients) {
  Tensor x = row({1, 2, 4});
  require_grad(x);
  Tape tape;
  const Tensor y = log(x);
  tape.backward(std::vector{y}, std::vector{Tensor::full({}, 2, DType::f64, kCpu).expand({3})});
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{2, 1, 0.5}));
}

TEST(Pointwise, BroadcastGradientsOfSixteenBitsAreSummedUnrounded) {
  // 4096 products of 1 and 1 + 2^-7: in bf16, a running sum would stop at 256.
  Tensor b = Tensor::full({}, 3, DType::bf16, kCpu);
  require_grad(b, DType::f32);
  const Tensor a = Tensor::full({4096}, 1 + 0x1p-7, DType::bf16, kCpu);
  Tape tape;
  const Tensor y = mul(a, b);
  tape.backward(std::vector{y}, std::vector{Tensor::full({4096}, 1 + 0x1p-7, DType::bf16, kCpu)});
  EXPECT_EQ(grad(b).item(), 4096 * (1 + 0x1p-7) * (1 + 0x1p-7));
}

TEST(Pointwise, SpecialValues) {
  const double nan = NAN;
  EXPECT_EQ(exp(row({-kInf, kInf, 0})).to_vector<double>(), (std::vector<double>{0, kInf, 1}));
  EXPECT_EQ(log(row({0, kInf, 1})).to_vector<double>(), (std::vector<double>{-kInf, kInf, 0}));
  EXPECT_TRUE(std::isnan(log(row({-1})).item()));
  EXPECT_TRUE(std::isnan(sqrt(row({-1})).item()));
  EXPECT_EQ(sqrt(row({0, 4, kInf})).to_vector<double>(), (std::vector<double>{0, 2, kInf}));
  EXPECT_EQ(tanh(row({-kInf, 0, 800})).to_vector<double>(), (std::vector<double>{-1, 0, 1}));
  EXPECT_EQ(sigmoid(row({-1e4, 0, 1e4, -kInf, kInf})).to_vector<double>(),
            (std::vector<double>{0, 0.5, 1, 0, 1}));
  EXPECT_EQ(div(row({1, -1}), row({0, 0})).to_vector<double>(), (std::vector<double>{kInf, -kInf}));
  for (const auto& f : {exp, log, tanh, sigmoid, sqrt})
    EXPECT_TRUE(std::isnan(f(row({nan}), Site::here()).item()));
  EXPECT_TRUE(std::isnan(mul(row({0}), row({kInf})).item()));
}

TEST(Pointwise, GradientOfAQuotientDoesNotOverflowInTheSquare) {
  Tensor b = Tensor::full({1}, 1e30, DType::f32, kCpu);
  require_grad(b);
  Tape tape;
  const Tensor y = div(Tensor::full({1}, 1e30, DType::f32, kCpu), b);
  tape.backward(y);
  EXPECT_FLOAT_EQ(grad(b).item<float>(), -1e-30f);
}

TEST(Pointwise, SavesOnlyWhatAWantedGradientNeeds) {
  Tensor a = row({1, 2}), b = row({3, 4});
  require_grad(a);
  Tape tape;
  const Tensor y = mul(a, b);
  a.fill(7);  // only db would need it
  tape.backward(std::vector{y}, std::vector{row({1, 1})});
  EXPECT_EQ(grad(a).to_vector<double>(), (std::vector<double>{3, 4}));
}

TEST(Pointwise, ErrorsNameTheOperands) {
  const Tensor a = Tensor::zeros({2, 3}, DType::f32, kCpu);
  expect_error([&] { add(a, Tensor::zeros({4}, DType::f32, kCpu)); },
               {"add", "[2, 3]", "[4]", "3 against 4"});
  expect_error([&] { mul(a, Tensor::zeros({3}, DType::bf16, kCpu)); },
               {"mul", "f32[2, 3] on cpu", "bf16[3] on cpu", "ops::cast"});
  expect_error([&] { div(a, Tensor()); }, {"div", "b is undefined"});
  expect_error([&] { exp(Tensor::zeros({2}, DType::i64, kCpu)); }, {"exp", "i64"});
  expect_error([&] { scale(Tensor(), 2); }, {"scale", "undefined"});
}

}  // namespace
}  // namespace tessera::ops
