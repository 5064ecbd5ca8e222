#include "ops/reduce/reduce.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/pointwise/pointwise.h"
#include "runtime/parallel.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

using Reduce = Tensor (*)(const Tensor&, int, bool, Site);

Tensor two_rows() {
  return Tensor::from(std::vector<double>{3, -4, 0, 12, -5, 0}, {2, 3});
}

std::vector<double> gradient(Tensor x, const std::function<Tensor(const Tensor&)>& f) {
  require_grad(x);
  Tape tape;
  const Tensor y = f(x);
  tape.backward(std::vector{y}, std::vector{Tensor::full(y.shape(), 1, y.dtype(), y.device())});
  return grad(x).to_vector<double>();
}

TEST(Reduce, SmallExamples) {
  const Tensor x = two_rows();
  EXPECT_EQ(sum(x).item(), 6);
  EXPECT_EQ(sum(x).shape(), Shape());
  EXPECT_EQ(sum(x, 0).to_vector<double>(), (std::vector<double>{15, -9, 0}));
  EXPECT_EQ(sum(x, -1).to_vector<double>(), (std::vector<double>{-1, 7}));
  EXPECT_EQ(sum(x, 1, true).shape(), (Shape{2, 1}));
  EXPECT_EQ(sum(x, 0, true).shape(), (Shape{1, 3}));
  EXPECT_EQ(mean(x).item(), 1);
  EXPECT_EQ(max(x, 0).to_vector<double>(), (std::vector<double>{12, -4, 0}));
  EXPECT_EQ(norm(x, 1).to_vector<double>(), (std::vector<double>{5, 13}));
  EXPECT_EQ(sum(Tensor::full({}, 7, DType::f32, kCpu)).item(), 7);
}

TEST(Reduce, SmallGradients) {
  EXPECT_EQ(gradient(two_rows(), [](const Tensor& x) { return mean(x, 0); }), (std::vector<double>(6, 0.5)));
  EXPECT_EQ(gradient(two_rows(), [](const Tensor& x) { return max(x); }),
            (std::vector<double>{0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(gradient(two_rows(), [](const Tensor& x) { return norm(x, 1); }),
            (std::vector<double>{0.6, -0.8, 0, 12.0 / 13, -5.0 / 13, 0}));
}

TEST(Reduce, GradientOfMaxGoesToTheFirstLargest) {
  const Tensor x = Tensor::from(std::vector<double>{1, 5, 5, 5, 2, 5}, {2, 3});
  EXPECT_EQ(gradient(x, [](const Tensor& v) { return max(v, 1); }), (std::vector<double>{0, 1, 0, 1, 0, 0}));
  EXPECT_EQ(gradient(x, [](const Tensor& v) { return max(v, 0); }), (std::vector<double>{0, 1, 1, 1, 0, 0}));
  EXPECT_EQ(gradient(x, [](const Tensor& v) { return max(v); }), (std::vector<double>{0, 1, 0, 0, 0, 0}));
  // In row-major order of the view, whatever its place in memory: here [[1, 5], [5, 2], [5, 5]].
  EXPECT_EQ(gradient(x.transpose(0, 1), [](const Tensor& v) { return max(v); }),
            (std::vector<double>{0, 1, 0, 0, 0, 0}));
  const Tensor low = Tensor::full({2}, -kInf, DType::f64, kCpu);
  EXPECT_EQ(gradient(low, [](const Tensor& v) { return max(v); }), (std::vector<double>{1, 0}));
}

TEST(Reduce, MaxKeepsANaNAndItsGradientGoesThere) {
  const Tensor x = Tensor::from(std::vector<double>{1, NAN, 7, NAN}, {4});
  EXPECT_TRUE(std::isnan(max(x).item()));
  EXPECT_EQ(gradient(x, [](const Tensor& v) { return max(v); }), (std::vector<double>{0, 1, 0, 0}));
}

TEST(Reduce, OverSeveralDimensions) {
  const Tensor x = counting({2, 3, 4});
  EXPECT_EQ(sum(x, {0, 2}).to_vector<double>(), (std::vector<double>{60, 92, 124}));
  EXPECT_EQ(sum(x, {0, 1}).to_vector<double>(), (std::vector<double>{60, 66, 72, 78}));  // not a Site
  EXPECT_EQ(sum(x, {-1, 0}).to_vector<double>(), sum(x, {0, 2}).to_vector<double>());
  EXPECT_EQ(sum(x, {0, 2}, true).shape(), (Shape{1, 3, 1}));
  EXPECT_EQ(sum(x, {0, 1, 2}).item(), 276);
  EXPECT_EQ(sum(x, {0, 1, 2}, true).shape(), (Shape{1, 1, 1}));
  const std::vector<int> dims{1, 2};
  EXPECT_EQ(mean(x, dims).to_vector<double>(), (std::vector<double>{5.5, 17.5}));
  EXPECT_EQ(max(x, dims).to_vector<double>(), (std::vector<double>{11, 23}));
  EXPECT_EQ(min(x, {0, 2}).to_vector<double>(), (std::vector<double>{0, 4, 8}));
  EXPECT_EQ(norm(ones({2, 8, 2}), {0, 2}).to_vector<double>(), std::vector<double>(8, 2));
  EXPECT_EQ(gradient(counting({2, 3}),
                     [](const Tensor& v) {
                       return mean(v, {0, 1});
                     }),
            std::vector<double>(6, 1.0 / 6));
  expect_error([&] { sum(x, {0, 0}); }, {"sum", "dimension 0", "named twice"});
  expect_error([&] { sum(x, {0, -3}); }, {"sum", "named twice"});
  expect_error([&] { max(x, {0, 3}); }, {"max", "dimension 3 is outside f64[2, 3, 4] on cpu"});
  expect_error([&] { sum(x, std::vector<int>{}); }, {"sum", "no dimension", "f64[2, 3, 4] on cpu"});
}

TEST(Reduce, GradientOfMaxOverSeveralDimensionsGoesToTheFirstInRowMajorOrder) {
  const Tensor x = Tensor::from(std::vector<double>{1, 5, 2, 0, 5, 7, 5, 2, 3, 0, 0, 7}, {2, 3, 2});
  // Over 0 and 2: [1 5 5 2], [2 0 3 0], [5 7 0 7].
  const std::vector<double> expected{0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0};
  EXPECT_EQ(gradient(x, [](const Tensor& v) { return max(v, {0, 2}); }), expected);
  EXPECT_EQ(gradient(x, [](const Tensor& v) { return max(v, {2, 0}, true); }), expected);
  EXPECT_EQ(gradient(x,
                     [](const Tensor& v) {
                       return min(v, {2, 0});
                     }),
            (std::vector<double>{1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0}));
}

TEST(Reduce, MinIsTheNegatedMaxOfTheNegated) {
  const Tensor x = Tensor::from(std::vector<double>{1, -5, -5, kInf, NAN, 2, kInf, kInf}, {4, 2});
  EXPECT_EQ(min(two_rows(), 1).to_vector<double>(), (std::vector<double>{-4, -5}));
  EXPECT_EQ(min(two_rows()).item(), -5);
  EXPECT_TRUE(std::isnan(min(x).item()));
  EXPECT_EQ(min(x, 1).to_vector<double>()[3], kInf);
  EXPECT_EQ(gradient(x, [](const Tensor& v) { return min(v, 1); }),
            (std::vector<double>{0, 1, 1, 0, 1, 0, 1, 0}));
}

TEST(Reduce, ArgmaxIsTheFirstLargestAndANaNIsTheLargest) {
  const Tensor x =
      Tensor::from(std::vector<float>{1, 5, 5, 3, 3, 3, 2, kNanF, kNanF, -kInfF, -kInfF, -kInfF}, {4, 3});
  const Tensor index = argmax(x, 1);
  EXPECT_EQ(index.dtype(), DType::i64);
  EXPECT_EQ(index.to_vector<int64_t>(), (std::vector<int64_t>{1, 0, 1, 0}));
  EXPECT_EQ(argmin(x, 1).to_vector<int64_t>(), (std::vector<int64_t>{0, 0, 1, 0}));
  EXPECT_EQ(argmax(x, 0).to_vector<int64_t>(), (std::vector<int64_t>{1, 2, 2}));
  EXPECT_EQ(argmin(x, 0).to_vector<int64_t>(), (std::vector<int64_t>{3, 2, 2}));
  EXPECT_EQ(argmax(x.to(DType::bf16).transpose(0, 1), -2, true).to_vector<int64_t>(),
            (std::vector<int64_t>{1, 0, 1, 0}));
  EXPECT_EQ(argmax(x, -1, true).shape(), (Shape{4, 1}));
  EXPECT_EQ(argmax(Tensor::zeros({2, 0}, DType::f32, kCpu), 0).shape(), Shape{0});
  expect_error([&] { argmax(Tensor::zeros({2, 0}, DType::f32, kCpu), 1); }, {"argmax", "not empty"});
  expect_error([&] { argmin(x, 2); }, {"argmin", "dimension 2"});
  Tensor leaf = x;
  require_grad(leaf);
  Tape tape;
  EXPECT_FALSE(requires_grad(argmax(leaf, 0)));
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Reduce, LogsumexpOverflowsNowhereAndKeepsInfinities) {
  const Tensor x = Tensor::from(
      std::vector<double>{1000, 1000, -1000, -1000 + std::log(3), kInf, 0, -kInf, 5, -kInf, -kInf, NAN, 1},
      {6, 2});
  const auto y = logsumexp(x, 1).to_vector<double>();
  EXPECT_DOUBLE_EQ(y[0], 1000 + std::log(2));
  EXPECT_DOUBLE_EQ(y[1], -1000 + std::log(4));
  EXPECT_EQ(y[2], kInf);
  EXPECT_EQ(y[3], 5);
  EXPECT_EQ(y[4], -kInf);
  EXPECT_TRUE(std::isnan(y[5]));
  EXPECT_EQ(logsumexp(x.slice(0, 0, 2)).item(), logsumexp(x.slice(0, 0, 2), {0, 1}).item());
  EXPECT_EQ(logsumexp(x, 0, true).shape(), (Shape{1, 2}));
  EXPECT_EQ(logsumexp(Tensor::zeros({2, 0}, DType::f32, kCpu), 1).to_vector<double>(),
            (std::vector<double>{-kInf, -kInf}));
  EXPECT_EQ(logsumexp(Tensor::zeros({0, 2}, DType::f32, kCpu), 1).shape(), Shape{0});
  const auto dx = gradient(x.slice(0, 1, 2), [](const Tensor& v) { return logsumexp(v); });
  EXPECT_NEAR(dx[0], 0.25, 1e-12);  // x itself is rounded to 1e-13
  EXPECT_NEAR(dx[1], 0.75, 1e-12);
  EXPECT_EQ(gradient(x.slice(0, 3, 5), [](const Tensor& v) { return logsumexp(v, 1); }),
            (std::vector<double>{0, 1, 0, 0}));
  EXPECT_EQ(
      gradient(Tensor::zeros({2, 0}, DType::f64, kCpu), [](const Tensor& v) { return logsumexp(v, 1); }),
      std::vector<double>{});
}

TEST(Reduce, GradientOfLogsumexpInSixteenBitsDoesNotHaveTheRoundingOfY) {
  // y is 200.69, rounded to 201 in bf16: e^(x - y) would be 0.37 instead of a half.
  for (const Device device : devices()) {
    const Tensor dx =
        gradient_of(Tensor::full({2}, 200, DType::bf16, device), Tensor::ones({}, DType::bf16, device),
                    [](const Tensor& v) { return logsumexp(v); });
    EXPECT_EQ(dx.to_vector<double>(), (std::vector<double>{0.5, 0.5}));
  }
}

TEST(Reduce, WholeNumbersAreExact) {
  for (const Device device : devices()) {
    const int64_t big = int64_t(1) << 60;
    const Tensor x = Tensor::from(std::vector<int64_t>{big, 1, -big, big + 1, 0, -7}, {2, 3}, device);
    EXPECT_EQ(sum(x).item<int64_t>(), big - 5);
    EXPECT_EQ(sum(x, 0).to_vector<int64_t>(), (std::vector<int64_t>{2 * big + 1, 1, -big - 7}));
    EXPECT_EQ(sum(x, {0, 1}, true).shape(), (Shape{1, 1}));
    EXPECT_EQ(max(x, 1).to_vector<int64_t>(), (std::vector<int64_t>{big, big + 1}));
    EXPECT_EQ(min(x.transpose(0, 1), 0, true).to_vector<int64_t>(), (std::vector<int64_t>{-big, -7}));
    const Tensor narrow = Tensor::from(std::vector<int32_t>{2147483647, 1, -2147483647 - 1}, {3}, device);
    EXPECT_EQ(sum(narrow.slice(0, 0, 2)).dtype(), DType::i64);
    EXPECT_EQ(sum(narrow.slice(0, 0, 2)).item<int64_t>(), 2147483648);
    EXPECT_EQ(max(narrow).dtype(), DType::i32);
    EXPECT_EQ(max(narrow).item<int32_t>(), 2147483647);
    EXPECT_EQ(min(narrow).item<int32_t>(), -2147483647 - 1);
    const Tensor ends = Tensor::full({3}, double(INT64_MIN), DType::i64, device);
    EXPECT_EQ(max(ends).item<int64_t>(), INT64_MIN);
    EXPECT_EQ(min(ends).item<int64_t>(), INT64_MIN);
    EXPECT_EQ(sum(Tensor::zeros({2, 0}, DType::i32, device), 1).to_vector<int64_t>(),
              (std::vector<int64_t>{0, 0}));
  }
}

TEST(Reduce, BoolsAreCountedAndAnyAndAll) {
  for (const Device device : devices()) {
    const Tensor mask =
        Tensor::from(std::vector<bool>{true, false, true, true, false, false}, {3, 2}, device);
    EXPECT_EQ(sum(mask).item<int64_t>(), 3);
    EXPECT_EQ(sum(mask, 0).to_vector<int64_t>(), (std::vector<int64_t>{2, 1}));
    EXPECT_EQ(max(mask, 1).dtype(), DType::boolean);
    EXPECT_EQ(max(mask, 1).to_vector<double>(), (std::vector<double>{1, 1, 0}));
    EXPECT_EQ(min(mask, 1).to_vector<double>(), (std::vector<double>{0, 1, 0}));
    EXPECT_EQ(min(mask, 0, true).shape(), (Shape{1, 2}));
  }
}

/// In every cut and direction of the kernels.
TEST(Reduce, ManyWholeNumbersAreThoseOfALoop) {
  for (const Device device : devices())
    for (const Shape& shape : {Shape{3, 5, 9}, Shape{2, 1, 20011}, Shape{20011, 1, 2}, Shape{7, 300, 33},
                               Shape{1, 1, 100003}, Shape{70001, 1, 1}, Shape{5, 65, 129}}) {
      std::vector<int64_t> values(size_t(shape.count()));
      for (size_t i = 0; i < values.size(); ++i) values[i] = int64_t(i * i % 1009) - 500;
      const Tensor x = Tensor::from(values, shape, device);
      for (const std::vector<int>& dims : {std::vector<int>{0}, {1}, {2}, {0, 2}, {0, 1, 2}})
        for (const DType dtype : {DType::i64, DType::i32})
          for (const bool turned : {false, true}) {
            const Tensor source =
                turned ? transposed_copy(x.reshape({shape[0] * shape[1], shape[2]})).reshaped(shape) : x;
            const Tensor taken = source.to(dtype);
            const Tensor wide = source.to(Device::cpu()).to(DType::f64);  // exact
            EXPECT_EQ(sum(taken, dims).to_vector<int64_t>(), sum(wide, dims).to_vector<int64_t>()) << shape;
            EXPECT_EQ(max(taken, dims).to_vector<int64_t>(), max(wide, dims).to_vector<int64_t>()) << shape;
            EXPECT_EQ(min(taken, dims).to_vector<int64_t>(), min(wide, dims).to_vector<int64_t>()) << shape;
          }
    }
}

TEST(Reduce, WholeNumbersHaveNoMean) {
  const Tensor x = labels({1, 2});
  expect_error([&] { mean(x); }, {"mean", "i64", "ops::cast"});
  expect_error([&] { norm(x, 0); }, {"norm", "i64", "ops::cast"});
  expect_error([&] { mean(x.to(DType::boolean)); }, {"mean", "bool", "ops::cast"});
  expect_error([&] { logsumexp(x); }, {"logsumexp", "i64", "not supported"});
  expect_error([&] { argmax(x.to(DType::u8), 0); }, {"argmax", "u8", "i64 or i32"});
  expect_error([&] { sum(x.to(DType::u8)); }, {"sum", "u8", "not supported"});
  expect_error([&] { max(Tensor::zeros({0}, DType::i64, kCpu)); }, {"max", "not empty"});
}

TEST(Reduce, IndicesOfWholeNumbersAreExact) {
  const int64_t large = int64_t(1) << 60;  // f32 and f64 do not tell it from its neighbours
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(
        std::vector<int64_t>{large, large + 1, large + 1, INT64_MIN, INT64_MIN, 5, -5, 7}, {2, 4}, device);
    EXPECT_EQ(argmax(x, 1).to_vector<int64_t>(), (std::vector<int64_t>{1, 3}));
    EXPECT_EQ(argmin(x, -1).to_vector<int64_t>(), (std::vector<int64_t>{3, 0}));
    EXPECT_EQ(argmax(x, 0).to_vector<int64_t>(), (std::vector<int64_t>{0, 0, 0, 1}));
    EXPECT_EQ(argmin(x.transpose(0, 1), 1).to_vector<int64_t>(), (std::vector<int64_t>{1, 1, 1, 0}));
    EXPECT_EQ(argmax(Tensor::from(std::vector<int32_t>{-3, -1, -2}, {3}, device), 0).to_vector<int64_t>()[0],
              1);
    EXPECT_EQ(argmin(Tensor::full({3}, double(INT32_MAX), DType::i32, device), 0).to_vector<int64_t>()[0], 0);
    EXPECT_EQ(argmax(Tensor::full({3}, double(INT64_MIN), DType::i64, device), 0).to_vector<int64_t>()[0], 0);
    // Longer than what a block of a GPU takes at once.
    std::vector<int64_t> many(100003, 1);
    many[70001] = 2, many[70002] = 2;
    EXPECT_EQ(argmax(Tensor::from(many, {1, 100003}, device), 1).to_vector<int64_t>()[0], 70001);
  }
}

TEST(Reduce, GradientOfNormAtZeroIsZero) {
  EXPECT_EQ(gradient(Tensor::zeros({3}, DType::f64, kCpu), [](const Tensor& v) { return norm(v); }),
            (std::vector<double>(3, 0.0)));
}

TEST(Reduce, OverNothing) {
  const Tensor none = Tensor::zeros({2, 0}, DType::f32, kCpu);
  EXPECT_EQ(sum(none).item(), 0);
  EXPECT_EQ(sum(none, 1).to_vector<float>(), (std::vector<float>{0, 0}));
  EXPECT_EQ(norm(none).item(), 0);
  EXPECT_TRUE(std::isnan(mean(none).item()));
  EXPECT_TRUE(std::isnan(mean(none, 1).to_vector<float>()[1]));
  EXPECT_EQ(sum(none, 0).shape(), Shape{0});
  EXPECT_EQ(max(none, 0).shape(), Shape{0});
  expect_error([&] { max(none); }, {"max", "f32[2, 0] on cpu", "not empty"});
  expect_error([&] { max(none, 1); }, {"max", "f32[2, 0] on cpu", "not empty"});
}

TEST(Reduce, LongSumsStayAccurate) {
  // 2^25 + 1 ones: a running sum in f32 stops at 2^24.
  const Tensor ones = Tensor::full({1}, 1, DType::f32, kCpu).expand({(1 << 25) + 4});
  EXPECT_EQ(sum(ones).item(), (1 << 25) + 4);
  EXPECT_EQ(mean(ones).item(), 1);
  const Tensor columns = Tensor::full({1, 3}, 1, DType::bf16, kCpu).expand({1 << 20, 3});
  EXPECT_EQ(sum(columns, 0).to_vector<float>(), (std::vector<float>(3, 1 << 20)));
}

TEST(Reduce, PartsOfLongSumsHaveTheRangeAndTheDigitsOfF64) {
  const int64_t half = 8192;
  for (const Device device : devices()) {
    // Squares whose sum is beyond f32, as the sums of single chunks are.
    EXPECT_NEAR(norm(Tensor::full({1 << 20}, 1e18, DType::f32, device)).item(), 1.024e21, 1e15)
        << device.name();
    std::vector<double> values(size_t(2 * half), 1e35);
    std::fill(values.begin() + half, values.end(), -1e35);
    EXPECT_EQ(sum(Tensor::from(values, {2 * half}).to(DType::f32).to(device)).item(), 0) << device.name();
    std::fill(values.begin(), values.begin() + half, 0x1p24);
    std::fill(values.begin() + half, values.end(), -0x1p24);
    values[size_t(half) - 1] = 1, values.back() = 0;
    const Tensor cancels = Tensor::from(values, {2 * half}).to(DType::f32).to(device);
    EXPECT_EQ(sum(cancels).item(), 1) << device.name();
    EXPECT_EQ(sum(cancels.reshape({2 * half, 1}).expand({2 * half, 3}), 0).to_vector<float>(),
              (std::vector<float>(3, 1)))
        << device.name();
  }
}

TEST(Reduce, SumsOfSixteenBitsAreExactAndDoNotOverflowInBetween) {
  for (const Device device : devices()) {
    // Numbers of both signs whose sums have more digits than 16 bits do; by rows, by columns and of all.
    const int64_t rows = 517, columns = 131;
    std::vector<float> values(size_t(rows * columns)), by_row(size_t(rows), 0), by_column(size_t(columns), 0);
    float total = 0;
    for (int64_t i = 0; i < rows * columns; ++i) {
      const float value = float(i * 7919 % 255 - 100);
      values[size_t(i)] = value, by_row[size_t(i / columns)] += value,
      by_column[size_t(i % columns)] += value;
      total += value;
    }
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const Tensor x = Tensor::from(values, {rows, columns}).to(dtype).to(device);
      for (const Tensor& each : {x, x.transpose(0, 1)})
        EXPECT_EQ(sum_to(each, Shape{}, DType::f32).item(), total);
      EXPECT_EQ(sum_to(x, Shape{rows, 1}, DType::f32).to_vector<float>(), by_row) << device.name();
      EXPECT_EQ(sum_to(x, Shape{1, columns}, DType::f32).to_vector<float>(), by_column) << device.name();
    }
    std::vector<float> large(64, 3e38f);
    const Tensor x = Tensor::from(large, {64}).to(DType::bf16).to(device);
    EXPECT_EQ(mean(x).item(), x.to_vector<double>()[0]) << device.name();
    EXPECT_EQ(mean(x.reshape({64, 1}).expand({64, 3}), 0).to_vector<double>()[2], x.to_vector<double>()[0]);
  }
}

TEST(Reduce, AReductionInChunksIsThatOfItsParts) {
  // Of one row of many elements, of many rows with gaps and of a transposed tensor; sums of integers are
  // exact.
  const int64_t rows = 517, columns = 131, count = rows * columns;
  std::vector<double> values(size_t(count), 0);
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(i * 7919 % 31) - 15;
  values[40007] = 99;
  double total = 0, squares = 0;
  for (const double v : values) total += v, squares += v * v;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor row = Tensor::from(values, {count}).to(dtype),
                 matrix = Tensor::from(values, {rows, columns}).to(dtype);
    for (const Tensor& x : {row, matrix, matrix.transpose(0, 1)}) {
      const Tensor wide = sum_to(x, Shape{}, dtype == DType::f64 ? DType::f64 : DType::f32);
      EXPECT_EQ(wide.item(), total) << name_of(dtype);
      EXPECT_EQ(max(x).item(), 99) << name_of(dtype);
      const double length = norm(x).item();
      EXPECT_NEAR(length, std::sqrt(squares), std::sqrt(squares) * epsilon(dtype)) << name_of(dtype);
    }
    EXPECT_EQ(max(matrix, 1).to_vector<double>()[40007 / 131], 99);
    EXPECT_EQ(max(matrix, 0).to_vector<double>()[40007 % 131], 99);
  }
  const Tensor drawn = uniform({rows, columns}, DType::f32, 5);
  const int threads = cpu_threads();
  std::vector<double> results;
  for (const int some : {1, 2, 3}) {
    set_cpu_threads(some);
    results.push_back(sum(drawn).item());
  }
  set_cpu_threads(threads);
  EXPECT_EQ(results, std::vector<double>(3, results[0]));
  values[60000] = std::nan("");
  EXPECT_TRUE(std::isnan(max(Tensor::from(values, {count}).to(DType::f32)).item()));
}

TEST(Reduce, SpecialValues) {
  const Tensor x = Tensor::from(std::vector<float>{INFINITY, 1, -INFINITY, 2}, {4});
  EXPECT_TRUE(std::isnan(sum(x).item()));
  EXPECT_EQ(max(x).item(), kInf);
  EXPECT_EQ(norm(x).item(), kInf);
}

TEST(Reduce, AGradientThatArrivesTwiceAddsUp) {
  Tensor x = two_rows();
  require_grad(x);
  Tape tape;
  const Tensor y = scale(x, 1);
  tape.backward(add(sum(y), sum(mul(y, y))));
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>{7, -7, 1, 25, -9, 1}));  // 1 + 2 x
}

TEST(Reduce, SumToAnyShapeThatBroadcasts) {
  std::vector<double> values(2 * 3 * 4 * 5);
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(i * i % 17) - 8;
  const Tensor x = Tensor::from(values, {2, 3, 4, 5});
  for (const Shape& shape : {Shape{}, Shape{5}, Shape{1, 5}, Shape{4, 1}, Shape{3, 1, 5}, Shape{1, 3, 1, 5},
                             Shape{2, 1, 4, 1}, Shape{2, 1, 1, 5}, Shape{2, 3, 4, 5}, Shape{1, 1, 1, 1}}) {
    const Tensor expected = Tensor::zeros(shape, DType::f64, kCpu);
    const Tensor place = expected.expand(x.shape());  // many elements of x meet in one
    for (int64_t a = 0; a < 2; ++a)
      for (int64_t b = 0; b < 3; ++b)
        for (int64_t c = 0; c < 4; ++c)
          for (int64_t d = 0; d < 5; ++d) *place.at({a, b, c, d}).data<double>() += x.at({a, b, c, d}).item();
    EXPECT_EQ(sum_to(x, shape).to_vector<double>(), expected.to_vector<double>()) << shape;
    EXPECT_EQ(sum_to(x, shape).shape(), shape);
    EXPECT_EQ(sum_to(x.to(DType::bf16), shape, DType::f32).to_vector<double>(), expected.to_vector<double>());
  }
  EXPECT_TRUE(sum_to(x, x.shape()).shares_storage(x));
  EXPECT_EQ(sum_to(Tensor::zeros({0, 3}, DType::f32, kCpu), {3}).to_vector<float>(), (std::vector<float>(3)));
  expect_error([&] { sum_to(x, {2, 5}); }, {"sum_to", "[2, 5]", "[2, 3, 4, 5]"});
  expect_error([&] { sum_to(x, {5}, DType::f32); }, {"sum_to", "f64", "f32"});
  expect_error([&] { sum_to({}, {5}); }, {"sum_to: x is undefined"});
  expect_parts(report_of([&] { sum_to(x, {2, 5}); }), {"sum_to", "; called at ", "reduce_test.cpp"});
}

TEST(Reduce, ErrorsNameTheTensor) {
  const Tensor x = two_rows();
  for (const Reduce f :
       {Reduce(sum), Reduce(mean), Reduce(max), Reduce(min), Reduce(norm), Reduce(logsumexp)}) {
    expect_error([&] { f(x, 2, false, Site::here()); }, {"dimension 2", "f64[2, 3] on cpu"});
    expect_error([&] { f(x, -3, false, Site::here()); }, {"dimension -3"});
    expect_error([&] { f(x.to(DType::u8), 0, false, Site::here()); }, {"u8", "not supported"});
  }
  expect_error([&] { sum(Tensor()); }, {"sum", "undefined"});
}

}  // namespace
}  // namespace tessera::ops
