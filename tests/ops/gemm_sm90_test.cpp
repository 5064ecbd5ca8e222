#include "ops/matmul/gemm_sm90_plan.h"

#include <gtest/gtest.h>

#include <limits>

#include "ops/linear/linear.h"
#include "runtime/tuning.h"
#include "tests/ops/guarded.h"

/// The kernels of the row "wgmma", each tile by itself. Everything is made of small integers, so that sums
/// are exact in f32 and the plain loops are the only right answer. Pads and neighbours hold NaN.

namespace tessera::ops {
namespace {

class GemmSm90Cuda : public GuardedCuda<9> {
 protected:
  /// A build without CUDA has no kernels, and skips.
  static void product(const Gemm& g, const ProductChoice& choice, DType dtype) {
    if constexpr (kCuda) {
      if (dtype == DType::bf16)
        product_sm90<bf16>(g, choice, gpu());
      else
        product_sm90<f16>(g, choice, gpu());
    }
  }
  /// On a 16-byte boundary, with a frame of `around` where pads would be.
  static Tensor framed(const Tensor& x, DType dtype, double around, Tensor& frame) {
    const int64_t columns = x.size(-1);
    frame = Tensor::full(x.shape().with(-1, (columns + 7) / 8 * 8 + 16), around, dtype, gpu());
    Tensor y = frame.slice(-1, 8, 8 + columns);
    y.copy_from(x);
    return y;
  }
};

struct Problem {
  int64_t m, n, k, batch;
};

Tensor filled_with_nan(const Shape& shape) {
  const Tensor x = Tensor::empty_packed(shape, DType::f32, Device::cuda(0));
  x.fill(std::numeric_limits<double>::quiet_NaN());
  return x;
}

/// Of a [k, m], exact for small integers.
std::vector<float> sums_over_k(const Tensor& a) {
  const auto values = a.to_vector<float>();
  std::vector<float> sums(size_t(a.size(1)));
  for (size_t i = 0; i < values.size(); ++i) sums[i % sums.size()] += values[i];
  return sums;
}

TEST_F(GemmSm90Cuda, EveryTileIsExactAtEveryEdge) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  int number = 0;
  for (int tile = 0; tile < int(std::size(kProductTiles)); ++tile)
    for (const Problem& p : {Problem{1, 1, 1, 1},
                             {33, 72, 129, 1},
                             {129, 257, 64, 1},
                             {600, 200, 520, 1},
                             {70, 40, 200, 3},
                             {257, 385, 77, 2}})
      for (const int flags : {0, 1, 2, 3})
        for (const int splits : {1, 3})
          for (const bool accumulate : {false, true}) {
            const bool ta = flags & 1, tb = flags & 2, wide = ++number % 3 == 0;
            const DType dtype = number % 2 ? DType::bf16 : DType::f16, out = wide ? DType::f32 : dtype;
            const Tensor a = numbers(ta ? Shape{p.batch, p.k, p.m} : Shape{p.batch, p.m, p.k}, 1),
                         b = numbers(tb ? Shape{p.batch, p.n, p.k} : Shape{p.batch, p.k, p.n}, 2),
                         d = numbers({p.batch, p.m, p.n}, 3), bias = numbers({p.n}, 4);
            Tensor frame_a, frame_b, frame_d;
            const Tensor left = framed(a, dtype, nan, frame_a), right = framed(b, dtype, nan, frame_b),
                         result = framed(d, out, 77, frame_d), addends = bias.to(dtype).to(gpu());
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
            ASSERT_EQ(gemm_sm90_lacks(g, gpu()), "");
            ProductChoice choice = choose_product(g, gpu().card().multiprocessors, tile);
            const int64_t blocks = (p.k + 63) / 64, depth = (blocks + splits - 1) / splits;
            choice.splits = int((blocks + depth - 1) / depth);
            choice.by_threads = choice.by_threads || choice.splits > 1;
            if (choice.seconds == 0 || (choice.by_threads && !kProductTiles[tile].by_threads))
              continue;  // no tile for such a d
            const Tensor sums = filled_with_nan({p.m});
            if (gemm_sm90_sums(g)) g.sums = sums.data<float>();
            product(g, choice, dtype);
            multiply(d, ta ? a.transpose(1, 2) : a, tb ? b.transpose(1, 2) : b,
                     {.alpha = 2, .accumulate = accumulate, .bias = accumulate ? Tensor() : bias});
            ASSERT_EQ(result.to_vector<double>(), d.to(out).to_vector<double>())
                << "tile " << tile << ": " << p.m << " " << p.n << " " << p.k << " x" << p.batch << " flags "
                << flags << " splits " << choice.splits << " accumulate " << accumulate << " " << dtype
                << " to " << out;
            const auto values = frame_d.to_vector<double>();
            const int64_t width = frame_d.size(-1);
            for (int64_t i = 0; i < int64_t(values.size()); ++i)
              if (i % width < 8 || i % width >= 8 + p.n)
                ASSERT_EQ(values[size_t(i)], 77) << "a neighbour of d was overwritten: " << i;
            ASSERT_EQ(g.sums != nullptr, ta && !tb && wide && p.batch == 1);
            if (g.sums)
              ASSERT_EQ(sums.to_vector<float>(), sums_over_k(a.reshape({p.k, p.m})))
                  << "tile " << tile << ": " << p.m << " " << p.n << " " << p.k << " splits "
                  << choice.splits;
          }
}

TEST_F(GemmSm90Cuda, ManyShortTilesFollowEachOther) {
  // One block of k and a dozen tiles a block, so that a tile's sums are ready while the last one's still
  // leave.
  const int64_t m = 101003, n = 40, k = 27;
  const Tensor a = numbers({m, k}, 1), b = numbers({n, k}, 2);
  Tensor frame_a, frame_b, frame_d;
  const Tensor left = framed(a, DType::bf16, 77, frame_a), right = framed(b, DType::bf16, 77, frame_b);
  for (int tile = 0; tile < int(std::size(kProductTiles)); ++tile)
    for (const bool accumulate : {false, true}) {
      const Tensor d = numbers({m, n}, 3), result = framed(d, DType::bf16, 77, frame_d);
      Gemm g{.m = m, .n = n, .k = k, .in = DType::bf16, .out = DType::bf16, .transpose_b = true};
      g.a = left.raw(), g.b = right.raw(), g.d = result.raw();
      g.lda = left.layout().stride(0), g.ldb = right.layout().stride(0), g.ldd = result.layout().stride(0);
      g.beta = accumulate ? 1 : 0;
      const ProductChoice choice = choose_product(g, gpu().card().multiprocessors, tile);
      if (choice.seconds == 0) continue;  // no tile for such a d
      product(g, choice, DType::bf16);
      multiply(d, a, b.transpose(0, 1), {.accumulate = accumulate});
      ASSERT_EQ(result.to_vector<float>(), d.to(DType::bf16).to_vector<float>())
          << "tile " << tile << ", accumulate " << accumulate;
    }
}

TEST_F(GemmSm90Cuda, LargeProductsRepeatAndAgreeWithPlainLoops) {
  // Enough tiles for several turns of every block, in long and short k.
  for (const Problem& p : {Problem{3000, 1365, 70, 1}, {300, 520, 9000, 1}}) {
    const Tensor a = numbers({p.m, p.k}, 1), b = numbers({p.n, p.k}, 2);
    const Tensor want = Tensor::empty({p.m, p.n}, DType::f32, Device::cpu());
    multiply(want, a, b.transpose(0, 1));
    const Tensor left = a.to(DType::bf16).to(gpu()), right = b.to(DType::bf16).to(gpu());
    const tuning::ForceRow force("gemm", int(GemmRow::wgmma));
    for (int run = 0; run < 3; ++run) {
      const Tensor d = Tensor::empty({p.m, p.n}, DType::f32, gpu());
      d.fill(std::numeric_limits<double>::quiet_NaN());
      multiply(d, left, right.transpose(0, 1));
      ASSERT_EQ(d.to_vector<float>(), want.to_vector<float>())
          << p.m << " " << p.n << " " << p.k << " " << run;
    }
  }
}

TEST_F(GemmSm90Cuda, PartsOfKMeetInManyRounds) {
  // More pieces than run at once: parts of a tile must come in the same round, and leave their counters at 0
  // for the next launch, whose number of parts is another.
  const int64_t m = 1700, n = 1500, k = 4000;
  const Tensor a = numbers({m, k}, 1), b = numbers({n, k}, 2);
  const Tensor want = Tensor::empty({m, n}, DType::f32, Device::cpu());
  multiply(want, a, b.transpose(0, 1));
  // Operands as those of a weight's gradient lie, which every tile takes.
  const Tensor left = a.transpose(0, 1).clone().to(DType::bf16).to(gpu()),
               right = b.transpose(0, 1).clone().to(DType::bf16).to(gpu());
  const Tensor d = Tensor::empty({m, n}, DType::f32, gpu());
  Gemm g{.m = m, .n = n, .k = k, .in = DType::bf16, .out = DType::f32, .transpose_a = true};
  g.a = left.raw(), g.b = right.raw(), g.d = d.raw();
  g.lda = left.layout().stride(0), g.ldb = right.layout().stride(0), g.ldd = d.layout().stride(0);
  const auto want_sums = sums_over_k(a.transpose(0, 1).clone());
  for (int tile = 0; tile < int(std::size(kProductTiles)); ++tile) {
    if (!kProductTiles[tile].by_threads) continue;
    for (int run = 0; run < 12; ++run) {
      d.fill(std::numeric_limits<double>::quiet_NaN());
      const Tensor sums = filled_with_nan({m});  // asked for in all runs but every third
      g.sums = run % 3 == 2 ? nullptr : sums.data<float>();
      // Every other run splits only what does not fill a round.
      const ProductTileShape& shape = kProductTiles[tile];
      const int rows = shape.rows * shape.down(), columns = shape.columns * shape.side();
      const int splits = run % 2 ? 7 : 21;
      const int tiles = int((m + rows - 1) / rows * ((n + columns - 1) / columns));
      const int slots = gpu().card().multiprocessors / shape.cluster, grid = slots - slots % splits;
      const int whole = run / 2 % 2 ? tiles / grid * grid : 0;
      product(g, {.tile = tile, .splits = splits, .whole = whole, .by_threads = true}, DType::bf16);
      if (run % 4 == 3 || run == 1)
        ASSERT_EQ(d.to_vector<float>(), want.to_vector<float>()) << "tile " << tile << ", run " << run;
      if (g.sums) ASSERT_EQ(sums.to_vector<float>(), want_sums) << "tile " << tile << ", run " << run;
    }
  }
}

TEST_F(GemmSm90Cuda, TheRowSaysWhatItNeeds) {
  const tuning::ForceRow force("linear", int(GemmRow::wgmma));
  const Tensor x = Tensor::full({4, 9}, 1, DType::bf16, gpu()),
               weight = Tensor::full({8, 9}, 1, DType::bf16, gpu());
  EXPECT_NO_THROW(linear(x, weight));
  const Tensor packed = Tensor::empty_packed({4, 9}, DType::bf16, gpu());
  packed.fill(1);
  for (const auto& run : {std::pair{packed, weight}, {x.to(DType::f32), weight.to(DType::f32)}}) {
    try {
      linear(run.first, run.second);
      FAIL() << "it took " << run.first.dtype();
    } catch (const Error& error) {
      EXPECT_NE(std::string_view(error.what()).find("row wgmma needs"), std::string_view::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera::ops
