#pragma once

#include "ops/mlp/mlp_epilogues.cuh"
#include "ops/mlp/mlp_kernels.h"

/// The fused products of an mlp on the main loop of ops/gemm/gemm_sm90.cuh, a file for each direction and
/// dtype. 2 T D F FLOPs each, and 2 T F bytes for every hidden tensor that is read or written: with D = 512
/// about 375 FLOPs per byte and tensor, so that one such tensor hides under the products and a third does
/// not. Ping-pong hides the arithmetic of the epilogue.

namespace tessera::ops {
namespace {

/// A matrix, or a batch of them.
template <class T>
GemmOperand<T> operand_of(const Tensor& x) {
  return {x.data<T>(), x.layout().stride(-2), x.rank() == 3 ? x.layout().stride(0) : 0};
}

/// outputs = Math(left right): left [T, K] along k, right as `kRight` says; or a batch of such products.
template <class T, gpu::TileOrder kRight, class Math, int kCluster>
void launch_hidden(const Tensor& first, const Tensor& second, const Tensor& operand, const Tensor& left,
                   const Tensor& right, const Math& math) {
  using Tile = GemmTile<T, gpu::TileOrder::k_major, kRight, 128, 128, 5, true, kCluster>;
  // All loads of an operand are issued before the MMAs begin, where there is room for its four panels.
  using Epilogue = TmaStoreEpilogue<Tile, T, Math, Math::kOperand && Math::kOutputs == 1 ? 4 : 2>;
  const int64_t m = first.size(-2), n = first.size(-1), k = left.size(-1);
  const int64_t right_n = right.size(kRight == gpu::TileOrder::k_major ? -2 : -1);
  const int64_t batch = first.rank() == 3 ? first.size(0) : 1;
  const GemmMaps maps{operand_map<T, Tile::kA>(operand_of<T>(left), m, k, batch, Tile::kM),
                      operand_map<T, Tile::kB>(operand_of<T>(right), right_n, k, batch, Tile::kN)};
  const auto map = [&](const Tensor& x) {
    const GemmOperand<T> of = operand_of<T>(x);
    return Epilogue::map(x.data<T>(), m, x.size(-1), batch, of.ld, of.stride);
  };
  typename Epilogue::Params params{};
  params.outputs[0] = map(first);
  if constexpr (Math::kOutputs == 2) params.outputs[1] = map(second);
  if constexpr (Math::kOperand) params.operand = map(operand);
  params.splits = 1;
  params.math = math;
  GemmPlan plan = gemm_plan<Tile>(m, n, k, batch, 1);
  plan.step_a = plan.step_b = batch > 1;
  if constexpr (!Math::kOperand) clip_edges<Tile>(plan);
  launch_gemm<Tile, Epilogue>(first.device(), maps, plan, params);
}

/// Beyond one wave of tiles the blocks of a cluster share the weights.
template <class T, gpu::TileOrder kRight, class Math>
void run_hidden(const Tensor& first, const Tensor& second, const Tensor& operand, const Tensor& left,
                const Tensor& right, const Math& math) {
  const int64_t tiles = (first.rank() == 3 ? first.size(0) : 1) * gpu::ceil_div(first.size(-2), 128) *
                        gpu::ceil_div(first.size(-1), 128);
  if (pays_clusters(tiles, first.device()))
    launch_hidden<T, kRight, Math, 2>(first, second, operand, left, right, math);
  else
    launch_hidden<T, kRight, Math, 1>(first, second, operand, left, right, math);
}

}  // namespace
}  // namespace tessera::ops
