#include "ops/gemm/gemm_narrow.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "ops/linear/linear_kernels.h"
#include "runtime/has_cuda.h"
#include "tests/ops/framed_gemm.h"

/// The kernels of the row "narrow", each tile by itself. Everything is made of small integers, so that sums
/// are exact in f32 and the plain loops are the only right answer. Neighbours hold NaN.

namespace tessera::ops {
namespace {

class GemmNarrowCuda : public GuardedCuda<0> {
 protected:
  /// A build without CUDA has no kernels, and skips.
  static void product(const Gemm& g, const NarrowChoice& choice, bool mma) {
    if constexpr (kCuda) {
      if (!mma)
        dispatch_floating_cuda(g.in, "gemm", [&]<class T>() { narrow_cuda<T>(g, choice, gpu()); });
      else if (g.in == DType::bf16)
        narrow_mma_cuda<bf16>(g, choice, gpu());
      else
        narrow_mma_cuda<f16>(g, choice, gpu());
    }
  }
};

class GemmNarrowTiles : public GemmNarrowCuda, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(, GemmNarrowTiles, ::testing::Bool(),
                         [](const auto& mma) { return mma.param ? "TensorCores" : "MultiplyAdds"; });

TEST_P(GemmNarrowTiles, AreExactAtEveryEdge) {
  const bool mma = GetParam();
  const Gpu on(gpu());
  int number = 0;
  const int tiles = int(mma ? std::size(kNarrowMmaTiles) : std::size(kNarrowTiles));
  for (int tile = 0; tile < tiles; ++tile)
    for (const GemmExtents& size : {GemmExtents{1, 1, 1},
                                    {5, 3, 2645},
                                    {33, 72, 129},
                                    {129, 9, 70},
                                    {7, 300, 520},
                                    {70, 40, 5, 3},
                                    {2, 130, 1000, 2}})
      for (const int flags : {0, 1, 2, 3})
        for (const int splits : {1, 3, 40})
          for (const bool accumulate : {false, true}) {
            const bool wide = ++number % 3 == 0;
            const DType dtype =
                std::array{DType::bf16, DType::f16, DType::f32}[size_t(number % 7 % (mma ? 2 : 3))];
            const FramedGemm p(size, flags & 1, flags & 2, dtype, wide ? DType::f32 : dtype, accumulate,
                               number % 5 < 3 ? 0 : 1);
            ASSERT_EQ(gemm_narrow_lacks(p.gemm), "");
            NarrowChoice choice = mma ? choose_narrow_mma(p.gemm, on, tile) : choose_narrow(p.gemm, on, tile);
            if (mma || tile > 0) choice.splits = splits, choice.group = (splits + 6) / 7;
            product(p.gemm, choice, mma);
            ASSERT_TRUE(p.is_exact()) << "tile " << tile << ", splits " << splits;
          }
}

TEST_F(GemmNarrowCuda, FewTermsAreExactAtEveryEdge) {
  const Gpu on(gpu());
  int number = 0;
  for (const GemmExtents& size : {GemmExtents{1, 1, 1},
                                  {33, 72, 3},
                                  {300, 97, 16},
                                  {129, 33, 17, 2},
                                  {17, 805, 8, 3},
                                  {1100, 40, 31},
                                  {260, 420, 32}})
    for (const int flags : {0, 1, 2, 3})
      for (const bool wide : {false, true})
        for (const bool accumulate : {false, true})
          for (const int shift : {0, 1}) {
            const DType dtype = ++number % 5 < 3 ? DType::bf16 : DType::f16;
            const FramedGemm p(size, flags & 1, flags & 2, dtype, wide ? DType::f32 : dtype, accumulate,
                               shift);
            NarrowChoice choice = choose_narrow_mma(p.gemm, on, kNarrowTerms);
            if (number % 3 == 0) choice.rows = 256, choice.columns = 64;  // several rounds, several ranges
            choice.staged = number % 7 < 4;
            product(p.gemm, choice, true);
            ASSERT_TRUE(p.is_exact())
                << "blocks of " << choice.rows << " x " << choice.columns << ", staged " << choice.staged;
          }
}

TEST_F(GemmNarrowCuda, LongSumsRepeatAndAgreeWithPlainLoops) {
  // Parts in groups, many tiles, rows that are dense and odd.
  for (const GemmExtents& p :
       {GemmExtents{5, 3, 200003}, {7, 1365, 9000}, {30011, 3, 5}, {5003, 700, 9}, {3, 5000, 300, 2}}) {
    const Tensor a = small_numbers({p.batch, p.k, p.m}, 1), b = small_numbers({p.batch, p.k, p.n}, 2);
    const Tensor want = Tensor::empty({p.batch, p.m, p.n}, DType::f32, Device::cpu());
    multiply(want, a.transpose(1, 2), b);
    const ForceVariant force("gemm", "narrow");
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const Tensor left = a.to(dtype).to(gpu()), right = b.to(dtype).to(gpu());
      for (int run = 0; run < 3; ++run) {
        const Tensor d = Tensor::empty({p.batch, p.m, p.n}, DType::f32, gpu());
        d.fill(std::numeric_limits<double>::quiet_NaN());
        multiply(d, left.transpose(1, 2), right);
        ASSERT_EQ(d.to_vector<float>(), want.to_vector<float>())
            << p.m << " " << p.n << " " << p.k << " " << run;
      }
    }
  }
}

TEST_F(GemmNarrowCuda, ResidualsAndBiasesAreRoundedOnce) {
  // 256 + 1 + 1 in bf16: 257 is not a bf16, and what is rounded twice gives 256.
  const Tensor x = Tensor::full({40, 1}, 16, DType::bf16, gpu()),
               weight = Tensor::full({1, 24}, 16, DType::bf16, gpu()),
               one = Tensor::full({24}, 1, DType::bf16, gpu()),
               residual = Tensor::full({40, 24}, 1, DType::bf16, gpu());
  const ForceVariant force("gemm", "narrow");
  const Tensor y = Tensor::empty({40, 24}, DType::bf16, gpu());
  multiply(y, x, weight, {.bias = one, .residual = residual});
  for (const double value : y.to_vector<double>()) ASSERT_EQ(value, 258);
}

TEST_F(GemmNarrowCuda, ColumnSumsAreProductsWithOnes) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const auto& [rows, groups, columns] :
         {std::array<int64_t, 3>{1, 1, 1}, {3000, 1, 5}, {77, 3, 130}, {5000, 2, 40}, {9, 1, 3000}}) {
      const Tensor x = small_numbers({rows, groups, columns}, 1), on_gpu = x.to(dtype).to(gpu());
      const auto want = column_sums(x, true).to_vector<float>();
      ASSERT_EQ(column_sums(on_gpu, true).to_vector<float>(), want)
          << rows << " " << groups << " " << columns;
    }
}

}  // namespace
}  // namespace tessera::ops
