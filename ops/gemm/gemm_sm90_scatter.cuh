#pragma once

#include "ops/gemm/gemm_scatter_plan.h"
#include "ops/gemm/gemm_sm90_launch.cuh"

/// A GEMM of N rows whose results are rows of a larger d, with zeros in the other rows: dx of a sliced
/// backward pass. 2 N n k FLOPs, and M n elements written, of which M - N rows are zeros: with N a tenth of M
/// the zeros take as long as the GEMM, one bound by memory, the other by the tensor cores, so they run at
/// the same time.
///
/// The GEMM is that of gemm_sm90.cuh with the register-store epilogue, which looks up the row of d. The three
/// warps of the producer warpgroup that issue no loads write the zeros with ordinary 16-byte stores: each has
/// a range of rows, finds the first index in it (entries_below), and walks over its rows 32 at a time. The
/// other way to write zeros, TMA stores of a panel of zeros, would queue in front of the operands' loads.
///
/// The grid has a block for every SM, also where there are fewer tiles; blocks without a tile fill more rows
/// (FillShares). The zeros of a block do not wait for its tiles or the reverse.

namespace tessera::ops {
namespace {

template <int kIndex, class T>
void run_scatter(const Gemm& g, const GemmScatter& scatter, const GemmChoice& choice, Device device) {
  using enum gpu::TileOrder;
  using Tile = typename TileOf<kIndex, T, k_major, mn_major>::type;
  using Epilogue = RegisterStoreEpilogue<Tile, false, true>;
  GemmPlan plan = gemm_plan<Tile>(g.m, g.n, g.k, 1, choice.splits, choice.whole);
  const GemmMaps maps = operand_maps<Tile>(g, plan);
  typename Epilogue::Params params{.d = g.d, .c = g.d, .ld = g.ldd, .stride = 0};
  params.wide = g.out == DType::f32;
  params.pairs = writes_pairs(g);
  params.m = plan.m, params.n = plan.n;
  params.alpha = float(g.alpha), params.beta = float(g.beta);
  const Tensor scratch = allocate_split_k_workspace<Epilogue>(plan, params, device);
  const bool fills = g.beta == 0;
  const int blocks = gemm_clusters<Tile>(plan, device, fills);
  params.scatter = {scatter.indices, int(scatter.rows), fills, FillShares::of(blocks, plan.items)};
  launch_gemm<Tile, Epilogue>(device, maps, plan, params, fills);
}

template <class T, int kPlace = 0>
void run_scatter_tile(const Gemm& g, const GemmScatter& scatter, const GemmChoice& choice, Device device) {
  if constexpr (kPlace < int(std::size(kScatterTiles))) {
    constexpr int kIndex = kScatterTiles[kPlace];
    static_assert(kGemmTiles[kIndex].by_threads && kGemmTiles[kIndex].cluster == 1);
    if (choice.tile == kIndex) return run_scatter<kIndex, T>(g, scatter, choice, device);
    run_scatter_tile<T, kPlace + 1>(g, scatter, choice, device);
  } else {
    check(false, "gemm: no tile ", choice.tile, " in variant wgmma scatter");
  }
}

}  // namespace

template <class T>
void gemm_scatter_sm90(const Gemm& g, const GemmScatter& scatter, const GemmChoice& choice, Device device) {
  run_scatter_tile<T>(g, scatter, choice, device);
}

}  // namespace tessera::ops
