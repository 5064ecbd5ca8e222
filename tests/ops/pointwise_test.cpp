#include "ops/pointwise/pointwise.h"
#include "tests/errors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "autograd/tape.h"
#include "ops/cast/cast.h"
#include "ops/pointwise/operators.h"
#include "ops/reduce/reduce.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"
namespace tessera::ops {
namespace {

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

/// The gradients of a and b of f(a, b) for dy of ones.
template <class F>
std::pair<std::vector<double>, std::vector<double>> both_gradients(Tensor a, Tensor b, F&& f) {
  require_grad(a), require_grad(b);
  Tape tape;
  const Tensor y = f(a, b);
  tape.backward(std::vector{y}, std::vector{Tensor::full(y.shape(), 1, y.dtype(), y.device())});
  return {grad(a).to_vector<double>(), grad(b).to_vector<double>()};
}

TEST(Pointwise, SpecialValuesOfTheOtherFunctions) {
  const double root = std::sqrt(2.0);
  EXPECT_EQ(abs(row({-2, 0, -kInf})).to_vector<double>(), (std::vector<double>{2, 0, kInf}));
  EXPECT_EQ(neg(row({-2, 3, kInf})).to_vector<double>(), (std::vector<double>{2, -3, -kInf}));
  EXPECT_EQ(square(row({-3, kInf})).to_vector<double>(), (std::vector<double>{9, kInf}));
  EXPECT_EQ(shift(row({1, kInf}), -3).to_vector<double>(), (std::vector<double>{-2, kInf}));
  EXPECT_EQ(reciprocal(row({4, 0, kInf})).to_vector<double>(), (std::vector<double>{0.25, kInf, 0}));
  EXPECT_EQ(rsqrt(row({4, 0, kInf})).to_vector<double>(), (std::vector<double>{0.5, kInf, 0}));
  EXPECT_TRUE(std::isnan(rsqrt(row({-1})).item()));
  EXPECT_EQ(pow(row({-3, 0, kNan}), 0).to_vector<double>(), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(pow(row({-3, 0, kInf}), 2).to_vector<double>(), (std::vector<double>{9, 0, kInf}));
  EXPECT_DOUBLE_EQ(pow(row({2}), 0.5).item(), root);
  EXPECT_TRUE(std::isnan(pow(row({-2}), 0.5).item()));
  EXPECT_EQ(sin(row({0})).item(), 0);
  EXPECT_EQ(cos(row({0})).item(), 1);
  EXPECT_TRUE(std::isnan(sin(row({kInf})).item()));
  EXPECT_EQ(softplus(row({0, 800, -800, kInf, -kInf})).to_vector<double>(),
            (std::vector<double>{std::log(2.0), 800, 0, kInf, 0}));
  EXPECT_EQ(softplus(row({-40})).item(), std::exp(-40.0));  // not ln 1
  EXPECT_EQ(clamp(row({-2, 0.5, 7, -kInf, kInf}), -1, 1).to_vector<double>(),
            (std::vector<double>{-1, 0.5, 1, -1, 1}));
  EXPECT_EQ(clamp(row({-2, 7}), -kInf, 3).to_vector<double>(), (std::vector<double>{-2, 3}));
  for (const auto& f : {abs, neg, square, rsqrt, sin, cos, softplus})
    EXPECT_TRUE(std::isnan(f(row({kNan}), Site::here()).item()));
  EXPECT_TRUE(std::isnan(clamp(row({kNan}), 0, 1).item()));
  EXPECT_TRUE(std::isnan(pow(row({kNan}), 2).item()));
}

TEST(Pointwise, GradientsAtKinksAndPoles) {
  const auto gradient = [](std::vector<double> x, auto f) {
    return both_gradients(row(std::move(x)), row({0}),
                          [&](const Tensor& a, const Tensor& b) { return add(f(a), b); })
        .first;
  };
  EXPECT_EQ(gradient({-2, 0, 3, kNan}, [](const Tensor& x) { return abs(x); }),
            (std::vector<double>{-1, 0, 1, 0}));
  EXPECT_EQ(gradient({-1, -2, 0.5, 1, 7, kNan}, [](const Tensor& x) { return clamp(x, -1, 1); }),
            (std::vector<double>{0, 0, 1, 0, 0, 0}));
  EXPECT_EQ(gradient({0, -3, kNan}, [](const Tensor& x) { return pow(x, 0); }),
            (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(gradient({0, -3, 5}, [](const Tensor& x) { return pow(x, 1); }), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(gradient({0, 4}, [](const Tensor& x) { return pow(x, 0.5); }), (std::vector<double>{kInf, 0.25}));
  EXPECT_EQ(gradient({0, 4}, [](const Tensor& x) { return rsqrt(x); }),
            (std::vector<double>{-kInf, -0.0625}));
  EXPECT_EQ(gradient({0, -800, 800}, [](const Tensor& x) { return softplus(x); }),
            (std::vector<double>{0.5, 0, 1}));
}

TEST(Pointwise, MaximumAndMinimumShareTheGradientOfEqualOperandsAndKeepNaN) {
  const Tensor a = row({1, 2, 3, kNan, 1, kNan}), b = row({1, 3, 2, 1, kNan, kNan});
  const auto largest = maximum(a, b).to_vector<double>(), smallest = minimum(a, b).to_vector<double>();
  EXPECT_EQ((std::vector<double>{largest.begin(), largest.begin() + 3}), (std::vector<double>{1, 3, 3}));
  EXPECT_EQ((std::vector<double>{smallest.begin(), smallest.begin() + 3}), (std::vector<double>{1, 2, 2}));
  for (size_t i = 3; i < 6; ++i) EXPECT_TRUE(std::isnan(largest[i]) && std::isnan(smallest[i])) << i;
  const auto of_max = both_gradients(a, b, [](const Tensor& x, const Tensor& y) { return maximum(x, y); });
  EXPECT_EQ(of_max.first, (std::vector<double>{0.5, 0, 1, 1, 1, 1}));
  EXPECT_EQ(of_max.second, (std::vector<double>{0.5, 1, 0, 1, 1, 1}));
  const auto of_min = both_gradients(a, b, [](const Tensor& x, const Tensor& y) { return minimum(x, y); });
  EXPECT_EQ(of_min.first, (std::vector<double>{0.5, 1, 0, 1, 1, 1}));
  EXPECT_EQ(of_min.second, (std::vector<double>{0.5, 0, 1, 1, 1, 1}));
  // Broadcast: a number against a row.
  const auto broadcast = both_gradients(row({2}), row({1, 2, 3}),
                                        [](const Tensor& x, const Tensor& y) { return maximum(x, y); });
  EXPECT_EQ(broadcast.first, std::vector<double>{1.5});
  EXPECT_EQ(broadcast.second, (std::vector<double>{0, 0.5, 1}));
}

TEST(Pointwise, ComparisonsBroadcastAndAreFalseForNaN) {
  const Tensor a = row({1, 2, 3, kNan}), b = row({2, 2, 2, kNan});
  const auto values = [](const Tensor& y) {
    EXPECT_EQ(y.dtype(), DType::boolean);
    return y.to_vector<double>();
  };
  EXPECT_EQ(values(less(a, b)), (std::vector<double>{1, 0, 0, 0}));
  EXPECT_EQ(values(less_equal(a, b)), (std::vector<double>{1, 1, 0, 0}));
  EXPECT_EQ(values(greater(a, b)), (std::vector<double>{0, 0, 1, 0}));
  EXPECT_EQ(values(greater_equal(a, b)), (std::vector<double>{0, 1, 1, 0}));
  EXPECT_EQ(values(equal(a, b)), (std::vector<double>{0, 1, 0, 0}));
  EXPECT_EQ(greater(counting({2, 3}), Tensor::full({}, 2, DType::f64, kCpu)).to_vector<double>(),
            (std::vector<double>{0, 0, 0, 1, 1, 1}));
  // Integers beyond what f32 and f64 tell apart.
  const int64_t large = (int64_t(1) << 60) + 1;
  EXPECT_EQ(values(equal(labels({large, large}), labels({large, large - 1}))), (std::vector<double>{1, 0}));
  EXPECT_EQ(values(less(a.to(DType::i32), b.to(DType::i32))), (std::vector<double>{1, 0, 0, 0}));
  // Of a tensor on the tape: a plain result.
  Tensor leaf = a;
  require_grad(leaf);
  Tape tape;
  EXPECT_FALSE(requires_grad(less(leaf, b)));
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Pointwise, WholeNumbersAreExactAndWrapAround) {
  for (const Device device : devices()) {
    const int64_t big = (int64_t(1) << 62) + 1;
    const Tensor a = Tensor::from(std::vector<int64_t>{big, -3, 7}, {3}, device), b = labels({2}, device);
    EXPECT_EQ(add(a, b).to_vector<int64_t>(), (std::vector<int64_t>{big + 2, -1, 9}));
    EXPECT_EQ(sub(b, a).to_vector<int64_t>(), (std::vector<int64_t>{2 - big, 5, -5}));
    EXPECT_EQ(mul(a, b).to_vector<int64_t>(), (std::vector<int64_t>{INT64_MIN + 2, -6, 14}));
    EXPECT_EQ(maximum(a, b).to_vector<int64_t>(), (std::vector<int64_t>{big, 2, 7}));
    EXPECT_EQ(minimum(a, b).to_vector<int64_t>(), (std::vector<int64_t>{2, -3, 2}));
    EXPECT_EQ((1 - 2 * a.slice(0, 1, 3)).to_vector<int64_t>(), (std::vector<int64_t>{7, -13}));
    EXPECT_EQ(abs(a).to_vector<int64_t>(), (std::vector<int64_t>{big, 3, 7}));
    EXPECT_EQ(square(a.slice(0, 1, 3)).to_vector<int64_t>(), (std::vector<int64_t>{9, 49}));
    EXPECT_EQ(clamp(a, -1, 6).to_vector<int64_t>(), (std::vector<int64_t>{6, -1, 6}));
    const Tensor narrow = Tensor::from(std::vector<int32_t>{2147483647, -5}, {2, 1}, device);
    EXPECT_EQ(add(narrow, narrow).to_vector<int32_t>(), (std::vector<int32_t>{-2, -10}));
    EXPECT_EQ(shift(narrow, 1).to_vector<int32_t>(), (std::vector<int32_t>{-2147483647 - 1, -4}));
    EXPECT_EQ(mul(narrow, Tensor::from(std::vector<int32_t>{1, 2, 3}, {3}, device)).shape(), (Shape{2, 3}));
    EXPECT_EQ(add(a, Tensor::zeros({0, 1}, DType::i64, device)).shape(), (Shape{0, 3}));
    const Tensor p = Tensor::from(std::vector<bool>{true, true, false, false}, {4}, device),
                 q = Tensor::from(std::vector<bool>{true, false, true, false}, {4}, device);
    EXPECT_EQ(maximum(p, q).to_vector<double>(), (std::vector<double>{1, 1, 1, 0}));
    EXPECT_EQ(minimum(p, q).to_vector<double>(), (std::vector<double>{1, 0, 0, 0}));
    EXPECT_EQ(minimum(p, q).dtype(), DType::boolean);
    EXPECT_EQ(equal(p, q).to_vector<double>(), (std::vector<double>{1, 0, 0, 1}));
  }
}

TEST(Pointwise, WholeNumbersDivideAsInPython) {
  for (const Device device : devices()) {
    for (const DType dtype : {DType::i64, DType::i32}) {
      const Tensor a = labels({7, -7, 7, -7, 6, -6, 0}, device).to(dtype),
                   b = labels({2, 2, -2, -2, 3, 3, -5}, device).to(dtype);
      EXPECT_EQ(floor_div(a, b).to_vector<double>(), (std::vector<double>{3, -4, -4, 3, 2, -2, 0}));
      EXPECT_EQ(remainder(a, b).to_vector<double>(), (std::vector<double>{1, 1, -1, -1, 0, 0, 0}));
      EXPECT_EQ(floor_div(a, 4).to_vector<double>(), (std::vector<double>{1, -2, 1, -2, 1, -2, 0}));
      EXPECT_EQ(remainder(a, 4).to_vector<double>(), (std::vector<double>{3, 1, 3, 1, 2, 2, 0}));
      EXPECT_EQ(remainder(a, 4).dtype(), dtype);
      EXPECT_EQ(floor_div(a.slice(0, 0, 1), labels({1, 2, 3}, device).to(dtype)).to_vector<double>(),
                (std::vector<double>{7, 3, 2}));
    }
    // The one quotient that is out of range wraps around, and so do not the numbers that f64 cannot tell
    // apart.
    EXPECT_EQ(floor_div(labels({INT64_MIN, INT64_MAX}, device), labels({-1, 2}, device)).to_vector<int64_t>(),
              (std::vector<int64_t>{INT64_MIN, INT64_MAX / 2}));
    EXPECT_EQ(remainder(labels({INT64_MIN, INT64_MAX}, device), labels({-1, 2}, device)).to_vector<int64_t>(),
              (std::vector<int64_t>{0, 1}));
    if (device.is_cpu()) continue;
    EXPECT_EQ(floor_div(labels({5}, device), labels({0}, device)).to_vector<int64_t>()[0], -1);
    EXPECT_EQ(remainder(labels({5}, device), labels({0}, device)).to_vector<int64_t>()[0], -1);
  }
  const Tensor a = labels({1, 2});
  expect_error([&] { floor_div(a, labels({1, 0})); }, {"floor_div", "division by 0", "element 1 of b"});
  expect_error([&] { remainder(a, 0); }, {"remainder", "division by 0"});
  expect_error([&] { remainder(a, 0.5); }, {"remainder", "0.5"});
  expect_error([&] { floor_div(row({1}), row({2})); }, {"floor_div", "expected i64 or i32"});
}

TEST(Pointwise, WhereChoosesOfEveryDType) {
  for (const Device device : devices())
    for (const DType dtype : {DType::i64, DType::i32, DType::u8, DType::boolean}) {
      const Tensor mask = Tensor::from(std::vector<bool>{true, false, true}, {3}, device);
      const Tensor a = labels({1, 1, 0}, device).to(dtype), b = labels({0}, device).to(dtype);
      const Tensor y = where(mask, a, b);
      EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{1, 0, 0}));
      EXPECT_EQ(y.dtype(), dtype);
    }
  const int64_t large = (int64_t(1) << 60) + 1;
  EXPECT_EQ(where(labels({1}).to(DType::boolean), labels({large}), labels({0})).to_vector<int64_t>()[0],
            large);
  const Tensor f8 = row({1}).to(DType::f8e4m3);
  expect_error([&] { where(labels({1}).to(DType::boolean), f8, f8); }, {"where", "f8e4m3", "ops::cast"});
}

TEST(Pointwise, WhatHasNoWholeResultIsRefused) {
  const Tensor a = labels({1, 2}), mask = a.to(DType::boolean);
  expect_error([&] { div(a, a); }, {"div", "i64", "ops::cast"});
  expect_error([&] { a / 2; }, {"scale", "i64[2] on cpu", "0.5", "ops::cast"});
  expect_error([&] { a + 0.5; }, {"shift", "0.5"});
  expect_error([&] { shift(a.to(DType::i32), 3e9); }, {"shift", "3e+09", "i32[2] on cpu"});
  expect_error([&] { scale(a, NAN); }, {"scale", "nan"});
  expect_error([&] { clamp(a, 0, 1e30); }, {"clamp", "1e+30"});
  expect_error([&] { add(mask, mask); }, {"add", "bool", "ops::maximum is or", "ops::cast"});
  expect_error([&] { neg(mask); }, {"neg", "bool", "not supported"});
  expect_error([&] { exp(a); }, {"exp", "i64", "not supported"});
  for (const double exponent : {2.0, 3.0})
    expect_error([&] { pow(a, exponent); }, {"pow", "i64", "not supported"});
  expect_error([&] { add(a, a.to(DType::i32)); }, {"add", "different dtypes"});
  expect_error([&] { add(a.to(DType::u8), a.to(DType::u8)); }, {"add", "u8", "ops::cast(x, DType::i32)"});
  expect_error([&] { scale(a.to(DType::u8), 2); }, {"scale", "u8", "ops::cast"});
}

TEST(Pointwise, ComparisonsWithANumber) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{1, 2, 3, kNanF}, {4}, device);
    EXPECT_EQ(less(x, 2).to_vector<double>(), (std::vector<double>{1, 0, 0, 0}));
    EXPECT_EQ(less_equal(x, 2).to_vector<double>(), (std::vector<double>{1, 1, 0, 0}));
    EXPECT_EQ(greater(x, 2.5).to_vector<double>(), (std::vector<double>{0, 0, 1, 0}));
    EXPECT_EQ(greater_equal(x, 2).to_vector<double>(), (std::vector<double>{0, 1, 1, 0}));
    EXPECT_EQ(equal(x, 0.1 + 2.9).to_vector<double>(), (std::vector<double>{0, 0, 1, 0}));
    EXPECT_EQ(equal(Tensor::full({1}, 0.1, DType::f32, device), 0.1).item(), 1);  // both rounded
    EXPECT_EQ(less(labels({-1, 4}, device), 0).to_vector<double>(), (std::vector<double>{1, 0}));
    EXPECT_EQ(equal(Tensor::from(std::vector<bool>{true, false}, {2}, device), 0).to_vector<double>(),
              (std::vector<double>{0, 1}));
  }
  Tensor leaf = row({1, 2});
  require_grad(leaf);
  Tape tape;
  EXPECT_FALSE(requires_grad(less(leaf, 1)));
  EXPECT_FALSE(requires_grad(less(mul(leaf, leaf), 1)));
  expect_error([] { less(labels({1}), 0.5); }, {"less", "i64[1] on cpu", "0.5"});
  expect_error([] { equal(labels({1}).to(DType::boolean), 2); },
               {"equal", "bool[1] on cpu", "expected 0 or 1"});
  expect_error([] { less(Tensor(), 1); }, {"less", "undefined"});
}

TEST(Pointwise, TheShareOfCorrectPredictionsIsAMeanOfACast) {
  const Tensor scores = Tensor::from(std::vector<float>{1, 2, 0, 3, 1, 1, 0, 0, 9, 5, 6, 7}, {4, 3});
  const Tensor correct = equal(argmax(scores, 1), labels({1, 0, 2, 0}));
  EXPECT_EQ(mean(cast(correct, DType::f32)).item(), 0.75);
  EXPECT_EQ(sum(cast(correct, DType::f32)).item(), 3);
}

TEST(Pointwise, WhereChoosesAndSendsNothingToWhatIsNotChosen) {
  const Tensor mask = Tensor::from(std::vector<double>{1, 0, 1}, {3}).to(DType::boolean);
  const Tensor a = row({1, kNan, 3}), b = row({kNan, 20, kInf});
  EXPECT_EQ(where(mask, a, b).to_vector<double>(), (std::vector<double>{1, 20, 3}));
  // The square root of a negative number, where it is not chosen, does not spoil the gradient.
  const auto [da, db] = both_gradients(row({4, -1, 16}), row({7}), [&](const Tensor& x, const Tensor& y) {
    return where(mask, mul(x, x), y);
  });
  EXPECT_EQ(da, (std::vector<double>{8, 0, 32}));
  EXPECT_EQ(db, std::vector<double>{1});
  // All three broadcast.
  EXPECT_EQ(where(mask, counting({2, 1}), row({9})).to_vector<double>(),
            (std::vector<double>{0, 9, 0, 1, 9, 1}));
  expect_error([&] { where(a, a, b); }, {"where", "the mask is f64[3] on cpu", "expected bool"});
  expect_error([&] { where(mask, a, b.to(DType::f32)); }, {"where", "different dtypes"});
  expect_error([&] { where(Tensor(), a, b); }, {"where", "mask is undefined"});
}

TEST(Pointwise, BroadcastGradientsOfAMaximumOfSixteenBitsAreSummedUnrounded) {
  Tensor b = Tensor::full({}, 3, DType::bf16, kCpu);
  require_grad(b, DType::f32);
  Tape tape;
  const Tensor y = maximum(Tensor::full({4097}, 1, DType::bf16, kCpu), b);
  tape.backward(std::vector{y}, std::vector{Tensor::full({4097}, 1 + 0x1p-7, DType::bf16, kCpu)});
  EXPECT_EQ(grad(b).item(), 4097 * (1 + 0x1p-7));
}

/// Gradients of small whole numbers and their quotients by powers of two are exact, in every dtype and order
/// of summation: those of f64 on the CPU.
TEST(Pointwise, GradientsOfOperandsThatBroadcastAreExactSumsOnEveryDevice) {
  using F = std::function<Tensor(const Tensor&, const Tensor&)>;
  const auto numbers = [](const Shape& shape, std::initializer_list<float> of, DType dtype, Device device) {
    std::vector<float> values(size_t(shape.count()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = of.begin()[(i * i + i / 7) % of.size()];
    return Tensor::from(values, shape).to(dtype).to(device);
  };
  const Shape whole_packs{3, 50, 40}, ragged{3, 50, 37};
  for (const auto& [shape, own] : std::vector<std::pair<Shape, Shape>>{{whole_packs, {3, 1, 40}},
                                                                       {whole_packs, {3, 50, 1}},
                                                                       {whole_packs, {50, 40}},
                                                                       {whole_packs, {50, 1}},
                                                                       {whole_packs, {1}},
                                                                       {whole_packs, whole_packs},
                                                                       {ragged, {3, 1, 37}},
                                                                       {ragged, {3, 50, 1}},
                                                                       {ragged, {1}}}) {
    const auto run = [&](const F& f, DType dtype, Device device) {
      Tensor a = numbers(shape, {-5, 4, 2, 0, -1, 3, 5}, dtype, device),
             b = numbers(own, {2, -4, 1, 0.5f, -1}, dtype, device);
      const DType wide = dtype == DType::f64 ? dtype : DType::f32;
      require_grad(a, wide), require_grad(b, wide);
      Tape tape;
      const Tensor y = f(a, b);
      tape.backward(std::vector{y}, std::vector{numbers(shape, {1, -2, 3, 0}, dtype, device)});
      return std::pair(grad(a).to_vector<double>(), grad(b).to_vector<double>());
    };
    std::vector<F> functions;
    for (const auto f : {mul, div, maximum, minimum})
      functions.push_back([f](const Tensor& a, const Tensor& b) { return f(a, b, Site::here()); });
    for (const Shape& masked : {shape, own, Shape{1, 50, 1}})
      functions.push_back([&, masked](const Tensor& a, const Tensor& b) {
        const Tensor mask = numbers(masked, {1, 0, 0, 1, 1}, DType::f32, a.device()).to(DType::boolean);
        return add(where(mask, a, b), where(mask, b, a));
      });
    for (size_t n = 0; n < functions.size(); ++n) {
      const auto expected = run(functions[n], DType::f64, kCpu);
      for (const Device device : devices())
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
          const auto [da, db] = run(functions[n], dtype, device);
          EXPECT_EQ(da, expected.first) << n << name_of(dtype) << device.name();
          EXPECT_EQ(db, expected.second) << n << name_of(dtype) << device.name();
        }
    }
  }
}

/// Of every place of both operands within a pack of 16 bytes, and of the result's as a gradient's half.
TEST(Pointwise, RowsThatBeginInsidePacks) {
  const int64_t width = 37, most = 40;
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const Tensor a = quarters({2, 3, most + width}, dtype), b = quarters({3, most + width}, dtype, 7),
                   on_a = a.to(device), on_b = b.to(device);
      for (const int64_t i : {0, 1, 2, 3, 4, 5, 6, 7, 40})
        for (const int64_t j : {0, 1, 3, 6, 7, 8}) {
          const auto product = [&](const Tensor& x, const Tensor& y) {
            return mul(x.slice(-1, i, i + width), y.slice(-1, j, j + width)).to_vector<float>();
          };
          EXPECT_EQ(product(on_a, on_b), product(a, b)) << name_of(dtype) << device.name() << i << " " << j;
        }
    }
}

TEST(Operators, CallTheFunctions) {
  const Tensor a = row({1, 2, 4}), b = row({4, 8, 0.5});
  EXPECT_EQ((a + b).to_vector<double>(), add(a, b).to_vector<double>());
  EXPECT_EQ((a - b).to_vector<double>(), sub(a, b).to_vector<double>());
  EXPECT_EQ((a * b).to_vector<double>(), mul(a, b).to_vector<double>());
  EXPECT_EQ((a / b).to_vector<double>(), div(a, b).to_vector<double>());
  EXPECT_EQ((-a).to_vector<double>(), (std::vector<double>{-1, -2, -4}));
  EXPECT_EQ((a + 1).to_vector<double>(), (std::vector<double>{2, 3, 5}));
  EXPECT_EQ((1.5 + a).to_vector<double>(), (std::vector<double>{2.5, 3.5, 5.5}));
  EXPECT_EQ((a - 1).to_vector<double>(), (std::vector<double>{0, 1, 3}));
  EXPECT_EQ((1 - a).to_vector<double>(), (std::vector<double>{0, -1, -3}));
  EXPECT_EQ((a * 3).to_vector<double>(), (std::vector<double>{3, 6, 12}));
  EXPECT_EQ((3 * a).to_vector<double>(), (std::vector<double>{3, 6, 12}));
  EXPECT_EQ((a / 2).to_vector<double>(), (std::vector<double>{0.5, 1, 2}));
  EXPECT_EQ((8 / a).to_vector<double>(), (std::vector<double>{8, 4, 2}));
}

TEST(Operators, RecordGradients) {
  const auto [da, db] = both_gradients(row({1, 2}), row({4, 8}), [](const Tensor& a, const Tensor& b) {
    return 2 * a * b - a / b + 1 / a - (3 - b) + (-a + 5) / 2;
  });
  // 2 b - 1 / b - 1 / a^2 - 1 / 2 and 2 a + a / b^2 + 1
  EXPECT_EQ(da, (std::vector<double>{8 - 0.25 - 1 - 0.5, 16 - 0.125 - 0.25 - 0.5}));
  EXPECT_EQ(db, (std::vector<double>{2 + 1.0 / 16 + 1, 4 + 2.0 / 64 + 1}));
}

TEST(Operators, ErrorsNameTheLineOfTheExpression) {
  const Tensor a = row({1, 2}), b = row({1, 2, 3});
  const int line = __LINE__ + 1;
  const std::string report = report_of([&] { a* b; }), negated = report_of([&] { -Tensor(); });
  const std::string place = "pointwise_test.cpp:" + std::to_string(line);
  EXPECT_NE(report.find(place), std::string::npos) << report;
  EXPECT_NE(negated.find(place), std::string::npos) << negated;
  const std::string left = report_of([&] { 2 / Tensor(); });
  EXPECT_NE(left.find("pointwise_test.cpp:" + std::to_string(line + 4)), std::string::npos) << left;
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
  expect_error([&] { shift(Tensor(), 2); }, {"shift", "undefined"});
  expect_error([&] { clamp(a, 2, 1); }, {"clamp", "low is 2 and high is 1"});
  expect_error([&] { clamp(a, kNan, 1); }, {"clamp", "nan"});
  expect_error([&] { less(a, Tensor::zeros({4}, DType::f32, kCpu)); }, {"less", "3 against 4"});
  expect_error([&] { equal(a.to(DType::u8), a.to(DType::u8)); }, {"equal", "u8", "i64, i32 or bool"});
}

}  // namespace
}  // namespace tessera::ops
