#include "ops/gemm/gemm_scatter_internal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/gemm/zero_rows_internal.h"
#include "ops/linear/linear_swiglu.h"
#include "ops/random/random.h"
#include "runtime/has_cuda.h"
#include "tests/ops/framed_gemm.h"

/// Variant "wgmma scatter" tile by tile, and which rows become zeros.

namespace tessera::ops {
namespace {

struct ScatterCase {
  int64_t rows, count, n, k;
};

/// `count` of `rows` rows, spread, and then `padding` entries that name none.
std::vector<int32_t> spread(int64_t rows, int64_t count, int64_t padding) {
  std::vector<int32_t> indices;
  for (int64_t i = 0; i < count; ++i) indices.push_back(int32_t((i * rows + rows / 2) / count));
  indices.resize(size_t(count + padding), int32_t(rows));
  return indices;
}

/// How often zeros are written to each row: ZeroRows::write_others in plain loops.
std::vector<int> zeros_of(int64_t rows, const std::vector<int32_t>& indices) {
  std::vector<int> written(size_t(rows), 0);
  for (int64_t first = 0; first < rows; first += 32) {
    const size_t entry = size_t(std::ranges::lower_bound(indices, int32_t(first)) - indices.begin());
    uint32_t named = 0;
    for (size_t lane = 0; lane < 32 && entry + lane < indices.size(); ++lane)
      named |= bit_of_row(indices[entry + lane], first);
    for (uint32_t left = rows_to_fill(named, first, rows); left != 0;) {
      const RowRun run = first_run(left);
      for (int row = run.begin; row < run.begin + run.count; ++row) ++written.at(size_t(first + row));
      left = run.rest;
    }
  }
  return written;
}

TEST(ZeroRows, EveryRowIsNamedOrFilledOnce) {
  for (const int64_t rows : {1, 5, 31, 32, 33, 131, 1000, 16384, 20011})
    for (const int64_t count : {int64_t{0}, int64_t{1}, rows / 10, rows - 1, rows})
      for (const int64_t padding : {0, 3, 40}) {
        const std::vector<int32_t> indices = spread(rows, count, padding);
        const std::vector<int> zeros = zeros_of(rows, indices);
        for (int64_t row = 0; row < rows; ++row)
          ASSERT_EQ(zeros[size_t(row)], std::ranges::binary_search(indices, int32_t(row)) ? 0 : 1)
              << "row " << row << " of " << rows << ", " << count << " + " << padding << " entries";
      }
}

TEST(ZeroRows, NeighbouringRowsThatAreNamedAreSkippedTogether) {
  // All of 32 rows, and runs across the groups of 32.
  std::vector<int32_t> indices;
  for (int32_t row = 20; row < 170; ++row) indices.push_back(row);
  const std::vector<int> zeros = zeros_of(300, indices);
  for (int row = 0; row < 300; ++row) EXPECT_EQ(zeros[size_t(row)], row < 20 || row >= 170) << row;
}

TEST(GemmScatter, ChoosesTilesThatLeaveAWarpIdle) {
  const DeviceInfo info{.name = "NVIDIA H200", .major = 9, .minor = 0, .multiprocessors = 132};
  const Gpu gpu(info, 132);
  for (const int64_t m : {20, 50, 204, 1638, 3609})
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{768, 3072}, {1536, 768}}) {
      Gemm g{.m = m, .n = n, .k = k, .in = DType::bf16, .out = DType::bf16};
      g.a = g.b = g.d = reinterpret_cast<char*>(0x1000), g.lda = k, g.ldb = g.ldd = n;
      EXPECT_EQ(gemm_scatter_lacks(g, gpu), "");
      const GemmChoice few = choose_scatter(g, {nullptr, m}, gpu),
                       many = choose_scatter(g, {nullptr, 1 << 20}, gpu);
      EXPECT_LE(few.columns, kMostScatteredColumns);
      EXPECT_TRUE(has_fitted_tile(few, k));
      EXPECT_GT(few.seconds, 0);
      EXPECT_GT(many.seconds, few.seconds + double(n) * 2e6 / 7e12) << "zeros take time";
      g.d = reinterpret_cast<char*>(0x1002);
      EXPECT_NE(gemm_scatter_lacks(g, gpu), "");
    }
  Gemm g{.m = 100000, .n = 4096, .k = 512, .in = DType::bf16, .out = DType::bf16};
  g.a = g.b = g.d = reinterpret_cast<char*>(0x1000), g.lda = 512, g.ldb = g.ldd = 4096;
  EXPECT_EQ(gemm_scatter_lacks(g, gpu), "at most three waves of tiles");
}

class GemmScatterCuda : public GuardedCuda<9> {
 protected:
  static void run(const Gemm& g, const GemmScatter& scatter, const GemmChoice& choice) {
    if constexpr (kCuda) {
      if (g.in == DType::bf16)
        gemm_scatter_sm90<bf16>(g, scatter, choice, gpu());
      else
        gemm_scatter_sm90<f16>(g, scatter, choice, gpu());
    }
  }
};

TEST_F(GemmScatterCuda, EveryTileWritesEveryElementOnceAndNoNeighbour) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  int number = 0;
  for (const auto& [tile_rows, columns, cluster, along_n] : {std::tuple{8, 64, 1, false},
                                                             {104, 64, 1, false},
                                                             {24, 64, 2, true},
                                                             {16, 128, 1, false},
                                                             {208, 128, 1, false},
                                                             {120, 128, 2, false},
                                                             {64, 128, 2, true}})
    for (const ScatterCase& p : {ScatterCase{1, 1, 8, 65},
                                 {5, 2, 9, 70},
                                 {300, 33, 72, 129},
                                 {1000, 999, 257, 80},
                                 {700, 200, 136, 520},
                                 {20011, 1333, 41, 200}})  // many groups of 32 rows per warp
      for (const bool prefix : {false, true})
        for (const bool accumulate : {false, true}) {
          const DType dtype = ++number % 2 ? DType::bf16 : DType::f16;
          const int64_t padding = prefix ? 0 : p.count / 7, m = p.count + padding;
          const std::vector<int32_t> indices = spread(p.rows, p.count, padding);
          const Tensor a = small_numbers({m, p.k}, 1), b = small_numbers({p.k, p.n}, 2),
                       before = small_numbers({p.rows, p.n}, 3);
          const Tensor product = Tensor::empty({m, p.n}, DType::f32, Device::cpu());
          multiply(product, a, b);
          std::vector<float> want =
              accumulate ? before.to_vector<float>() : std::vector<float>(size_t(p.rows * p.n), 0.0f);
          const auto rows = product.to_vector<float>();
          for (int64_t i = 0; i < p.count; ++i)
            for (int64_t c = 0; c < p.n; ++c)
              want[size_t((prefix ? i : indices[size_t(i)]) * p.n + c)] += rows[size_t(i * p.n + c)];

          Tensor frame_a, frame_b, frame_d;
          const Tensor left = framed(a, dtype, nan, frame_a), right = framed(b, dtype, nan, frame_b),
                       d = framed(before, dtype, 77, frame_d);
          if (!accumulate) d.fill(nan);
          const Tensor at = Tensor::from(indices, {m}).to(gpu());
          Gemm g{.m = m, .n = p.n, .k = p.k, .in = dtype, .out = dtype, .beta = accumulate ? 1.0 : 0.0};
          g.a = left.raw(), g.b = right.raw(), g.d = d.raw();
          g.lda = left.layout().stride(0), g.ldb = right.layout().stride(0), g.ldd = d.layout().stride(0);
          ASSERT_EQ(gemm_scatter_lacks(g, Gpu(gpu())), "");
          run(g, {prefix ? nullptr : at.data<int32_t>(), p.rows},
              {.tile = kFittedTile,
               .rows = tile_rows,
               .columns = columns,
               .cluster = cluster,
               .along_n = along_n});

          SCOPED_TRACE(testing::Message()
                       << "tile " << tile_rows << " x " << columns << ", cluster " << cluster << ", prefix "
                       << prefix << ", " << p.count << " of " << p.rows << " rows, " << p.n << " x " << p.k
                       << ", " << dtype << ", accumulate " << accumulate);
          ASSERT_EQ(d.to_vector<float>(), Tensor::from(want, {p.rows, p.n}).to(dtype).to_vector<float>());
          const auto around = frame_d.to_vector<float>();
          const int64_t width = frame_d.size(-1);
          for (int64_t i = 0; i < int64_t(around.size()); ++i)
            ASSERT_TRUE((i % width >= 8 && i % width < 8 + p.n) || around[size_t(i)] == 77)
                << "a neighbour of d was overwritten: " << i;
        }
}

TEST_F(GemmScatterCuda, ShapesOfASlicedLayerRepeatAndAgreeWithPlainLoops) {
  // With the tiles and splits of the model, more than one wave of tiles among them.
  for (const ScatterCase& p :
       {ScatterCase{16384, 50, 768, 3072}, {4096, 409, 768, 3072}, {36096, 3609, 768, 200}}) {
    const std::vector<int32_t> indices = spread(p.rows, p.count, 0);
    const Tensor a = small_numbers({p.count, p.k}, 1), b = small_numbers({p.k, p.n}, 2);
    const Tensor product = Tensor::empty({p.count, p.n}, DType::f32, Device::cpu());
    multiply(product, a, b);
    const auto rows = product.to(DType::bf16).to_vector<float>();
    const Tensor left = a.to(DType::bf16).to(gpu()), right = b.to(DType::bf16).to(gpu()),
                 at = Tensor::from(indices, {p.count}).to(gpu());
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Tensor d = Tensor::empty({p.rows, p.n}, DType::bf16, gpu());
      d.fill(std::numeric_limits<double>::quiet_NaN());
      Gemm g{.m = p.count, .n = p.n, .k = p.k, .in = DType::bf16, .out = DType::bf16};
      g.a = left.raw(), g.b = right.raw(), g.d = d.raw();
      g.lda = left.layout().stride(0), g.ldb = right.layout().stride(0), g.ldd = d.layout().stride(0);
      gemm_scatter(g, {at.data<int32_t>(), p.rows}, gpu());
      const auto got = d.to_vector<float>();
      int64_t entry = 0;
      for (int64_t row = 0; row < p.rows; ++row) {
        const bool named = entry < p.count && indices[size_t(entry)] == row;
        for (int64_t c = 0; c < p.n; ++c)
          ASSERT_EQ(got[size_t(row * p.n + c)], named ? rows[size_t(entry * p.n + c)] : 0.0f)
              << "row " << row << ", column " << c << ", repeat " << repeat;
        entry += named;
      }
    }
  }
}

TEST_F(GemmScatterCuda, LinearSwigluGivesTheGradientOfTheSeparateLaunches) {
  // Its cases have no slices. Sums of another order: one rounding of bf16 apart where they are rounded.
  const auto gradient = [&](bool scatters) {
    Rng rng(3);
    const auto drawn = [&](const Shape& shape) {
      const Tensor x = Tensor::empty(shape, DType::f32, Device::cpu());
      fill_normal(x, 0, 1, rng);
      return x.to(DType::bf16).to(gpu());
    };
    Tensor x = drawn({700, 136}), weight = drawn({144, 136});
    const Tensor dy = drawn({700, 72});
    require_grad(x);
    const ForceVariant force("linear", scatters ? "wgmma scatter" : "wgmma");
    Tape tape;
    const SlicedBackward slice{.rows = SelectMode::top_norm, .n = 70, .weight_grad = WeightGrad::none};
    tape.backward(std::vector{linear_swiglu(x, weight, slice)}, std::vector{dy});
    return grad(x).to_vector<float>();
  };
  const auto ours = gradient(true), separate = gradient(false);
  int64_t zeros = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    zeros += ours[i] == 0;
    ASSERT_NEAR(ours[i], separate[i], 0x1p-7f * std::abs(separate[i]) + 1e-3f) << i;
  }
  EXPECT_GE(zeros, 630 * 136);
}

}  // namespace
}  // namespace tessera::ops
