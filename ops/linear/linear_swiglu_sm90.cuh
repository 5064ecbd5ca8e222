#pragma once

#include "gpu/mma.cuh"
#include "ops/activation/activation_approx.cuh"
#include "ops/gemm/gemm_sm90_tma_store.cuh"
#include "ops/linear/linear_swiglu_kernels.h"

/// Variant "epilogue" of linear_swiglu on the main loop of ops/gemm/gemm_sm90.cuh: 4 T F in FLOPs. A tile of
/// 128 x 128 sums has the gates of 64 features in its first half and their ups in the second, so that a
/// thread has both of a feature; d's tile is 128 x 64. Gate and up as they are kept for the backward pass are
/// 4 T F bytes, the result 2 T F; a pass of its own would read the former again.

namespace tessera::ops {
namespace {

/// a = silu(gate) up of gate and up rounded to T. Outputs: a, then gate and up if they are kept.
template <class T, bool kKeep>
struct GateUp {
  static constexpr int kOutputs = kKeep ? 3 : 1;
  static constexpr bool kOperand = false;

  __device__ __forceinline__ int columns(int, int) const { return 0; }
  __device__ __forceinline__ void operator()(float2 gate, float2 up, uint32_t (&outputs)[kOutputs]) const {
    const uint32_t gates = gpu::pack_halves<T>(gate.x, gate.y), ups = gpu::pack_halves<T>(up.x, up.y);
    const float2 g = gpu::unpack_halves<T>(gates), u = gpu::unpack_halves<T>(ups);
    using Silu = ActivationApprox<T, Activation::silu>;
    outputs[0] = gpu::pack_halves<T>(Silu::value(g.x) * u.x, Silu::value(g.y) * u.y);
    if constexpr (kKeep) outputs[1] = gates, outputs[2] = ups;
  }
};

template <class Tile, class T, bool kKeep, int kBuffers>
void launch_gated(const Tensor& y, const Tensor& h, const Tensor& x, const Tensor& weight) {
  using Epilogue = TmaStoreEpilogue<Tile, T, GateUp<T, kKeep>, kBuffers>;
  const int64_t m = y.size(0), n = y.size(1), k = x.size(1);
  const GemmMaps maps{operand_map<T, Tile::kA>({x.data<T>(), x.layout().stride(0), 0}, m, k, 1, Tile::kM),
                      gated_map<T, Tile>({weight.data<T>(), weight.layout().stride(0), 0}, n, k)};
  typename Epilogue::Params params{};
  params.outputs[0] = Epilogue::map(y.data<T>(), m, n, 1, y.layout().stride(0), 0);
  if constexpr (kKeep)
    for (int half = 0; half < 2; ++half)
      params.outputs[1 + half] = Epilogue::map(h.data<T>() + half * n, m, n, 1, h.layout().stride(0), 0);
  params.splits = 1;
  GemmPlan plan = gemm_plan<Tile>(m, n, k, 1, 1);
  clip_edges<Tile>(plan);
  launch_gemm<Tile, Epilogue>(y.device(), maps, plan, params);
}

/// Tiles of 128 x 256 sums by both warpgroups, else of 128 x 128 by each in turn, whose three results leave
/// room for one stage less. Beyond some waves of the latter the blocks of a cluster share the weight.
template <class T, bool kKeep>
void run_gated(const Tensor& y, const Tensor& h, const Tensor& x, const Tensor& weight, bool wide) {
  using enum gpu::TileOrder;
  const int64_t tiles = gpu::ceil_div(y.size(0), 128) * gpu::ceil_div(y.size(1), 64);
  constexpr int kStages = kKeep ? 4 : 5;
  if (wide)
    launch_gated<GemmTile<T, k_major, k_major, 64, 256, kKeep ? 3 : 4, false, 1, false, false, true>, T,
                 kKeep, kKeep ? 1 : 2>(y, h, x, weight);
  else if (pays_clusters(tiles, y.device()))
    launch_gated<GemmTile<T, k_major, k_major, 128, 128, kStages, true, 2, false, false, true>, T, kKeep, 2>(
        y, h, x, weight);
  else
    launch_gated<GemmTile<T, k_major, k_major, 128, 128, kStages, true, 1, false, false, true>, T, kKeep, 2>(
        y, h, x, weight);
}

}  // namespace

template <class T>
void linear_swiglu_sm90(const Tensor& y, const Tensor& h, const Tensor& x, const Tensor& weight, bool wide) {
  if (h.defined())
    run_gated<T, true>(y, h, x, weight, wide);
  else
    run_gated<T, false>(y, h, x, weight, wide);
}

}  // namespace tessera::ops
