#include "ops/gemm/gemm_sm90_plan.h"

#include <gtest/gtest.h>

#include <limits>

#include "ops/linear/linear.h"
#include "ops/linear/linear_activation.h"
#include "ops/linear/linear_swiglu.h"
#include "ops/mlp/mlp.h"
#include "runtime/has_cuda.h"
#include "runtime/stream_scope.h"
#include "tests/ops/framed_gemm.h"

/// The kernels of variant "wgmma", each tile by itself. Everything is made of small integers, so that sums
/// are exact in f32 and the plain loops are the only right answer. Pads and neighbours hold NaN.

namespace tessera::ops {
namespace {

class GemmSm90Cuda : public GemmKernelsCuda {};

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
  int number = 0;
  for (int tile = 0; tile < int(std::size(kGemmTiles)); ++tile)
    for (const GemmExtents& size : {GemmExtents{1, 1, 1},
                                    {33, 72, 129},
                                    {129, 257, 64},
                                    {600, 200, 520},
                                    {70, 40, 200, 3},
                                    {257, 385, 77, 2}})
      for (const int flags : {0, 1, 2, 3})
        for (const int splits : {1, 3})
          for (const bool accumulate : {false, true}) {
            const bool ta = flags & 1, tb = flags & 2, wide = ++number % 3 == 0;
            const DType dtype = number % 2 ? DType::bf16 : DType::f16;
            FramedGemm p(size, ta, tb, dtype, wide ? DType::f32 : dtype, accumulate);
            Gemm& g = p.gemm;
            ASSERT_EQ(gemm_sm90_lacks(g, Gpu(gpu())), "");
            GemmChoice choice = choose_gemm(g, Gpu(gpu()), tile);
            const int64_t blocks = (g.k + 63) / 64, depth = (blocks + splits - 1) / splits;
            choice.splits = int((blocks + depth - 1) / depth);
            choice.by_threads = choice.by_threads || choice.splits > 1;
            if (choice.seconds == 0 || (choice.by_threads && !kGemmTiles[tile].by_threads))
              continue;  // no tile for such a d
            const Tensor sums = filled_with_nan({g.m});
            if (gemm_sm90_sums(g)) g.sums = sums.data<float>();
            product(g, choice);
            ASSERT_TRUE(p.is_exact()) << "tile " << tile << ", splits " << choice.splits;
            ASSERT_EQ(g.sums != nullptr, ta && !tb && wide && g.batch == 1);
            if (g.sums)
              ASSERT_EQ(sums.to_vector<float>(), sums_over_k(p.a.reshape({g.k, g.m})))
                  << "tile " << tile << ": " << g.m << " " << g.n << " " << g.k << " splits "
                  << choice.splits;
          }
}

TEST_F(GemmSm90Cuda, FusedOperatorsRunOnAStreamOfOneSm) {
  // 100 tiles, so many that clusters of two pay where they fit. Sums are exact: any number of SMs gives the
  // same bits.
  const Tensor x = small_numbers({1280, 64}, 1).to(DType::bf16).to(gpu()),
               weight = small_numbers({1280, 64}, 2).to(DType::bf16).to(gpu()),
               down = small_numbers({72, 1280}, 3).to(DType::bf16).to(gpu());
  const ForceVariant activation("linear_activation", "epilogue"), swiglu("linear_swiglu", "epilogue");
  const auto run = [&] {
    std::vector<std::vector<float>> values;
    for (const Tensor& y : {linear_activation(x, weight, Activation::relu).y, linear_swiglu(x, weight),
                            mlp(x, weight, down, Activation::relu)})
      values.push_back(y.to_vector<float>());
    return values;
  };
  const auto want = run();
  const StreamScope scope(gpu(), gpu().stream(), {.multiprocessors = 1});
  EXPECT_EQ(run(), want);
}

TEST_F(GemmSm90Cuda, ManyShortTilesFollowEachOther) {
  // One block of k and a dozen tiles a block, so that a tile's sums are ready while the last one's still
  // leave.
  const int64_t m = 101003, n = 40, k = 27;
  const Tensor a = small_numbers({m, k}, 1), b = small_numbers({n, k}, 2);
  Tensor frame_a, frame_b, frame_d;
  const Tensor left = framed(a, DType::bf16, 77, frame_a), right = framed(b, DType::bf16, 77, frame_b);
  for (int tile = 0; tile < int(std::size(kGemmTiles)); ++tile)
    for (const bool accumulate : {false, true}) {
      const Tensor d = small_numbers({m, n}, 3), result = framed(d, DType::bf16, 77, frame_d);
      Gemm g{.m = m, .n = n, .k = k, .in = DType::bf16, .out = DType::bf16, .transpose_b = true};
      g.a = left.raw(), g.b = right.raw(), g.d = result.raw();
      g.lda = left.layout().stride(0), g.ldb = right.layout().stride(0), g.ldd = result.layout().stride(0);
      g.beta = accumulate ? 1 : 0;
      const GemmChoice choice = choose_gemm(g, Gpu(gpu()), tile);
      if (choice.seconds == 0) continue;  // no tile for such a d
      product(g, choice);
      multiply(d, a, b.transpose(0, 1), {.accumulate = accumulate});
      ASSERT_EQ(result.to_vector<float>(), d.to(DType::bf16).to_vector<float>())
          << "tile " << tile << ", accumulate " << accumulate;
    }
}

TEST_F(GemmSm90Cuda, LargeProductsRepeatAndAgreeWithPlainLoops) {
  // Enough tiles for several turns of every block, in long and short k.
  for (const GemmExtents& p : {GemmExtents{3000, 1365, 70}, {300, 520, 9000}}) {
    const Tensor a = small_numbers({p.m, p.k}, 1), b = small_numbers({p.n, p.k}, 2);
    const Tensor want = Tensor::empty({p.m, p.n}, DType::f32, Device::cpu());
    multiply(want, a, b.transpose(0, 1));
    const Tensor left = a.to(DType::bf16).to(gpu()), right = b.to(DType::bf16).to(gpu());
    const ForceVariant force("gemm", "wgmma");
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
  const Tensor a = small_numbers({m, k}, 1), b = small_numbers({n, k}, 2);
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
  for (int tile = 0; tile < int(std::size(kGemmTiles)); ++tile) {
    if (!kGemmTiles[tile].by_threads) continue;
    for (int run = 0; run < 12; ++run) {
      d.fill(std::numeric_limits<double>::quiet_NaN());
      const Tensor sums = filled_with_nan({m});  // asked for in all runs but every third
      g.sums = run % 3 == 2 ? nullptr : sums.data<float>();
      // Every other run splits only what does not fill a round.
      const GemmTileShape& shape = kGemmTiles[tile];
      const int rows = shape.rows * shape.cluster_m(), columns = shape.columns * shape.cluster_n();
      const int splits = run % 2 ? 7 : 21;
      const int tiles = int((m + rows - 1) / rows * ((n + columns - 1) / columns));
      const int slots = gpu().multiprocessors() / shape.cluster, grid = slots - slots % splits;
      const int whole = run / 2 % 2 ? tiles / grid * grid : 0;
      product(g, {.tile = tile, .splits = splits, .whole = whole, .by_threads = true});
      if (run % 4 == 3 || run == 1)
        ASSERT_EQ(d.to_vector<float>(), want.to_vector<float>()) << "tile " << tile << ", run " << run;
      if (g.sums) ASSERT_EQ(sums.to_vector<float>(), want_sums) << "tile " << tile << ", run " << run;
    }
  }
}

TEST_F(GemmSm90Cuda, SumsAreExactWhereSomeTilesOfARowAreSplit) {
  // The first round of tiles is whole and ends within rows of tiles, whose other tiles are split: those that
  // take turns at a row's sums do not have the same parts of k.
  const int64_t m = 6000, n = 400, k = 1088;
  const Tensor a = small_numbers({k, m}, 1), b = small_numbers({k, n}, 2);
  const Tensor want = Tensor::empty({m, n}, DType::f32, Device::cpu());
  multiply(want, a.transpose(0, 1), b);
  const auto want_d = want.to_vector<float>(), want_sums = sums_over_k(a);
  const Tensor left = a.to(DType::bf16).to(gpu()), right = b.to(DType::bf16).to(gpu());
  for (int tile = 0; tile < int(std::size(kGemmTiles)); ++tile) {
    const GemmTileShape& shape = kGemmTiles[tile];
    if (!shape.by_threads) continue;
    for (const int splits : {2, 3, 4, 6}) {
      const int64_t rows = shape.rows * shape.cluster_m(), columns = shape.columns * shape.cluster_n();
      const int64_t tiles = (m + rows - 1) / rows * ((n + columns - 1) / columns);
      const int64_t slots = gpu().multiprocessors() / shape.cluster, grid = slots - slots % splits;
      const Tensor d = filled_with_nan({m, n}), sums = filled_with_nan({m});
      Gemm g{.m = m, .n = n, .k = k, .in = DType::bf16, .out = DType::f32, .transpose_a = true};
      g.a = left.raw(), g.b = right.raw(), g.d = d.raw(), g.sums = sums.data<float>();
      g.lda = left.layout().stride(0), g.ldb = right.layout().stride(0), g.ldd = d.layout().stride(0);
      product(g, {.tile = tile, .splits = splits, .whole = int(tiles / grid * grid), .by_threads = true});
      ASSERT_EQ(d.to_vector<float>(), want_d) << "tile " << tile << ", splits " << splits;
      ASSERT_EQ(sums.to_vector<float>(), want_sums) << "tile " << tile << ", splits " << splits;
    }
  }
}

TEST_F(GemmSm90Cuda, SumsOfProductsAreExactInWholeTilesAndInParts) {
  // Pairs of matrices in frames of NaN, each k an edge of its own; b may stand still.
  const int64_t terms = 3;
  for (int tile = 0; tile < int(std::size(kGemmTiles)); ++tile)
    for (const GemmExtents& size : {GemmExtents{33, 72, 129}, {300, 200, 21}, {129, 264, 200}})
      for (const int flags : {0, 1, 2, 3})
        for (const int splits : {1, 2, 5})
          for (const bool same_b : {false, true}) {
            const bool ta = flags & 1, tb = flags & 2, wide = splits == 5;
            const auto [m, n, k, batch] = size;
            const Tensor a = small_numbers(ta ? Shape{terms, k, m} : Shape{terms, m, k}, 1),
                         b = small_numbers(
                             tb ? Shape{same_b ? 1 : terms, n, k} : Shape{same_b ? 1 : terms, k, n}, 2);
            const Tensor want = Tensor::empty({m, n}, DType::f32, Device::cpu());
            for (int64_t t = 0; t < terms; ++t) {
              const Tensor left = a.select(0, t), right = b.select(0, same_b ? 0 : t);
              multiply(want, ta ? left.transpose(0, 1) : left, tb ? right.transpose(0, 1) : right,
                       {.accumulate = t > 0});
            }
            Tensor frame_a, frame_b, frame_d;
            const double nan = std::numeric_limits<double>::quiet_NaN();
            const Tensor left = framed(a, DType::bf16, nan, frame_a),
                         right = framed(b, DType::bf16, nan, frame_b),
                         result = framed(want, wide ? DType::f32 : DType::bf16, 77, frame_d);
            result.fill(nan);
            Gemm g{.m = m, .n = n, .k = k, .terms = terms, .in = DType::bf16, .out = result.dtype()};
            g.transpose_a = ta, g.transpose_b = tb;
            g.a = left.raw(), g.b = right.raw(), g.d = result.raw();
            g.lda = left.layout().stride(1), g.ldb = right.layout().stride(1);
            g.ldd = result.layout().stride(0);
            g.stride_a = left.layout().stride(0), g.stride_b = same_b ? 0 : right.layout().stride(0);
            ASSERT_EQ(gemm_sm90_lacks(g, Gpu(gpu())), "");
            GemmChoice choice = choose_gemm(g, Gpu(gpu()), tile);
            const int64_t blocks = terms * ((k + 63) / 64), depth = (blocks + splits - 1) / splits;
            choice.splits = int((blocks + depth - 1) / depth), choice.whole = 0;
            choice.by_threads = choice.by_threads || choice.splits > 1;
            if (choice.seconds == 0 || (choice.by_threads && !kGemmTiles[tile].by_threads))
              continue;  // no tile for such a d
            product(g, choice);
            ASSERT_EQ(result.to_vector<float>(), want.to(result.dtype()).to_vector<float>())
                << "tile " << tile << ": " << m << " " << n << " " << k << ", transposed " << ta << tb
                << ", splits " << choice.splits << (same_b ? ", one b" : "");
          }
}

TEST_F(GemmSm90Cuda, PairsOfGradientsAreExactAtEveryEdge) {
  // d = a^T b [m, n], and e^T = f^T g: e [n, m]. In one part and in several, added to what is there or not,
  // with the sums of a's and g's columns or without.
  int number = 0;
  for (const int tile : kPairTiles)
    for (const GemmExtents& size :
         {GemmExtents{1, 1, 1}, {33, 72, 129}, {129, 257, 300}, {345, 264, 1000}, {700, 600, 900}})
      for (const int splits : {1, 3})
        for (const bool adds_first : {false, true})
          for (const bool adds_second : {false, true}) {
            const auto& [m, n, k, batch] = size;
            const DType dtype = ++number % 2 ? DType::bf16 : DType::f16;
            const Tensor a = small_numbers({k, m}, 1), b = small_numbers({k, n}, 2),
                         f = small_numbers({k, m}, 5), g = small_numbers({k, n}, 6),
                         d = small_numbers({m, n}, 3), e = small_numbers({n, m}, 4);
            const DType out_d = number % 3 ? DType::f32 : dtype, out_e = number % 5 ? DType::f32 : dtype;
            Tensor frames[6];
            const double nan = std::numeric_limits<double>::quiet_NaN();
            const Tensor on_gpu[] = {framed(a, dtype, nan, frames[0]), framed(b, dtype, nan, frames[1]),
                                     framed(f, dtype, nan, frames[2]), framed(g, dtype, nan, frames[3]),
                                     framed(d, out_d, 77, frames[4]),  framed(e, out_e, 77, frames[5])};
            if (!adds_first) on_gpu[4].fill(nan);
            if (!adds_second) on_gpu[5].fill(nan);
            const auto product = [&](const Tensor& left, const Tensor& right, const Tensor& to, bool adds) {
              Gemm gemm{.m = m, .n = n, .k = k, .in = dtype, .out = to.dtype(), .transpose_a = true};
              gemm.a = left.raw(), gemm.b = right.raw(), gemm.d = to.raw();
              gemm.lda = left.layout().stride(0), gemm.ldb = right.layout().stride(0);
              gemm.ldd = to.layout().stride(0), gemm.beta = adds ? 1 : 0;
              return gemm;
            };
            Gemm first = product(on_gpu[0], on_gpu[1], on_gpu[4], adds_first),
                 second = product(on_gpu[2], on_gpu[3], on_gpu[5], adds_second);
            const Tensor first_sums = filled_with_nan({m}), second_sums = filled_with_nan({n});
            if (number / 2 % 2) first.sums = first_sums.data<float>();
            if (number / 4 % 2) second.sums = second_sums.data<float>();
            GemmChoice choice = choose_pair(first, Gpu(gpu()), tile);
            choice.splits = std::min(splits, int((k + 63) / 64)), choice.whole = 0;
            if constexpr (kCuda) {
              if (dtype == DType::bf16)
                gemm_pair_sm90<bf16>(first, second, choice, gpu());
              else
                gemm_pair_sm90<f16>(first, second, choice, gpu());
            }
            multiply(d, a.transpose(0, 1), b, {.accumulate = adds_first});
            multiply(e, g.transpose(0, 1), f, {.accumulate = adds_second});
            const auto says = [&] {
              return testing::Message()
                     << "tile " << tile << ": " << m << " " << n << " " << k << " splits " << splits
                     << " adds " << adds_first << adds_second << " " << out_d << " " << out_e;
            };
            ASSERT_EQ(on_gpu[4].to_vector<double>(), d.to(out_d).to_vector<double>()) << says();
            ASSERT_EQ(on_gpu[5].to_vector<double>(), e.to(out_e).to_vector<double>()) << says();
            if (first.sums) ASSERT_EQ(first_sums.to_vector<float>(), sums_over_k(a)) << says();
            if (second.sums) ASSERT_EQ(second_sums.to_vector<float>(), sums_over_k(g)) << says();
            for (const auto& [frame, inside] : {std::pair{frames[4], n}, {frames[5], m}}) {
              const auto values = frame.to_vector<double>();
              for (int64_t i = 0; i < int64_t(values.size()); ++i)
                if (i % frame.size(-1) < 8 || i % frame.size(-1) >= 8 + inside)
                  ASSERT_EQ(values[size_t(i)], 77) << says() << ": a neighbour was overwritten, " << i;
            }
          }
}

TEST_F(GemmSm90Cuda, PairsSumBiasesInWholeTilesAndInParts) {
  // More tiles than run at once: those of the first round are whole, the others in parts, and both add to the
  // sums, whose counters must be back at 0 for the next launch.
  const int64_t m = 3072, n = 768, k = 1088;
  const Tensor a = small_numbers({k, m}, 1), b = small_numbers({k, n}, 2), f = small_numbers({k, m}, 5),
               g = small_numbers({k, n}, 6);
  const Tensor d = Tensor::empty({m, n}, DType::f32, Device::cpu()),
               e = Tensor::empty({n, m}, DType::f32, Device::cpu());
  multiply(d, a.transpose(0, 1), b);
  multiply(e, g.transpose(0, 1), f);
  const auto want_d = d.to_vector<float>(), want_e = e.to_vector<float>(), want_a = sums_over_k(a),
             want_g = sums_over_k(g);
  const auto on_gpu = [](const Tensor& x) { return x.to(DType::bf16).to(gpu()); };
  const Tensor left = on_gpu(a), right = on_gpu(b), other_left = on_gpu(f), other_right = on_gpu(g);
  for (const int tile : kPairTiles)
    for (const int splits : {1, 9, 3, 17}) {
      const Tensor first_d = filled_with_nan({m, n}), second_d = filled_with_nan({n, m}),
                   first_sums = filled_with_nan({m}), second_sums = filled_with_nan({n});
      const auto product = [&](const Tensor& x, const Tensor& y, const Tensor& to, const Tensor& sums) {
        Gemm gemm{.m = m, .n = n, .k = k, .in = DType::bf16, .out = DType::f32, .transpose_a = true};
        gemm.a = x.raw(), gemm.b = y.raw(), gemm.d = to.raw(), gemm.sums = sums.data<float>();
        gemm.lda = x.layout().stride(0), gemm.ldb = y.layout().stride(0), gemm.ldd = to.layout().stride(0);
        return gemm;
      };
      const GemmTileShape& shape = kGemmTiles[tile];
      const int64_t rows = shape.rows * shape.cluster_m(), columns = shape.columns * shape.cluster_n();
      const int64_t tiles = 2 * ((m + rows - 1) / rows) * ((n + columns - 1) / columns);
      const int64_t slots = gpu().multiprocessors() / shape.cluster, grid = slots - slots % splits;
      const GemmChoice choice{.tile = tile,
                              .splits = splits,
                              .whole = splits == 1 ? 0 : int(tiles / grid * grid),
                              .by_threads = true};
      if constexpr (kCuda)
        gemm_pair_sm90<bf16>(product(left, right, first_d, first_sums),
                             product(other_left, other_right, second_d, second_sums), choice, gpu());
      ASSERT_EQ(first_d.to_vector<float>(), want_d) << "tile " << tile << ", splits " << splits;
      ASSERT_EQ(second_d.to_vector<float>(), want_e) << "tile " << tile << ", splits " << splits;
      ASSERT_EQ(first_sums.to_vector<float>(), want_a) << "tile " << tile << ", splits " << splits;
      ASSERT_EQ(second_sums.to_vector<float>(), want_g) << "tile " << tile << ", splits " << splits;
    }
}

TEST_F(GemmSm90Cuda, MatricesThatLaterCallsFindAtOddElementsAreExact) {
  // [2, 3, k, n]: the longer dimension is the batch; of the other one the second call begins after an odd
  // number of elements, though the first begins on a 16-byte boundary.
  const int64_t m = 256, k = 72, n = 136;
  const auto spread = [&](int64_t rows, int64_t columns, int64_t seed) {
    const int64_t count = 3 * rows * columns;
    const Tensor buffer = Tensor::empty_packed({2, count + 1}, DType::bf16, gpu());
    buffer.copy_from(small_numbers({2, count + 1}, seed).to(DType::bf16).to(gpu()));
    return buffer.slice(1, 0, count).reshape({2, 3, rows, columns});
  };
  const auto dense = [&](int64_t rows, int64_t columns, int64_t seed) {
    return small_numbers({2, 3, rows, columns}, seed).to(DType::bf16).to(gpu());
  };
  for (const auto& [a, b] : {std::pair{spread(m, k, 1), dense(k, n, 2)}, {dense(m, k, 3), spread(k, n, 4)}}) {
    const Tensor want = Tensor::empty({2, 3, m, n}, DType::f32, Device::cpu()),
                 d = Tensor::empty({2, 3, m, n}, DType::f32, gpu());
    multiply(want, a.to(Device::cpu()).to(DType::f32), b.to(Device::cpu()).to(DType::f32));
    for (const char* const variant : {"wgmma", "narrow", "cublas"}) {
      const ForceVariant force("gemm", variant);
      multiply(d, a, b);
      EXPECT_EQ(d.to_vector<float>(), want.to_vector<float>()) << variant;
    }
  }
}

TEST_F(GemmSm90Cuda, TheRowSaysWhatItNeeds) {
  const ForceVariant force("linear", "wgmma");
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
      EXPECT_NE(std::string_view(error.what()).find("variant wgmma needs"), std::string_view::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera::ops
