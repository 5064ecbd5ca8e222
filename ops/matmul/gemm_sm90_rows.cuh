#pragma once

#include "gpu/pack.cuh"
#include "ops/matmul/gemm_sm90_plan.h"
#include "ops/matmul/gemm_sm90_store.cuh"

/// The instances of the main loop that multiply() uses, for one dtype: a file of its own for each.

namespace tessera::ops {
namespace {

template <int kIndex, class T, gpu::TileOrder kA, gpu::TileOrder kB>
struct TileOf {
  static constexpr ProductTileShape kShape = kProductTiles[kIndex];
  static constexpr int kRows = kShape.ping_pong ? kShape.rows : kShape.rows / 2;
  using type = ProductTile<T, kA, kB, kRows, kShape.columns, kShape.stages, kShape.ping_pong, kShape.cluster>;
};

template <class Tile, class Out, bool kAdds>
void run_tile(const Gemm& g, Out* out, int64_t ld, int64_t stride, int splits, Device device) {
  using T = typename Tile::T;
  using Epilogue = StoreEpilogue<Tile, Out, ScaleAndAdd<T, Out, kAdds>, 2>;
  ProductPlan plan = product_plan<Tile>(g.m, g.n, g.k, g.batch, splits);
  plan.step_a = g.stride_a != 0, plan.step_b = g.stride_b != 0;
  const ProductMaps maps{
      operand_map<T, Tile::kA>({static_cast<const T*>(g.a), g.lda, g.stride_a}, g.m, g.k, g.batch, Tile::kM),
      operand_map<T, Tile::kB>({static_cast<const T*>(g.b), g.ldb, g.stride_b}, g.n, g.k, g.batch, Tile::kN)};
  const bool sums =
      splits > 1 || static_cast<const void*>(out) != g.d;  // alone; the rest is finish_product's
  typename Epilogue::Params params{};
  params.outputs[0] = Epilogue::map(out, g.m, g.n, g.batch * plan.splits, ld, stride);
  params.splits = plan.splits;
  params.math.alpha = sums ? 1.0f : float(g.alpha);
  if (g.bias && !sums) params.math.bias = {static_cast<const T*>(g.bias), g.stride_bias, int(g.n)};
  if constexpr (kAdds) {
    params.math.beta = float(g.beta);
    params.operand = params.outputs[0];
  }
  launch_product<Tile, Epilogue>(device, maps, plan, params);
}

template <class Tile, class Out, bool kAdds>
void run_direct(const Gemm& g, Device device) {
  Out* const d = static_cast<Out*>(g.d);
  if constexpr (kAdds) {
    if (g.beta != 0) return run_tile<Tile, Out, true>(g, d, g.ldd, g.stride_d, 1, device);
  }
  run_tile<Tile, Out, false>(g, d, g.ldd, g.stride_d, 1, device);
}

template <class Tile, bool kAdds>
void run_product(const Gemm& g, const ProductChoice& choice, Device device) {
  using T = typename Tile::T;
  if (choice.partials) {
    const int64_t pitch = gpu::ceil_div(g.n, 4) * 4;
    const Tensor partials = Tensor::empty_packed({g.batch * choice.splits, g.m, pitch}, DType::f32, device);
    run_tile<Tile, float, false>(g, partials.data<float>(), pitch, g.m * pitch, choice.splits, device);
    finish_product<T>(g, partials, choice.splits, device);
  } else if (g.out == DType::f32) {
    run_direct<Tile, float, kAdds>(g, device);
  } else {
    run_direct<Tile, T, kAdds>(g, device);
  }
}

template <class T, gpu::TileOrder kA, gpu::TileOrder kB, int kIndex = 0>
void run_order(const Gemm& g, const ProductChoice& choice, Device device) {
  if constexpr (kIndex < int(std::size(kProductTiles))) {
    if (choice.tile == kIndex)
      return run_product<typename TileOf<kIndex, T, kA, kB>::type, kProductTiles[kIndex].adds>(g, choice,
                                                                                               device);
    run_order<T, kA, kB, kIndex + 1>(g, choice, device);
  }
}

/// The second kernel: a thread makes four columns of a row, its sums in the order of the parts.
template <class T, class Out>
__global__ void __launch_bounds__(256)
    finish_kernel(const float* partials, int splits, int64_t pitch, const __grid_constant__ Gemm g) {
  gpu::wait_for_earlier();
  const int64_t packs = pitch / 4, part = g.m * pitch;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < g.batch * g.m * packs;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row_of_all = i / packs, column = (i - row_of_all * packs) * 4;
    const int64_t batch = row_of_all / g.m, row = row_of_all - batch * g.m;
    const float* from = partials + batch * splits * part + row * pitch + column;
    float sums[4] = {};
#pragma unroll 4
    for (int split = 0; split < splits; ++split, from += part) {
      const auto some = gpu::load_pack<4>(from);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] += some.at[e];
    }
    Out* const to = static_cast<Out*>(g.d) + batch * g.stride_d + row * g.ldd + column;
    const T* const bias = static_cast<const T*>(g.bias) + batch * g.stride_bias + column;
    const float alpha = float(g.alpha), beta = float(g.beta);
    gpu::Pack<Out, 4> result;
    const bool whole = column + 4 <= g.n;
    const bool words = whole && reinterpret_cast<uintptr_t>(to) % sizeof result == 0;
    if (beta != 0 && words) result = gpu::load_pack<4>(to);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + e >= g.n) break;
      float value = alpha * sums[e] + (g.bias ? float(bias[e]) : 0.0f);
      if (beta != 0) value = fmaf(beta, float(words ? result.at[e] : to[e]), value);
      result.at[e] = Out(value);
      if (!words) to[e] = result.at[e];
    }
    if (words) gpu::store_pack<4>(to, result);
  }
}

}  // namespace

template <class T>
void finish_product(const Gemm& g, const Tensor& partials, int splits, Device device) {
  const int64_t threads = g.batch * g.m * (partials.size(2) / 4);
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(threads, 256), int64_t(device.card().multiprocessors) * 8);
  const gpu::LaunchShape shape{.grid = dim3(unsigned(blocks)), .block = 256, .overlaps = true};
  if (g.out == DType::f32)
    gpu::launch(device, shape, finish_kernel<T, float>, partials.data<float>(), splits, partials.size(2), g);
  else
    gpu::launch(device, shape, finish_kernel<T, T>, partials.data<float>(), splits, partials.size(2), g);
}

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
