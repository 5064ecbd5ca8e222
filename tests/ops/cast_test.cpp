#include "ops/cast/cast.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "ops/op.h"
#include "ops/pointwise/pointwise.h"
#include "tests/tensors.h"

namespace tessera::ops {
namespace {

TEST(Cast, ConvertsValues) {
  const Tensor x = Tensor::from(std::vector<double>{-1.75, 0, 1.75, 300}, {4});
  EXPECT_EQ(cast(x, DType::i64).to_vector<int64_t>(), (std::vector<int64_t>{-1, 0, 1, 300}));
  EXPECT_EQ(cast(x, DType::i32).to_vector<int32_t>(), (std::vector<int32_t>{-1, 0, 1, 300}));
  EXPECT_EQ(cast(x.slice(0, 1, 3), DType::u8).to_vector<uint8_t>(), (std::vector<uint8_t>{0, 1}));
  EXPECT_EQ(cast(x, DType::boolean).to_vector<bool>(), (std::vector<bool>{true, false, true, true}));
  // 1 + 2^-8 lies between two bf16 numbers: to even.
  EXPECT_EQ(cast(Tensor::full({1}, 1 + 0x1p-8, DType::f32, kCpu), DType::bf16).item(), 1);
  EXPECT_EQ(cast(Tensor::full({1}, 1 + 3 * 0x1p-8, DType::f32, kCpu), DType::bf16).item(), 1 + 0x1p-6);
  EXPECT_EQ(cast(Tensor::from(std::vector<int64_t>{3}, {1}), DType::f32).item(), 3);
  EXPECT_EQ(cast(x, DType::f32).dtype(), DType::f32);
}

TEST(Cast, GradientComesBackInTheInputsDType) {
  Tensor x = Tensor::full({3}, 2, DType::f32, kCpu);
  require_grad(x);
  Tape tape;
  const Tensor y = cast(x, DType::bf16);
  tape.backward(std::vector{y}, std::vector{Tensor::full({3}, 0.5, DType::bf16, kCpu)});
  EXPECT_EQ(grad(x).dtype(), DType::f32);
  EXPECT_EQ(grad(x).to_vector<float>(), (std::vector<float>(3, 0.5f)));
}

TEST(Cast, ToItsOwnDTypeSharesTheElementsAndHandsTheGradientOn) {
  Tensor x = Tensor::full({3}, 2, DType::f64, kCpu);
  require_grad(x);
  Tape tape;
  const Tensor y = cast(x, DType::f64);
  EXPECT_TRUE(y.shares_storage(x));
  tape.backward(std::vector{y}, std::vector{Tensor::full({3}, 4, DType::f64, kCpu)});
  EXPECT_EQ(grad(x).to_vector<double>(), (std::vector<double>(3, 4)));
}

TEST(Cast, IntegersHaveNoGradient) {
  Tensor x = Tensor::full({3}, 2, DType::f32, kCpu);
  require_grad(x);
  const Tape tape;
  for (const DType to : {DType::i64, DType::i32, DType::u8, DType::boolean, DType::f8e4m3})
    EXPECT_FALSE(requires_grad(cast(x, to))) << to;
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Cast, EveryTargetIsAChoiceOfTheOperator) {
  const OpSpec& op = find_op("cast");
  const Tensor x = Tensor::full({2}, 1, DType::f32, kCpu);
  for (const std::string& name : op.attrs[0].choices) {
    const Tensor y = op.run({x}, complete(op, {{"to", name}}))[0];
    EXPECT_EQ(y.dtype(), parse_dtype(name));
    EXPECT_EQ(y.to(DType::f64).to_vector<double>(), (std::vector<double>{1, 1})) << name;
  }
  EXPECT_THROW(complete(op, {{"to", std::string("f31")}}), Error);
  EXPECT_THROW(cast(Tensor(), DType::f32), Error);
}

}  // namespace
}  // namespace tessera::ops
