#include "ops/gemm/gemm_tf32.h"

#include <gtest/gtest.h>

#include <optional>

#include "runtime/f32_math.h"
#include "tests/ops/guarded.h"

/// GEMMs of f32 in TF32 on a GPU, where they are rearranged: large ones of small integers, whose sums are
/// exact.

namespace tessera::ops {
namespace {

class GemmTf32Cuda : public GuardedCuda<0> {
 protected:
  /// d = a b (+ d) of numbers, on the GPU in TF32 and on the CPU, and again on the GPU.
  static void expect_exact(const Shape& a, bool transpose_a, const Shape& b, bool transpose_b,
                           bool accumulate = false, bool bias = false) {
    const auto oriented = [](const Tensor& x, bool t) { return t ? x.transpose(0, 1) : x; };
    const Tensor left = small_numbers(a, 1), right = small_numbers(b, 2);
    const int64_t m = oriented(left, transpose_a).size(0), n = oriented(right, transpose_b).size(1);
    const Tensor d = small_numbers({m, n}, 3), on_gpu = d.to(gpu()), again = d.to(gpu());
    const Tensor of_bias = bias ? small_numbers({n}, 4) : Tensor();
    multiply(d, oriented(left, transpose_a), oriented(right, transpose_b),
             {.alpha = 0.5, .accumulate = accumulate, .bias = of_bias});
    const F32MathScope scope(F32Math::tf32);
    const Tensor left_gpu = left.to(gpu()), right_gpu = right.to(gpu());
    const MultiplyOptions options{
        .alpha = 0.5, .accumulate = accumulate, .bias = bias ? of_bias.to(gpu()) : Tensor()};
    for (const Tensor& result : {on_gpu, again})
      multiply(result, oriented(left_gpu, transpose_a), oriented(right_gpu, transpose_b), options);
    const auto got = on_gpu.to_vector<float>(), want = d.to_vector<float>();
    EXPECT_EQ(got, again.to_vector<float>()) << "another result each time";
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_EQ(got[i], want[i]) << a << (transpose_a ? "^T " : " ") << b << (transpose_b ? "^T" : "")
                                 << " element " << i;
    // Operands are as they were, pads aside.
    EXPECT_EQ(left_gpu.to_vector<float>(), left.to_vector<float>());
    EXPECT_EQ(right_gpu.to_vector<float>(), right.to_vector<float>());
  }
};

TEST_F(GemmTf32Cuda, OddExtentsAreExactInEveryOrientation) {
  for (const int row : {-1, 0, 1}) {
    std::optional<ForceVariant> force;
    if (row >= 0) force.emplace("gemm", gemm_variants()[size_t(row)]);
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{333, 171, 129}, {70, 67, 1365}, {129, 1365, 66}})
      for (const int flags : {0, 1, 2, 3}) {
        const bool ta = flags & 1, tb = flags & 2;
        expect_exact(ta ? Shape{k, m} : Shape{m, k}, ta, tb ? Shape{n, k} : Shape{k, n}, tb, flags == 1,
                     flags == 2);
      }
  }
}

/// dx = dy W with rows enough that a transposed copy of W pays.
TEST_F(GemmTf32Cuda, ATransposedWeightIsExact) {
  expect_exact({16000, 1365}, false, {1365, 512}, false);
  expect_exact({16001, 512}, false, {512, 1365}, false, true);
  expect_exact({16000, 700}, false, {700, 1000}, false, false, true);
}

/// dW = dy^T x whose tiles leave the last wave of SMs half empty.
TEST_F(GemmTf32Cuda, PartsOfKAreExact) {
  expect_exact({8192, 1536}, true, {8192, 1500}, false);
  expect_exact({8192, 1530}, true, {8192, 1536}, false, true);
}

}  // namespace
}  // namespace tessera::ops
