#include "ops/grouped_mlp/grouped_mlp.h"

#include <gtest/gtest.h>

#include "ops/grouped_linear/grouped_linear.h"

namespace tessera::ops {
namespace {

Tensor counted(const Shape& shape, DType dtype, int64_t seed) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = double((int64_t(i) * 5 + seed) % 13 - 6) / 8;
  return Tensor::from(values, shape).to(dtype);
}

// The same kernels in the same order: bitwise the composition, forward and backward.
TEST(GroupedMlp, IsTheCompositionOfThree) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    std::vector<Tensor> one{counted({2, 3, 5}, dtype, 1), counted({4, 9, 5}, dtype, 2),
                            counted({4, 3, 9}, dtype, 3)};
    std::vector<Tensor> three;
    for (Tensor& each : one) {
      three.push_back(each.clone());
      require_grad(each);
      require_grad(three.back());
    }
    const Tensor dy = counted({2, 3, 4, 3}, dtype, 6);
    std::vector<double> y_one, y_three;
    {
      Tape tape;
      const Tensor y = grouped_mlp(one[0], one[1], one[2], Activation::silu);
      y_one = y.to_vector<double>();
      tape.backward(std::vector{y}, std::vector{dy});
    }
    {
      Tape tape;
      const Tensor y = grouped_linear(silu(grouped_linear(three[0], three[1])), three[2], {}, false);
      y_three = y.to_vector<double>();
      tape.backward(std::vector{y}, std::vector{dy});
    }
    EXPECT_EQ(y_one, y_three) << dtype;
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_EQ(grad(one[i]).to_vector<double>(), grad(three[i]).to_vector<double>())
          << dtype << " input " << i;
  }
}

TEST(GroupedMlp, KeepsNoHiddenRows) {
  Tensor x = counted({64, 8}, DType::f64, 1), up = counted({4, 512, 8}, DType::f64, 2),
         down = counted({4, 3, 512}, DType::f64, 3);
  require_grad(up);
  Tape tape;
  const auto allocated = [] { return Device::cpu().allocator().stats().allocated; };
  const size_t before = allocated();
  const Tensor y = grouped_mlp(x, up, down, Activation::silu);
  EXPECT_LT(allocated() - before, size_t(64) * 512 * 8);
}

TEST(GroupedMlp, SaysWhichOperandDoesNotFit) {
  const Tensor x = counted({2, 5}, DType::f32, 1), up = counted({4, 9, 5}, DType::f32, 2);
  const auto message = [&](const Tensor& u, const Tensor& d) -> std::string {
    try {
      grouped_mlp(x, u, d, Activation::silu);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message(counted({4, 9, 6}, DType::f32, 1), up).find("expected [K, F, 5]"), std::string::npos);
  EXPECT_NE(message(up, counted({4, 3, 8}, DType::f32, 1)).find("expected [4, E, 9]"), std::string::npos);
  EXPECT_NE(message(up, counted({4, 3, 9}, DType::f64, 1)).find("down"), std::string::npos);
}

}  // namespace
}  // namespace tessera::ops
