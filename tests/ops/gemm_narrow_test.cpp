#include "ops/matmul/gemm_narrow.h"

#include <gtest/gtest.h>

#include <limits>

#include "ops/linear/linear_kernels.h"
#include "runtime/tuning.h"
#include "tests/ops/guarded.h"

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
  /// A copy with a frame of `around`: `shift` elements off a 16-byte boundary, rows of pitches that are whole
  /// packs only if shift is 0.
  static Tensor framed(const Tensor& x, DType dtype, int shift, double around, Tensor& frame) {
    const int64_t columns = x.size(-1);
    frame = Tensor::full(x.shape().with(-1, (columns + 7) / 8 * 8 + 24 + shift), around, dtype, gpu());
    Tensor packed = Tensor::empty_packed(frame.shape(), dtype, gpu());
    packed.copy_from(frame);
    frame = packed;
    Tensor y = frame.slice(-1, 8 + shift, 8 + shift + columns);
    y.copy_from(x);
    return y;
  }
};

struct Problem {
  int64_t m, n, k, batch;
};

class GemmNarrowTiles : public GemmNarrowCuda, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(, GemmNarrowTiles, ::testing::Bool(),
                         [](const auto& mma) { return mma.param ? "TensorCores" : "MultiplyAdds"; });

TEST_P(GemmNarrowTiles, AreExactAtEveryEdge) {
  const bool mma = GetParam();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  int number = 0;
  const int tiles = int(mma ? std::size(kNarrowMmaTiles) : std::size(kNarrowTiles));
  for (int tile = 0; tile < tiles; ++tile)
    for (const Problem& p : {Problem{1, 1, 1, 1},
                             {5, 3, 2645, 1},
                             {33, 72, 129, 1},
                             {129, 9, 70, 1},
                             {7, 300, 520, 1},
                             {70, 40, 5, 3},
                             {2, 130, 1000, 2}})
      for (const int flags : {0, 1, 2, 3})
        for (const int splits : {1, 3, 40})
          for (const bool accumulate : {false, true}) {
            const bool ta = flags & 1, tb = flags & 2, wide = ++number % 3 == 0;
            const DType dtype =
                std::array{DType::bf16, DType::f16, DType::f32}[size_t(number % 7 % (mma ? 2 : 3))];
            const DType out = wide ? DType::f32 : dtype;
            const int shift = number % 5 < 3 ? 0 : 1;
            const Tensor a = numbers(ta ? Shape{p.batch, p.k, p.m} : Shape{p.batch, p.m, p.k}, 1),
                         b = numbers(tb ? Shape{p.batch, p.n, p.k} : Shape{p.batch, p.k, p.n}, 2),
                         d = numbers({p.batch, p.m, p.n}, 3), bias = numbers({p.n}, 4);
            Tensor frame_a, frame_b, frame_d;
            const Tensor left = framed(a, dtype, shift, nan, frame_a),
                         right = framed(b, dtype, shift, nan, frame_b),
                         result = framed(d, out, shift, 77, frame_d), addends = bias.to(dtype).to(gpu());
            if (!accumulate) result.fill(nan);
            Gemm g{.m = p.m, .n = p.n, .k = p.k, .batch = p.batch, .in = dtype, .out = out};
            g.transpose_a = ta, g.transpose_b = tb;
            g.a = left.raw(), g.b = right.raw(), g.d = result.raw();
            g.lda = left.layout().stride(1), g.ldb = right.layout().stride(1),
            g.ldd = result.layout().stride(1);
            g.stride_a = left.layout().stride(0), g.stride_b = right.layout().stride(0);
            g.stride_d = result.layout().stride(0);
            g.alpha = 2, g.beta = accumulate ? 1 : 0;
            if (!accumulate) g.bias = addends.raw();
            ASSERT_EQ(gemm_narrow_lacks(g), "");
            const int multiprocessors = gpu().card().multiprocessors;
            NarrowChoice choice =
                mma ? choose_narrow_mma(g, multiprocessors, tile) : choose_narrow(g, multiprocessors, tile);
            if (mma || tile > 0) choice.splits = splits, choice.group = (splits + 6) / 7;
            product(g, choice, mma);
            multiply(d, ta ? a.transpose(1, 2) : a, tb ? b.transpose(1, 2) : b,
                     {.alpha = 2, .accumulate = accumulate, .bias = accumulate ? Tensor() : bias});
            ASSERT_EQ(result.to_vector<double>(), d.to(out).to_vector<double>())
                << "tile " << tile << ": " << p.m << " " << p.n << " " << p.k << " x" << p.batch << " flags "
                << flags << " splits " << splits << " shift " << shift << " accumulate " << accumulate << " "
                << dtype << " to " << out;
            const auto values = frame_d.to_vector<double>();
            const int64_t width = frame_d.size(-1);
            for (int64_t i = 0; i < int64_t(values.size()); ++i)
              if (i % width < 8 + shift || i % width >= 8 + shift + p.n)
                ASSERT_EQ(values[size_t(i)], 77) << "a neighbour of d was overwritten: " << i;
          }
}

TEST_F(GemmNarrowCuda, LongSumsRepeatAndAgreeWithPlainLoops) {
  // Parts in groups, many tiles, rows that are dense and odd.
  for (const Problem& p :
       {Problem{5, 3, 200003, 1}, {7, 1365, 9000, 1}, {30011, 3, 5, 1}, {3, 5000, 300, 2}}) {
    const Tensor a = numbers({p.batch, p.k, p.m}, 1), b = numbers({p.batch, p.k, p.n}, 2);
    const Tensor want = Tensor::empty({p.batch, p.m, p.n}, DType::f32, Device::cpu());
    multiply(want, a.transpose(1, 2), b);
    const tuning::ForceRow force("gemm", int(GemmRow::narrow));
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
  const tuning::ForceRow force("gemm", int(GemmRow::narrow));
  const Tensor y = Tensor::empty({40, 24}, DType::bf16, gpu());
  multiply(y, x, weight, {.bias = one, .residual = residual});
  for (const double value : y.to_vector<double>()) ASSERT_EQ(value, 258);
}

TEST_F(GemmNarrowCuda, ColumnSumsAreProductsWithOnes) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const auto& [rows, groups, columns] :
         {std::array<int64_t, 3>{1, 1, 1}, {3000, 1, 5}, {77, 3, 130}, {5000, 2, 40}, {9, 1, 3000}}) {
      const Tensor x = numbers({rows, groups, columns}, 1), on_gpu = x.to(dtype).to(gpu());
      const auto want = column_sums(x, true).to_vector<float>();
      ASSERT_EQ(column_sums(on_gpu, true).to_vector<float>(), want)
          << rows << " " << groups << " " << columns;
    }
}

}  // namespace
}  // namespace tessera::ops
