#include "runtime/f32_math.h"

#include <gtest/gtest.h>

#include <thread>

#include "autograd/checkpoint.h"
#include "autograd/tape.h"
#include "ops/attention/attention.h"
#include "ops/linear/linear.h"
#include "ops/random/random.h"
#include "tensor/precision.h"

namespace tessera {
namespace {

Tensor random(const Shape& shape, uint64_t seed) {
  const Tensor x = Tensor::empty(shape, DType::f32, Device::cpu());
  Rng rng(seed);
  ops::fill_normal(x, 0, 1, rng);
  return x;
}

TEST(F32Math, IsIeeeOutsideScopesAndOnOtherThreads) {
  EXPECT_EQ(f32_math(), F32Math::ieee);
  {
    const F32MathScope tf32(F32Math::tf32);
    EXPECT_EQ(f32_math(), F32Math::tf32);
    {
      const F32MathScope inner(F32Math::ieee);
      EXPECT_EQ(f32_math(), F32Math::ieee);
    }
    EXPECT_EQ(f32_math(), F32Math::tf32);
    F32Math elsewhere = F32Math::tf32;
    std::thread([&] { elsewhere = f32_math(); }).join();
    EXPECT_EQ(elsewhere, F32Math::ieee);
  }
  EXPECT_EQ(f32_math(), F32Math::ieee);
}

/// A result and the gradients of x and weight, forward and backward in the given scopes.
std::vector<std::vector<float>> run(F32Math forward, F32Math backward, bool checkpointed) {
  Tensor x = random({5, 33}, 1), weight = random({7, 33}, 2);
  require_grad(x), require_grad(weight);
  Tape tape;
  Tensor y;
  {
    const F32MathScope scope(forward);
    const auto layer = [&](const Tensor& rows) { return ops::linear(rows, weight); };
    y = checkpointed ? checkpoint(layer, x) : layer(x);
  }
  const F32MathScope scope(backward);
  tape.backward(std::vector{y}, std::vector{random({5, 7}, 3)});
  return {y.detach().to_vector<float>(), grad(x).to_vector<float>(), grad(weight).to_vector<float>()};
}

TEST(F32Math, BackwardRunsInTheScopeOfItsForward) {
  const auto ieee = run(F32Math::ieee, F32Math::ieee, false), tf32 = run(F32Math::tf32, F32Math::tf32, false);
  for (size_t i = 0; i < ieee.size(); ++i)
    EXPECT_NE(ieee[i], tf32[i]) << "the operator ignores the scope: " << i;
  for (const bool checkpointed : {false, true}) {
    EXPECT_EQ(run(F32Math::tf32, F32Math::ieee, checkpointed), tf32);
    EXPECT_EQ(run(F32Math::ieee, F32Math::tf32, checkpointed), ieee);
  }
}

TEST(F32Math, TheScopeOfTheCallerReturnsAfterBackward) {
  const F32MathScope scope(F32Math::tf32);
  Tensor x = random({2, 4}, 1);
  require_grad(x);
  Tape tape;
  Tensor y;
  {
    const F32MathScope ieee(F32Math::ieee);
    y = ops::linear(x, random({3, 4}, 2));
  }
  tape.backward(std::vector{y}, std::vector{random({2, 3}, 3)});
  EXPECT_EQ(f32_math(), F32Math::tf32);
}

/// On the CPU the operands of a GEMM are rounded, and nothing else.
TEST(F32Math, TheCpuRoundsTheOperandsOfAProduct) {
  for (const int64_t k : {3, 33, 400}) {  // plain loops and BLAS
    const Tensor x = random({40, k}, 1), weight = random({50, k}, 2), bias = random({50}, 3);
    const Tensor want = ops::linear(rounded_to_tf32(x), rounded_to_tf32(weight), bias);
    const F32MathScope scope(F32Math::tf32);
    EXPECT_EQ(ops::linear(x, weight, bias).to_vector<float>(), want.to_vector<float>()) << k;
  }
}

TEST(F32Math, OtherDTypesAreUnaffected) {
  for (const DType dtype : {DType::f64, DType::bf16, DType::f16}) {
    const Tensor x = random({4, 9}, 1).to(dtype), weight = random({3, 9}, 2).to(dtype);
    const Tensor q = random({1, 5, 2, 8}, 3).to(dtype);
    const auto linear = ops::linear(x, weight).to_vector<double>(),
               attention = ops::attention(q, q, q).to_vector<double>();
    const F32MathScope scope(F32Math::tf32);
    EXPECT_EQ(ops::linear(x, weight).to_vector<double>(), linear) << dtype;
    EXPECT_EQ(ops::attention(q, q, q).to_vector<double>(), attention) << dtype;
  }
}

}  // namespace
}  // namespace tessera
