#pragma once

#include "ops/sparse24/multiply24_internal.h"
#include "ops/sparse24/sparse24_sm90.cuh"
#include "ops/sparse24/sparse24_store.cuh"

/// The instances of sparse24_sm90.cuh: a file of its own for each dtype.

namespace tessera::ops {
namespace {

template <class Tile, class Out>
void launch24(const SparseGemm24& g, Device device) {
  using T = typename Tile::T;
  using Epilogue = Sparse24Store<Tile, Out>;
  const Sparse24Operands operands{
      operand_map<T, Tile::kB>({static_cast<const T*>(g.b), g.ldb, 0}, g.n, g.k, 1, Tile::kN),
      static_cast<const uint4*>(g.values), static_cast<const uint32_t*>(g.metadata),
      int(gpu::ceil_div(g.m, sparse24::kTileRows)), int(gpu::ceil_div(g.k, sparse24::kTileDepth))};
  const GemmPlan plan = gemm_plan<Tile>(g.m, g.n, g.k, 1, 1);
  typename Epilogue::Params params{};
  params.transposed = g.transposed, params.by_threads = g.by_threads;
  params.terms = {static_cast<const T*>(g.bias_n),
                  static_cast<const T*>(g.bias_m),
                  g.alpha,
                  g.accumulate ? 1.0f : 0.0f,
                  int(g.m),
                  int(g.n)};
  Out* const d = static_cast<Out*>(g.d);
  params.to = d, params.from = d;
  params.row_stride = g.transposed ? 1 : g.ldd, params.column_stride = g.transposed ? g.ldd : 1;
  if (!g.by_threads) params.d = params.c = Epilogue::map(d, g.m, g.n, g.ldd, g.transposed);
  const int clusters = std::min(plan.items, device.multiprocessors() / Tile::kCluster);
  gpu::launch(device,
              {.grid = dim3(unsigned(clusters * Tile::kCluster)),
               .block = dim3(Tile::kThreads),
               .shared_bytes = size_t(GemmShared<Tile, Epilogue>::kBytes),
               .cluster = Tile::kCluster,
               .overlaps = true},
              sparse24_kernel<Tile, Epilogue>, operands, plan, params);
}

template <class T, gpu::TileOrder kB, int kIndex = 0>
void run24(const SparseGemm24& g, int tile, Device device) {
  if constexpr (kIndex < int(std::size(kTiles24))) {
    constexpr Tile24 kShape = kTiles24[kIndex];
    using Tile = Sparse24Tile<T, kB, kShape.rows / 2, kShape.columns, kShape.stages, kShape.cluster>;
    if (tile == kIndex) return g.wide ? launch24<Tile, float>(g, device) : launch24<Tile, T>(g, device);
    run24<T, kB, kIndex + 1>(g, tile, device);
  } else {
    check(false, "multiply24: there is no tile ", tile);
  }
}

}  // namespace

template <class T>
void multiply24_sm90(const SparseGemm24& g, int tile, Device device) {
  using enum gpu::TileOrder;
  if (g.b_k_major)
    run24<T, k_major>(g, tile, device);
  else
    run24<T, mn_major>(g, tile, device);
}

}  // namespace tessera::ops
