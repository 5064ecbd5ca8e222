#include "ops/triangle/triangle.h"

#include <gtest/gtest.h>

#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(Triangle, ByHand) {
  for (const Device device : devices()) {
    const Tensor x = counting({2, 3}, 1).to(DType::f32).to(device);
    EXPECT_EQ(tril(x).to_vector<double>(), (std::vector<double>{1, 0, 0, 4, 5, 0}));
    EXPECT_EQ(tril(x, 1).to_vector<double>(), (std::vector<double>{1, 2, 0, 4, 5, 6}));
    EXPECT_EQ(tril(x, -1).to_vector<double>(), (std::vector<double>{0, 0, 0, 4, 0, 0}));
    EXPECT_EQ(triu(x).to_vector<double>(), (std::vector<double>{1, 2, 3, 0, 5, 6}));
    EXPECT_EQ(triu(x, 2).to_vector<double>(), (std::vector<double>{0, 0, 3, 0, 0, 0}));
    EXPECT_EQ(triu(x, INT64_MAX).to_vector<double>(), std::vector<double>(6, 0));
    EXPECT_EQ(tril(x, INT64_MIN).to_vector<double>(), std::vector<double>(6, 0));
    EXPECT_EQ(tril(x.transpose(0, 1)).to_vector<double>(), (std::vector<double>{1, 0, 2, 5, 3, 6}));
    EXPECT_EQ(tril(counting({2, 2, 2}).to(DType::f32).to(device)).to_vector<double>(),
              (std::vector<double>{0, 0, 2, 3, 4, 0, 6, 7}));
    EXPECT_EQ(triu(Tensor::zeros({3, 0}, DType::f32, device)).shape(), (Shape{3, 0}));
  }
}

TEST(Triangle, TakesEveryDtypeAndDropsNaN) {
  for (const Device device : devices()) {
    const Tensor mask = tril(Tensor::ones({3, 3}, DType::boolean, device));
    EXPECT_EQ(mask.dtype(), DType::boolean);
    EXPECT_EQ(mask.to_vector<double>(), (std::vector<double>{1, 0, 0, 1, 1, 0, 1, 1, 1}));
    EXPECT_EQ(triu(Tensor::full({2, 2}, 7, DType::i64, device), 1).to_vector<int64_t>(),
              (std::vector<int64_t>{0, 7, 0, 0}));
    const Tensor x = Tensor::from(std::vector<float>{1, kNanF, 2, 3}, {2, 2}, device);
    EXPECT_EQ(tril(x).to_vector<float>(), (std::vector<float>{1, 0, 2, 3}));
  }
}

TEST(Triangle, TheGradientIsTheTriangleOfDy) {
  for (const Device device : devices()) {
    const Tensor x = ones({2, 2}, DType::f32, device), dy = counting({2, 2}, 1).to(DType::f32).to(device);
    EXPECT_EQ(gradient_of(x, dy, [](const Tensor& v) { return triu(v); }).to_vector<double>(),
              (std::vector<double>{1, 2, 0, 4}));
  }
}

TEST(Triangle, ErrorsNameTheOperand) {
  expect_error([] { tril(counting({3})); }, {"tril", "f64[3] on cpu", "at least two dimensions"});
  expect_error([] { triu(Tensor()); }, {"triu", "undefined"});
}

}  // namespace
}  // namespace tessera::ops
