#include "ops/mlp/mlp.h"

#include <gtest/gtest.h>

#include <optional>

#include "ops/linear/linear.h"
#include "ops/op.h"
#include "ops/variant.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

std::vector<Tensor> inputs(DType dtype) {
  std::vector<Tensor> in{eighths({2, 3, 5}, dtype, 1), eighths({9, 5}, dtype, 2), eighths({4, 9}, dtype, 3),
                         eighths({9}, dtype, 4), eighths({4}, dtype, 5)};
  for (Tensor& each : in) require_grad(each);
  return in;
}

// The same kernels in the same order: bitwise the composition, forward and backward.
TEST(Mlp, IsTheCompositionOfThree) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const Activation kind : {Activation::none, Activation::silu, Activation::relu_squared}) {
      const auto one = inputs(dtype), three = inputs(dtype);
      const Tensor dy = eighths({2, 3, 4}, dtype, 6);
      std::vector<double> y_one, y_three;
      {
        Tape tape;
        const Tensor y = mlp(one[0], one[1], one[2], kind, one[3], one[4]);
        y_one = y.to_vector<double>();
        tape.backward(std::vector{y}, std::vector{dy});
      }
      {
        Tape tape;
        const Tensor y = linear(activation(linear(three[0], three[1], three[3]), kind), three[2], three[4]);
        y_three = y.to_vector<double>();
        tape.backward(std::vector{y}, std::vector{dy});
      }
      EXPECT_EQ(y_one, y_three) << dtype << name_of(kind);
      EXPECT_EQ(mlp(one[0], one[1], one[2], kind, one[3], one[4]).to_vector<double>(), y_one)
          << "without a tape, " << dtype << name_of(kind);
      for (size_t i = 0; i < one.size(); ++i)
        EXPECT_EQ(grad(one[i]).to_vector<double>(), grad(three[i]).to_vector<double>())
            << dtype << name_of(kind) << " input " << i;
    }
}

TEST(Mlp, FrozenPartsGetNothing) {
  for (size_t wanted = 0; wanted < 5; ++wanted) {
    auto all = inputs(DType::f64), one = inputs(DType::f64);
    for (size_t i = 0; i < 5; ++i)
      if (i != wanted) one[i] = one[i].detach();
    const Tensor dy = eighths({2, 3, 4}, DType::f64, 6);
    for (const auto* in : {&all, &one}) {
      Tape tape;
      tape.backward(std::vector{mlp((*in)[0], (*in)[1], (*in)[2], Activation::gelu, (*in)[3], (*in)[4])},
                    std::vector{dy});
    }
    EXPECT_EQ(grad(one[wanted]).to_vector<double>(), grad(all[wanted]).to_vector<double>()) << wanted;
  }
}

TEST(Mlp, MessagesNameTheWeight) {
  const Tensor x = eighths({2, 5}, DType::f32, 1), up = eighths({9, 5}, DType::f32, 2);
  EXPECT_EQ(message_of([&] {
              mlp(x, eighths({9, 6}, DType::f32, 2), up, Activation::silu);
            }),
            "mlp: up [9, 6] takes 6 features, but its input has 5; expected [out, 5]");
  EXPECT_EQ(message_of([&] {
              mlp(x, up, eighths({4, 8}, DType::f32, 2), Activation::silu);
            }),
            "mlp: down [4, 8] takes 8 features, but its input has 9; expected [out, 9]");
  EXPECT_EQ(message_of([&] {
              mlp(x, up, eighths({4, 9}, DType::f32, 2), Activation::silu, {}, up);
            }),
            "mlp: bias [9, 5] does not go with down [4, 9]; expected [4]");
}

TEST(Mlp, GeluTanhsSlopeIsNoughtOrOneWhereTheSquareOverflows) {
  // h = x = 3e19, whose square is infinite in f32; in every variant, as their epilogues have slopes of their
  // own.
  std::vector<double> eye(64 * 64, 0.0);
  for (size_t i = 0; i < 64; ++i) eye[i * 65] = 1;
  std::vector<double> values(16 * 64), expected;
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = i % 2 ? -3e19 : 3e19;
    expected.push_back(i % 2 ? 0 : 1);
  }
  const auto variants = find_op("mlp").variants;
  for (const Device device : devices())
    for (int index = -1; index < (device.is_cpu() ? 0 : int(variants.size())); ++index) {
      std::optional<ForceVariant> force;
      if (index >= 0) force.emplace("mlp", variants[size_t(index)]);
      const Tensor weight = Tensor::from(eye, {64, 64}).to(DType::bf16).to(device);
      const Tensor dy = Tensor::full({16, 64}, 1, DType::bf16, device);
      const auto dx =
          gradient_of(Tensor::from(values, {16, 64}).to(DType::bf16).to(device), dy,
                      [&](const Tensor& x) { return mlp(x, weight, weight, Activation::gelu_tanh); });
      EXPECT_EQ(dx.to_vector<double>(), expected) << device.name() << " variant " << index;
    }
}

}  // namespace
}  // namespace tessera::ops
