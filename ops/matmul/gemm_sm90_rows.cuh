#pragma once

#include "ops/matmul/gemm_sm90_plan.h"
#include "ops/matmul/gemm_sm90_sum.cuh"

/// The instances of the main loop that multiply() uses, for one dtype: a file of its own for each.

namespace tessera::ops {
namespace {

template <int kIndex, class T, gpu::TileOrder kA, gpu::TileOrder kB>
struct TileOf {
  static constexpr ProductTileShape kShape = kProductTiles[kIndex];
  static constexpr int kRows = kShape.ping_pong ? kShape.rows : kShape.rows / 2;
  using type = ProductTile<T, kA, kB, kRows, kShape.columns, kShape.stages, kShape.ping_pong, kShape.cluster>;
};

template <class Tile>
ProductMaps operand_maps(const Gemm& g) {
  using T = typename Tile::T;
  return {
      operand_map<T, Tile::kA>({static_cast<const T*>(g.a), g.lda, g.stride_a}, g.m, g.k, g.batch, Tile::kM),
      operand_map<T, Tile::kB>({static_cast<const T*>(g.b), g.ldb, g.stride_b}, g.n, g.k, g.batch, Tile::kN)};
}

template <class T>
ProductBias<T> bias_of(const Gemm& g) {
  if (!g.bias) return {};
  return {static_cast<const T*>(g.bias), g.stride_bias, int(g.n)};
}

template <class Tile, bool kAdds>
void store_product(const Gemm& g, const ProductPlan& plan, Device device) {
  using T = typename Tile::T;
  // All of what is added is asked for before the products begin, where there is room for four panels.
  using Epilogue = StoreEpilogue<Tile, T, ScaleAndAdd<T, T, kAdds>, kAdds && Tile::kN == 128 ? 4 : 2>;
  typename Epilogue::Params params{};
  params.outputs[0] = Epilogue::map(static_cast<T*>(g.d), g.m, g.n, g.batch, g.ldd, g.stride_d);
  params.splits = 1;
  params.math.alpha = float(g.alpha);
  params.math.bias = bias_of<T>(g);
  if constexpr (kAdds) {
    params.math.beta = float(g.beta);
    params.operand = g.c ? Epilogue::map(static_cast<const T*>(g.c), g.m, g.n, g.batch, g.ldd, g.stride_d)
                         : params.outputs[0];
  }
  launch_product<Tile, Epilogue>(device, operand_maps<Tile>(g), plan, params);
}

template <class Tile>
void sum_product(const Gemm& g, const ProductPlan& plan, Device device) {
  using T = typename Tile::T;
  using Epilogue = SumEpilogue<Tile>;
  const int64_t pair = 2 * int64_t(size_of(g.out));
  Tensor scratch;
  typename Epilogue::Params params{.d = g.d, .c = g.c ? g.c : g.d, .ld = g.ldd, .stride = g.stride_d};
  params.wide = g.out == DType::f32;
  params.pairs =
      reinterpret_cast<uintptr_t>(g.d) % uintptr_t(pair) == 0 && g.ldd % 2 == 0 && g.stride_d % 2 == 0;
  if (plan.splits > 1) {
    check(Epilogue::pieces(plan) <= kMostPieces, "gemm: ", Epilogue::pieces(plan), " pieces in parts of k");
    scratch = Tensor::empty_packed(Shape{Epilogue::scratch_bytes(plan) / 4}, DType::f32, device);
    params.scratch = reinterpret_cast<float4*>(scratch.data<float>());
  }
  params.m = plan.m, params.n = plan.n;
  params.alpha = float(g.alpha), params.beta = float(g.beta);
  params.bias = bias_of<T>(g);
  launch_product<Tile, Epilogue>(device, operand_maps<Tile>(g), plan, params);
}

template <class Tile, bool kAdds, bool kByThreads>
void run_product(const Gemm& g, const ProductChoice& choice, Device device) {
  ProductPlan plan = product_plan<Tile>(g.m, g.n, g.k, g.batch, choice.splits, choice.whole);
  plan.step_a = g.stride_a != 0, plan.step_b = g.stride_b != 0;
  if constexpr (kByThreads) {
    if (choice.by_threads) return sum_product<Tile>(g, plan, device);
  }
  if constexpr (kAdds) {
    if (g.beta != 0) return store_product<Tile, true>(g, plan, device);
  }
  store_product<Tile, false>(g, plan, device);
}

template <class T, gpu::TileOrder kA, gpu::TileOrder kB, int kIndex = 0>
void run_order(const Gemm& g, const ProductChoice& choice, Device device) {
  if constexpr (kIndex < int(std::size(kProductTiles))) {
    constexpr ProductTileShape kShape = kProductTiles[kIndex];
    if (choice.tile == kIndex)
      return run_product<typename TileOf<kIndex, T, kA, kB>::type, kShape.adds, kShape.by_threads>(g, choice,
                                                                                                   device);
    run_order<T, kA, kB, kIndex + 1>(g, choice, device);
  }
}

}  // namespace

template <class T>
void product_sm90(const Gemm& g, const ProductChoice& choice, Device device) {
  using enum gpu::TileOrder;
  if (g.transpose_a) {
    if (g.transpose_b)
      run_order<T, across_k, along_k>(g, choice, device);
    else
      run_order<T, across_k, across_k>(g, choice, device);
  } else if (g.transpose_b) {
    run_order<T, along_k, along_k>(g, choice, device);
  } else {
    run_order<T, along_k, across_k>(g, choice, device);
  }
}

}  // namespace tessera::ops
