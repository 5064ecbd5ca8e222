#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/gemm/gemm_sm90_plan.h"
#include "ops/linear/linear_swiglu.h"
#include "runtime/has_cuda.h"
#include "tests/errors.h"
#include "tests/ops/framed_gemm.h"

/// Skinny GEMMs (gemm_sm90_stream.cuh) in every tile and cut. Everything is made of small integers, so that
/// sums are exact in f32 and the plain loops are the only right answer. Neighbours hold NaN.

namespace tessera::ops {
namespace {

class GemmStreamCuda : public GemmKernelsCuda {};

/// Rows per tile and thread blocks per cluster.
std::vector<GemmChoice> cuts(const Gemm& g, bool gated = false) {
  const bool few_rows = gated || stream_tokens_are_rows(g),
             k_first = few_rows ? !g.transpose_b : g.transpose_a;
  const int64_t rows = few_rows ? g.n : g.m;
  std::vector<GemmChoice> all;
  for (const int tile : {64, 128, 3, 24, 93})
    for (const int splits : {1, 2, 4, 8}) {
      if ((k_first && tile % 64 != 0) || (gated && tile > kStreamRows / 2)) continue;
      const int64_t tiles = g.batch * ((rows + tile - 1) / tile);
      if (splits > 1 && tiles > Device::cuda(0).info().multiprocessors / splits) continue;
      all.push_back({.tile = kStreamTile, .splits = splits, .rows = tile});
    }
  return all;
}

TEST_F(GemmStreamCuda, EveryCutIsExactAtEveryEdge) {
  int number = 0;
  for (const GemmExtents& size : {GemmExtents{1, 1, 1},
                                  {2, 70, 64},
                                  {8, 257, 129},
                                  {17, 600, 200},
                                  {33, 129, 520},
                                  {64, 390, 77},
                                  {31, 200, 1000, 3},
                                  {300, 20, 700},
                                  {513, 64, 130, 2},
                                  {64, 64, 64}})
    for (const bool flipped : {false, true})
      for (const bool accumulate : {false, true}) {
        const bool few_rows = size.m <= kStreamTokens && size.m <= size.n;
        // Tokens lie with dense k; the weight as `flipped` says.
        const bool ta = few_rows ? false : flipped, tb = few_rows ? !flipped : true;
        const bool wide = ++number % 3 == 0;
        const DType dtype = number % 2 ? DType::bf16 : DType::f16;
        const FramedGemm shape(size, ta, tb, dtype, wide ? DType::f32 : dtype, accumulate);
        ASSERT_EQ(gemm_sm90_lacks(shape.gemm, Gpu(gpu())), "");
        ASSERT_EQ(gemm_stream_lacks(shape.gemm), "");
        for (const GemmChoice& choice : cuts(shape.gemm)) {
          const FramedGemm p(size, ta, tb, dtype, wide ? DType::f32 : dtype, accumulate);
          product(p.gemm, choice);
          ASSERT_TRUE(p.is_exact()) << "tiles of " << choice.rows << " by " << choice.splits;
        }
      }
}

TEST_F(GemmStreamCuda, LargeProductsRepeat) {
  // Many k-blocks, several tiles per thread block, all thread blocks of a cluster.
  for (const GemmExtents& size : {GemmExtents{32, 4096, 3000}, {64, 500, 20000}, {5, 12000, 520}}) {
    const Tensor a = small_numbers({size.m, size.k}, 1), b = small_numbers({size.n, size.k}, 2);
    const Tensor want = Tensor::empty({size.m, size.n}, DType::f32, Device::cpu());
    multiply(want, a, b.transpose(0, 1));
    const Tensor left = a.to(DType::bf16).to(gpu()), right = b.to(DType::bf16).to(gpu());
    const Tensor d = Tensor::empty({size.m, size.n}, DType::f32, gpu());
    Gemm g{.m = size.m, .n = size.n, .k = size.k, .in = DType::bf16, .out = DType::f32, .transpose_b = true};
    g.a = left.raw(), g.b = right.raw(), g.d = d.raw();
    g.lda = left.layout().stride(0), g.ldb = right.layout().stride(0), g.ldd = d.layout().stride(0);
    for (int run = 0; run < 3; ++run)
      for (const GemmChoice& choice : cuts(g)) {
        d.fill(std::numeric_limits<double>::quiet_NaN());
        product(g, choice);
        ASSERT_EQ(d.to_vector<float>(), want.to_vector<float>())
            << size.m << " " << size.n << " " << size.k << ", tiles of " << choice.rows << " by "
            << choice.splits << ", run " << run;
      }
  }
}

TEST_F(GemmStreamCuda, GateAndUpAreTheirOwnHalves) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const int64_t tokens : {3, 16, 31, 64})
      for (const auto& [in, width] : {std::pair<int64_t, int64_t>{8, 1}, {72, 40}, {520, 135}, {264, 700}}) {
        const Tensor x = small_numbers({tokens, in}, 1), w = small_numbers({2 * width, in}, 2);
        const auto wanted = linear_swiglu(x, w).to_vector<float>();
        Tensor frames[3];
        const double nan = std::numeric_limits<double>::quiet_NaN();
        const Tensor on_gpu[] = {
            framed(x, dtype, nan, frames[0]), framed(w, dtype, nan, frames[1]),
            framed(Tensor::zeros({tokens, width}, DType::f32, Device::cpu()), dtype, 77, frames[2])};
        Gemm g{.m = tokens, .n = width, .k = in, .in = dtype, .out = dtype, .transpose_b = true};
        g.a = on_gpu[0].raw(), g.b = on_gpu[1].raw(), g.d = on_gpu[2].raw();
        g.lda = on_gpu[0].layout().stride(0), g.ldb = on_gpu[1].layout().stride(0);
        g.ldd = on_gpu[2].layout().stride(0);
        for (const GemmChoice& choice : cuts(g, true)) {
          on_gpu[2].fill(nan);
          if constexpr (kCuda) {
            if (dtype == DType::bf16)
              swiglu_stream_sm90<bf16>(g, choice, gpu());
            else
              swiglu_stream_sm90<f16>(g, choice, gpu());
          }
          const auto ours = on_gpu[2].to_vector<float>();
          for (size_t i = 0; i < wanted.size(); ++i)  // rounded once; beyond 65,504 f16 has infinity
            ASSERT_TRUE(dtype == DType::f16 && std::abs(wanted[i]) > 65504
                            ? std::isinf(ours[i]) && (ours[i] > 0) == (wanted[i] > 0)
                            : std::abs(ours[i] - wanted[i]) <=
                                  std::abs(wanted[i]) * (dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) + 1e-6)
                << ours[i] << " for " << wanted[i] << " in " << dtype << " " << tokens << " x " << in
                << " -> " << width << " element " << i << ", tiles of " << choice.rows << " by "
                << choice.splits;
          const auto around = frames[2].to_vector<double>();
          for (int64_t i = 0; i < int64_t(around.size()); ++i)
            if (i % frames[2].size(-1) < 8 || i % frames[2].size(-1) >= 8 + width)
              ASSERT_EQ(around[size_t(i)], 77) << "a neighbour was overwritten: " << i;
        }
      }
}

TEST(GemmStream, FewTokensAndALargeWeightTakeIt) {
  // LLaMA-2-7B with a prompt of 32, on the SMs of an H200: each tile covers an equal share of the weight's
  // rows.
  const auto chosen = [](int64_t tokens, int64_t n, int64_t k, bool dense = true) {
    Gemm g{.m = tokens, .n = n, .k = k, .in = DType::bf16, .out = DType::bf16, .transpose_b = dense};
    g.a = g.b = g.d = reinterpret_cast<void*>(uintptr_t{1} << 20);  // never read
    g.lda = k, g.ldb = dense ? k : n, g.ldd = n;
    static const DeviceInfo info{.name = "NVIDIA H200", .major = 9, .minor = 0, .multiprocessors = 132};
    return choose_gemm(g, Gpu(info, 132));
  };
  EXPECT_EQ(chosen(32, 12288, 4096).tile, kStreamTile);
  EXPECT_EQ(chosen(32, 12288, 4096).rows, 94);
  EXPECT_EQ(chosen(32, 12288, 4096).splits, 1);
  for (const int64_t k : {4096, 11008}) {
    EXPECT_EQ(chosen(32, 4096, k).tile, kStreamTile);
    EXPECT_EQ(chosen(32, 4096, k).splits, 2) << "tiles of 32 rows would read x as often as the weight";
  }
  EXPECT_NE(chosen(65, 12288, 4096).tile, kStreamTile);
  EXPECT_NE(chosen(32, 300, 300).tile, kStreamTile);
  EXPECT_EQ(chosen(8, 4096, 11008).tile, kStreamTile);
  EXPECT_NE(chosen(8, 4096, 11008, false).tile, kStreamTile);
  EXPECT_EQ(chosen(32, 4096, 11008, false).tile, kStreamTile);
}

TEST_F(GemmStreamCuda, SwigluIsFusedWhereTheProductWouldTakeIt) {
  const Tensor x = Tensor::zeros({32, 4096}, DType::bf16, gpu()),
               w = Tensor::zeros({22016, 4096}, DType::bf16, gpu());
  EXPECT_TRUE(multiply_swiglu_pays(x, w, Gpu(gpu())));
  EXPECT_FALSE(multiply_swiglu_pays(x, Tensor::zeros({64, 4096}, DType::bf16, gpu()), Gpu(gpu())));
}

TEST_F(GemmStreamCuda, RefusesWhatItCannotDo) {
  const ForceVariant force("linear_swiglu", "wgmma");
  const Tensor x = Tensor::zeros({65, 8}, DType::bf16, gpu()), w = Tensor::zeros({4, 8}, DType::bf16, gpu());
  EXPECT_EQ(message_of([&] { linear_swiglu(x, w); }),
            "linear_swiglu: variant wgmma needs at most 64 tokens, not x bf16[65, 8] on cuda:0 and weight "
            "bf16[4, 8] on cuda:0");
}

}  // namespace
}  // namespace tessera::ops
