#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "ops/gemm/gemm_sm90_plan.h"
#include "tests/errors.h"
#include "tests/ops/framed_gemm.h"

/// Fitted tiles (gemm_sm90_fitted.cuh) of every number of rows and columns, alone and in clusters that share
/// either operand. Everything is made of small integers, so that sums are exact in f32 and the plain
/// loops are the only right answer. Neighbours hold NaN.

namespace tessera::ops {
namespace {

class GemmFittedCuda : public GemmKernelsCuda {};

/// Every form of the kernel for tiles of that many rows.
std::vector<GemmChoice> forms(int64_t rows, int64_t k) {
  std::vector<GemmChoice> all;
  for (const int columns : kFittedColumns)
    for (const int shared : {0, 1, 2}) {  // neither operand, a, b
      if ((columns == 64 && k <= 64) || rows > most_fitted_rows(columns)) continue;
      all.push_back({.tile = kFittedTile,
                     .rows = int(rows),
                     .columns = columns,
                     .cluster = shared == 0 ? 1 : 2,
                     .along_n = shared == 1});
    }
  return all;
}

std::string text_of_form(const GemmChoice& choice) {
  return text_of(choice.rows, " rows of ", choice.columns, " columns, ",
                 choice.cluster == 1 ? "alone"
                 : choice.along_n    ? "sharing a"
                                     : "sharing b");
}

TEST_F(GemmFittedCuda, EveryNumberOfRowsIsExactAtEveryEdge) {
  size_t number = 0;
  for (const GemmExtents& size : {GemmExtents{1, 8, 1},
                                  {300, 72, 65},
                                  {17, 600, 200},
                                  {129, 136, 520},
                                  {64, 392, 77},
                                  {31, 200, 1000, 3},
                                  {514, 264, 130, 2}})
    for (const bool transpose_b : {false, true})
      for (int64_t rows = 8; rows <= most_fitted_rows(128); rows = next_fitted_rows(rows))
        for (const GemmChoice& choice : forms(rows, size.k)) {
          ++number;
          const bool accumulate = (number + number / 9) % 3 == 0;
          const DType dtype = (number + number / 5) % 2 ? DType::bf16 : DType::f16;
          const FramedGemm p(size, false, transpose_b, dtype, dtype, accumulate);
          ASSERT_EQ(gemm_sm90_lacks(p.gemm, Gpu(gpu())), "");
          ASSERT_EQ(gemm_fitted_lacks(p.gemm), "");
          product(p.gemm, choice);
          ASSERT_TRUE(p.is_exact()) << text_of_form(choice);
        }
}

TEST_F(GemmFittedCuda, ManyTilesPerBlockAreExact) {
  // Several waves of tiles, long and short k, in every form; rows of d with padding of their own; an addend
  // elsewhere than d, so that tiles at the edges overlap.
  int number = 0;
  for (const GemmExtents& size : {GemmExtents{3000, 4093, 328}, {2000, 1000, 2888}, {300, 12001, 72}}) {
    const Tensor a = small_numbers({size.m, size.k}, 1), b = small_numbers({size.n, size.k}, 2),
                 c = small_numbers({size.m, size.n}, 3);
    const Tensor dense = Tensor::empty({size.k, size.n}, DType::f32, Device::cpu());
    dense.copy_from(b.transpose(0, 1));
    const Tensor left = a.to(DType::bf16).to(gpu()), addend = c.to(DType::bf16).to(gpu());
    const Tensor right[] = {dense.to(DType::bf16).to(gpu()), b.to(DType::bf16).to(gpu())};
    const Tensor d = Tensor::empty({size.m, size.n}, DType::bf16, gpu());
    for (const bool adds : {false, true}) {
      const Tensor want = Tensor::empty({size.m, size.n}, DType::f32, Device::cpu());
      if (adds) want.copy_from(c);
      multiply(want, a, b.transpose(0, 1), {.accumulate = adds});
      const auto rounded = want.to(DType::bf16).to_vector<float>();
      for (const int64_t rows : {40, 64, 120, 144, 208})
        for (const GemmChoice& choice : forms(rows, size.k)) {
          const bool transpose_b = ++number % 2 != 0;
          Gemm g{.m = size.m, .n = size.n, .k = size.k, .in = DType::bf16, .out = DType::bf16};
          g.transpose_b = transpose_b, g.owns_d_padding = true;
          g.a = left.raw(), g.b = right[transpose_b].raw(), g.d = d.raw();
          g.lda = left.layout().stride(0), g.ldb = right[transpose_b].layout().stride(0);
          g.ldd = d.layout().stride(0);
          if (adds) g.c = addend.raw(), g.beta = 1;
          ASSERT_EQ(gemm_fitted_lacks(g), "");
          d.fill(std::numeric_limits<double>::quiet_NaN());
          product(g, choice);
          ASSERT_EQ(d.to_vector<float>(), rounded) << size.m << " " << size.n << " " << size.k << ", adds "
                                                   << adds << ", " << text_of_form(choice);
        }
    }
  }
}

TEST_F(GemmFittedCuda, TilesThatItLacksAreRefused) {
  const FramedGemm p({300, 72, 65}, false, true, DType::bf16, DType::bf16, false);
  for (const auto& [rows, columns] : {std::pair{136, 128}, {216, 128}, {0, 128}, {64, 100}, {120, 64}})
    expect_error(
        [&, rows = rows, columns = columns] {
          product(p.gemm, {.tile = kFittedTile, .rows = rows, .columns = columns});
        },
        {"no fitted tile of"});
}

TEST(GemmFitted, FewTilesAndALongKTakeIt) {
  const auto chosen = [](int64_t m, int64_t n, int64_t k, bool gradient = false, DType out = DType::bf16) {
    Gemm g{.m = m, .n = n, .k = k, .in = DType::bf16, .out = out};
    g.transpose_a = gradient, g.transpose_b = !gradient, g.owns_d_padding = true;
    g.a = g.b = g.d = reinterpret_cast<void*>(uintptr_t{1} << 20);  // never read
    g.lda = row_pitch(gradient ? m : k, g.in), g.ldb = row_pitch(gradient ? n : k, g.in);
    g.ldd = row_pitch(n, g.out);
    static const DeviceInfo info{.name = "NVIDIA H200", .major = 9, .minor = 0, .multiprocessors = 132};
    return choose_gemm(g, Gpu(info, 132)).tile;
  };
  EXPECT_EQ(chosen(8627, 224, 6277), kFittedTile);
  EXPECT_EQ(chosen(596, 1410, 2775), kFittedTile);
  EXPECT_EQ(chosen(1131, 2785, 6137), kFittedTile);
  EXPECT_NE(chosen(8627, 224, 6277, false, DType::f32), kFittedTile);
  EXPECT_NE(chosen(596, 1410, 2775, true), kFittedTile);
  EXPECT_NE(chosen(36096, 1365, 512), kFittedTile) << "many waves";
}

TEST(GemmFitted, WhatItLacksIsNamed) {
  Gemm g{.m = 200, .n = 400, .k = 300, .in = DType::bf16, .out = DType::bf16};
  g.a = g.b = g.d = reinterpret_cast<void*>(uintptr_t{1} << 20);  // never read
  g.lda = 304, g.ldb = g.ldd = 400;
  EXPECT_EQ(gemm_fitted_lacks(g), "");
  Gemm other = g;
  other.transpose_a = true;
  EXPECT_EQ(gemm_fitted_lacks(other), "an a whose k is dense");
  other = g, other.out = DType::f32;
  EXPECT_EQ(gemm_fitted_lacks(other), "a d of the operands' dtype");
  other = g, other.terms = 2;
  EXPECT_EQ(gemm_fitted_lacks(other), "a product, not a sum of several");
  other = g, other.ldd = 401;
  EXPECT_EQ(gemm_fitted_lacks(other), "a d that TMA can write");
}

}  // namespace
}  // namespace tessera::ops
