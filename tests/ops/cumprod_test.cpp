#include "ops/cumprod/cumprod.h"

#include <gtest/gtest.h>

#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(Cumprod, ByHandAlongEveryDimension) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3}, device);
    EXPECT_EQ(cumprod(x, -1).to_vector<double>(), (std::vector<double>{1, 2, 6, 4, 20, 120}));
    EXPECT_EQ(cumprod(x, 0).to_vector<double>(), (std::vector<double>{1, 2, 3, 4, 10, 18}));
    const Tensor whole = Tensor::from(std::vector<int32_t>{1 << 30, 4, -2}, {3}, device);
    EXPECT_EQ(cumprod(whole, 0).to_vector<int64_t>(),
              (std::vector<int64_t>{int64_t(1) << 30, int64_t(1) << 32, -(int64_t(1) << 33)}));
  }
}

/// With one zero the derivative is that of the other factors' product; with two it is 0.
TEST(Cumprod, ZerosAreNoPolesOfItsGradient) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{2, 0, 3, 0, 5}, {5}, device);
    const Tensor dy = Tensor::from(std::vector<float>{1, 1, 1, 1, 1}, {5}, device);
    // y = x0, x0 x1, x0 x1 x2, ...: dx0 = 1, dx1 = x0 + x0 x2, and all of the others hold x1 = 0.
    EXPECT_EQ(gradient_of(x, dy, [](const Tensor& v) { return cumprod(v, 0); }).to_vector<double>(),
              (std::vector<double>{1, 8, 0, 0, 0}));
    EXPECT_EQ(
        gradient_of(x.reshape({5, 1}), dy.reshape({5, 1}), [](const Tensor& v) { return cumprod(v, 0); })
            .to_vector<double>(),
        (std::vector<double>{1, 8, 0, 0, 0}));
  }
}

TEST(Cumprod, ErrorsNameTheOperand) {
  expect_error([] { cumprod(Tensor(), 0); }, {"cumprod", "undefined"});
  expect_error([] { cumprod(counting({2}), 1); }, {"cumprod", "dimension 1 is outside"});
  expect_error([] { cumprod(counting({2}).to(DType::boolean), 0); }, {"cumprod", "bool", "i64 or i32"});
}

}  // namespace
}  // namespace tessera::ops
