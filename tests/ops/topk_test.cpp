#include "ops/topk/topk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/pointwise/pointwise.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

std::vector<int64_t> indices_of(const TopK& top) {
  return top.indices.to_vector<int64_t>();
}

TEST(TopK, LargestFirstAlongEveryDimension) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{3, 9, -1, 4, 2, 8}, {2, 3}, device);
    const TopK rows = topk(x, 2);
    EXPECT_EQ(rows.values.to_vector<float>(), (std::vector<float>{9, 3, 8, 4}));
    EXPECT_EQ(rows.indices.dtype(), DType::i64);
    EXPECT_EQ(indices_of(rows), (std::vector<int64_t>{1, 0, 2, 0}));
    EXPECT_EQ(indices_of(topk(x, 2, 0)), (std::vector<int64_t>{1, 0, 1, 0, 1, 0}));
    EXPECT_EQ(topk(x, 1, 0).values.shape(), (Shape{1, 3}));
    EXPECT_EQ(topk(x, 0).values.shape(), (Shape{2, 0}));
    EXPECT_EQ(topk(Tensor::zeros({0, 3}, DType::f32, device), 2).indices.shape(), (Shape{0, 2}));
    EXPECT_EQ(topk(x.transpose(0, 1), 1, 0).values.to_vector<float>(), (std::vector<float>{9, 8}));
  }
}

TEST(TopK, OfEqualOnesTheLowestIndexAndNaNAboveInfinity) {
  for (const Device device : devices()) {
    const Tensor x =
        Tensor::from(std::vector<float>{0, -0.0f, 5, kNanF, kInfF, 5, -kInfF, -kNanF, 0}, {9}, device);
    EXPECT_EQ(indices_of(topk(x, 9)), (std::vector<int64_t>{3, 7, 4, 2, 5, 0, 1, 8, 6}));
    EXPECT_EQ(indices_of(topk(x, 4)), (std::vector<int64_t>{3, 7, 4, 2}));  // a tie at the end
    EXPECT_EQ(indices_of(topk(Tensor::full({300}, kNanF, DType::f32, device), 3)),
              (std::vector<int64_t>{0, 1, 2}));
    EXPECT_EQ(indices_of(topk(ones({300}, DType::bf16, device), 2)), (std::vector<int64_t>{0, 1}));
    EXPECT_TRUE(std::signbit(topk(x, 7).values.to_vector<float>()[6]));  // the -0 itself
  }
}

/// Many equal values, k on both sides of what a block of a GPU ranks itself.
TEST(TopK, ManyAreThoseOfASort) {
  constexpr int64_t kLength = 3001;
  std::vector<float> values(kLength);
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(int64_t(i * i) % 251 - 100) / 8;
  std::vector<int64_t> order(kLength);
  for (size_t i = 0; i < order.size(); ++i) order[i] = int64_t(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return values[size_t(a)] > values[size_t(b)]; });
  for (const Device device : devices())
    for (const int64_t k : {1, 7, 255, 1023, 1024, 1025, 3000, 3001})
      for (const DType dtype : {DType::f32, DType::f16})
        EXPECT_EQ(indices_of(topk(Tensor::from(values, {kLength}).to(dtype).to(device), k)),
                  std::vector<int64_t>(order.begin(), order.begin() + k))
            << k << " " << dtype;
}

TEST(TopK, GradientsGoToTheChosenElements) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{3, 9, -1, 4, 2, 8}, {2, 3}, device);
    const Tensor dy = Tensor::from(std::vector<float>{1, 2, 3, 4}, {2, 2}, device);
    EXPECT_EQ(gradient_of(x, dy, [](const Tensor& v) { return topk(v, 2).values; }).to_vector<float>(),
              (std::vector<float>{2, 1, 0, 4, 0, 3}));
  }
}

TEST(TopK, OnlyValuesAreOnTheTape) {
  Tensor x = counting({4});
  require_grad(x);
  Tape tape;
  const TopK top = topk(x, 2);
  EXPECT_TRUE(requires_grad(top.values));
  EXPECT_FALSE(requires_grad(top.indices));
}

TEST(TopK, OfWholeNumbersIsExact) {
  const int64_t large = int64_t(1) << 60;  // f32 and f64 do not tell it from its neighbours
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(
        std::vector<int64_t>{large, large + 1, INT64_MIN, large + 1, 0, -1, INT64_MAX, -1}, {2, 4}, device);
    EXPECT_EQ(indices_of(topk(x, 3)), (std::vector<int64_t>{1, 3, 0, 2, 0, 1}));
    EXPECT_EQ(topk(x, 1).values.to_vector<int64_t>(), (std::vector<int64_t>{large + 1, INT64_MAX}));
    EXPECT_EQ(indices_of(topk(x, 1, 0)), (std::vector<int64_t>{0, 0, 1, 0}));
    const Tensor narrow = Tensor::from(std::vector<int32_t>{-2, INT32_MIN, 7, INT32_MAX, 7}, {5}, device);
    EXPECT_EQ(indices_of(topk(narrow, 5)), (std::vector<int64_t>{3, 2, 4, 0, 1}));
    EXPECT_EQ(topk(narrow, 2).values.dtype(), DType::i32);
  }
}

TEST(TopK, ErrorsNameTheOperand) {
  const Tensor x = counting({2, 3});
  expect_error([&] { topk(x, 4); }, {"topk", "k = 4 of 3 elements along dimension 1", "f64[2, 3] on cpu"});
  expect_error([&] { topk(x, -1); }, {"topk", "k = -1"});
  expect_error([&] { topk(x, 1, 2); }, {"topk", "dimension 2 is outside"});
  expect_error([&] { topk(x.to(DType::u8), 1); }, {"topk", "u8", "i64 or i32"});
  expect_error([&] { topk(Tensor::full({}, 1, DType::f32), 0); }, {"topk", "dimension -1"});
  expect_error([] { topk(Tensor(), 1); }, {"topk", "undefined"});
}

}  // namespace
}  // namespace tessera::ops
