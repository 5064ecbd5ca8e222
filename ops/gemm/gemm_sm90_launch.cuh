#pragma once

#include "ops/gemm/gemm_sm90_plan.h"
#include "ops/gemm/gemm_sm90_register_store.cuh"

/// Instantiations of the main loop for multiply(), compiled once per dtype.

namespace tessera::ops {
namespace {

template <int kIndex, class T, gpu::TileOrder kA, gpu::TileOrder kB, bool kSums = false>
struct TileOf {
  static constexpr GemmTileShape kShape = kGemmTiles[kIndex];
  static constexpr int kRows = kShape.ping_pong ? kShape.rows : kShape.rows / kShape.warpgroups();
  using type = GemmTile<T, kA, kB, kRows, kShape.columns, kShape.stages, kShape.ping_pong, kShape.cluster,
                        kShape.along_n, kSums, false, kShape.warpgroups()>;
};

/// Boxes have no more rows than there are; the plan learns what they hold.
template <class Tile>
GemmMaps operand_maps(const Gemm& g, GemmPlan& plan) {
  using T = typename Tile::T;
  using enum gpu::TileOrder;
  const int64_t matrices = g.batch * g.terms;
  const int box_a = box_rows(Tile::kM, g.m), box_b = box_rows(Tile::kN, g.n);
  plan.stage_bytes = (Tile::kA == k_major ? box_a * 128 : Tile::kBytesA) +
                     (Tile::kB == k_major ? box_b * 128 : Tile::kBytesB);
  return {
      operand_map<T, Tile::kA>({static_cast<const T*>(g.a), g.lda, g.stride_a}, g.m, g.k, matrices, box_a),
      operand_map<T, Tile::kB>({static_cast<const T*>(g.b), g.ldb, g.stride_b}, g.n, g.k, matrices, box_b)};
}

template <class T>
GemmBias<T> bias_of(const Gemm& g) {
  if (!g.bias) return {};
  return {static_cast<const T*>(g.bias), g.stride_bias, int(g.n)};
}

template <class Tile, class Out, bool kAdds>
void launch_tma_store(const Gemm& g, const GemmMaps& maps, const GemmPlan& plan, Device device) {
  using T = typename Tile::T;
  // The whole addend is loaded before the main loop ends, if there is room for that many panels. 64 x 192 per
  // warpgroup are three panels, and the number of buffers must divide that.
  constexpr int kBuffers = Tile::kMBlocks == 1 && Tile::kN == 192 ? 3 : kAdds && Tile::kN == 128 ? 4 : 2;
  using Epilogue = TmaStoreEpilogue<Tile, Out, ScaleAndAdd<T, Out, kAdds>, kBuffers>;
  typename Epilogue::Params params{};
  params.outputs[0] = Epilogue::map(static_cast<Out*>(g.d), g.m, g.n, g.batch, g.ldd, g.stride_d);
  params.splits = 1;
  params.math.alpha = float(g.alpha);
  params.math.bias = bias_of<T>(g);
  if constexpr (kAdds) {
    params.math.beta = float(g.beta);
    params.operand = g.c ? Epilogue::map(static_cast<const Out*>(g.c), g.m, g.n, g.batch, g.ldd, g.stride_d)
                         : params.outputs[0];
  }
  launch_gemm<Tile, Epilogue>(device, maps, plan, params);
}

/// Whether two neighbouring elements of d can be stored at once.
bool writes_pairs(const Gemm& g) {
  return reinterpret_cast<uintptr_t>(g.d) % (2 * size_of(g.out)) == 0 && g.ldd % 2 == 0 &&
         g.stride_d % 2 == 0;
}

/// Allocates workspace and counters of the split-K reduction.
template <class Epilogue>
Tensor allocate_split_k_workspace(const GemmPlan& plan, typename Epilogue::Params& params, Device device) {
  params.splits = plan.splits;
  if (plan.splits == 1) return {};
  const int64_t warpgroups = int64_t(device.multiprocessors()) * Epilogue::kGroups;
  check(Epilogue::pieces(plan) <= kMaxTiles && warpgroups <= kMaxRunning &&
            unsigned(plan.splits) <= SplitKCounter::kMost &&
            Epilogue::pieces(plan) * plan.splits <= kMaxDeferred * 32,
        "gemm: ", Epilogue::pieces(plan), " pieces of d in ", plan.splits, " splits of k, by ", warpgroups,
        " warpgroups");
  const Tensor scratch = Tensor::empty_packed(Shape{Epilogue::scratch_bytes(plan) / 4}, DType::f32, device);
  params.scratch = reinterpret_cast<float4*>(scratch.data<float>());
  params.counters = device.counters(kGemmCounters);
  return scratch;
}

template <class Tile>
void launch_register_store(const Gemm& g, const GemmMaps& maps, const GemmPlan& plan, Device device) {
  using T = typename Tile::T;
  using Epilogue = RegisterStoreEpilogue<Tile>;
  typename Epilogue::Params params{.d = g.d, .c = g.c ? g.c : g.d, .ld = g.ldd, .stride = g.stride_d};
  params.wide = g.out == DType::f32;
  params.pairs = writes_pairs(g);
  const Tensor scratch = allocate_split_k_workspace<Epilogue>(plan, params, device);
  params.m = plan.m, params.n = plan.n;
  params.alpha = float(g.alpha), params.beta = float(g.beta);
  params.bias = bias_of<T>(g);
  launch_gemm<Tile, Epilogue>(device, maps, plan, params);
}

template <class Tile, class Out, bool kStores, bool kAdds>
void dispatch_tma_store(const Gemm& g, const GemmMaps& maps, const GemmPlan& plan, Device device) {
  if constexpr (kAdds) {
    if (g.beta != 0) return launch_tma_store<Tile, Out, true>(g, maps, plan, device);
  }
  if constexpr (kStores) {
    if (g.beta == 0) return launch_tma_store<Tile, Out, false>(g, maps, plan, device);
  }
  check(false, "gemm: a tile of ", Tile::kM, " x ", Tile::kN, " cannot write such a d");
}

/// A 16-bit gradient that TMA stores is compiled without sums: 192 accumulators leave no registers for them.
template <int kIndex, class T, gpu::TileOrder kA, gpu::TileOrder kB>
void run_gemm(const Gemm& g, const GemmChoice& choice, Device device) {
  constexpr GemmTileShape kShape = kGemmTiles[kIndex];
  constexpr bool kGradient =
      product_is_gradient(kA == gpu::TileOrder::k_major, kB == gpu::TileOrder::k_major);
  using Plain = typename TileOf<kIndex, T, kA, kB>::type;
  using Tile = typename TileOf<kIndex, T, kA, kB, kGradient>::type;
  GemmPlan plan = gemm_plan<Tile>(g.m, g.n, g.k, g.batch, choice.splits, choice.whole, g.terms);
  plan.step_a = g.stride_a != 0, plan.step_b = g.stride_b != 0;
  const GemmMaps maps = operand_maps<Tile>(g, plan);
  if (may_write_twice(g) && !g.sums) clip_edges<Tile>(plan);
  Tensor partial_sums;
  if (Tile::kSumsA && g.sums) {
    plan.sums_pitch = int(gpu::ceil_div(g.m, 128) * 128);
    partial_sums =
        Tensor::empty_packed(Shape{plan.partial_sum_rows<Tile>(), plan.sums_pitch}, DType::f32, device);
    plan.sums = g.sums, plan.partial_sums = partial_sums.data<float>();
    plan.sums_arrived = reinterpret_cast<int*>(device.counters(kGemmCounters) + kSumsAt);
  }
  if constexpr (kShape.by_threads) {
    if (choice.by_threads) return launch_register_store<Tile>(g, maps, plan, device);
  }
  if (g.out == DType::f32)
    dispatch_tma_store<Tile, float, kGradient && kShape.wide, kGradient && kShape.wide_adds>(g, maps, plan,
                                                                                             device);
  else
    dispatch_tma_store<Plain, T, kShape.stores, kShape.adds>(g, maps, plan, device);
}

template <class T, gpu::TileOrder kA, gpu::TileOrder kB, int kIndex = 0>
void dispatch_tile(const Gemm& g, const GemmChoice& choice, Device device) {
  if constexpr (kIndex < int(std::size(kGemmTiles))) {
    constexpr GemmTileShape kShape = kGemmTiles[kIndex];
    if constexpr (kShape.takes(kA == gpu::TileOrder::k_major, kB == gpu::TileOrder::k_major)) {
      if (choice.tile == kIndex) return run_gemm<kIndex, T, kA, kB>(g, choice, device);
    }
    dispatch_tile<T, kA, kB, kIndex + 1>(g, choice, device);
  } else {
    check(false, "gemm: no tile ", choice.tile, " for operands that lie so");
  }
}

}  // namespace

template <class T>
void gemm_sm90(const Gemm& g, const GemmChoice& choice, Device device) {
  using enum gpu::TileOrder;
  if (choice.tile == kStreamTile) return gemm_stream_sm90<T>(g, choice, device);
  if (choice.tile == kFittedTile) return gemm_fitted_sm90<T>(g, choice, device);
  if (g.transpose_a) {
    if (g.transpose_b)
      dispatch_tile<T, mn_major, k_major>(g, choice, device);
    else
      dispatch_tile<T, mn_major, mn_major>(g, choice, device);
  } else if (g.transpose_b) {
    dispatch_tile<T, k_major, k_major>(g, choice, device);
  } else {
    dispatch_tile<T, k_major, mn_major>(g, choice, device);
  }
}

}  // namespace tessera::ops
