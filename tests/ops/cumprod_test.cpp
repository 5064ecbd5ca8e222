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

/// Products of parts of a line may leave the range of f64 where those of its beginnings do not. The numbers
/// are powers of two, so everything is exact.
TEST(Cumprod, PartsOfALineMayLeaveTheRange) {
  const int64_t length = 300, columns = 3;
  std::vector<double> x(size_t(length * columns), 1), expected(x.size());
  const auto set = [&](int64_t i, double value) {
    for (int64_t c = 0; c < columns; ++c) x[size_t(i * columns + c)] = value;
  };
  for (int64_t i = 0; i < 8; ++i) set(i, 0x1p-120), set(130 + i, 0x1p120);
  set(138, 0x1p80), set(200, -0x1p-75), set(250, 0), set(280, 0x1p100);
  double product = 1;
  for (int64_t i = 0; i < length; ++i) {
    product *= x[size_t(i * columns)];
    for (int64_t c = 0; c < columns; ++c) expected[size_t(i * columns + c)] = double(float(product));
  }
  for (const Device device : devices()) {
    const Tensor on = Tensor::from(x, {length, columns}).to(DType::f32).to(device);
    EXPECT_EQ(cumprod(on, 0).to_vector<double>(), expected) << device.name();
  }
}

TEST(Cumprod, ErrorsNameTheOperand) {
  expect_error([] { cumprod(Tensor(), 0); }, {"cumprod", "undefined"});
  expect_error([] { cumprod(counting({2}), 1); }, {"cumprod", "dimension 1 is outside"});
  expect_error([] { cumprod(counting({2}).to(DType::boolean), 0); }, {"cumprod", "bool", "i64 or i32"});
}

}  // namespace
}  // namespace tessera::ops
