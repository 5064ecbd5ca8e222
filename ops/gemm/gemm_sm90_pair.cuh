#pragma once

#include "ops/gemm/gemm_sm90_launch.cuh"

/// Both weight gradients of an MLP in one launch. Both sum over the tokens, dh^T x [F, D] and dy^T a [D, F],
/// and the second is the transpose of a^T dy: two problems of the same extents, so one batch of tiles. Alone,
/// each has so few tiles that k is split into twice as many splits to fill the GPU, and pays separately for
/// its prologue, the partial sums through L2, and its tail: some 10 us of 35 for 11,000 tokens.

namespace tessera::ops {
namespace {

/// Allocates the workspace for the partial sums of `gemm`, whose tiles cover `covered` rows, if wanted.
Tensor allocate_partial_sums(const Gemm& gemm, int parts, int64_t covered, Device device) {
  return gemm.sums ? Tensor::empty_packed(Shape{parts, covered}, DType::f32, device) : Tensor();
}

template <int kIndex, class T, bool kSums>
void run_pair(const Gemm& first, const Gemm& second, const GemmChoice& choice, Device device) {
  using Tile = typename TileOf<kIndex, T, gpu::TileOrder::mn_major, gpu::TileOrder::mn_major, kSums>::type;
  using Epilogue = RegisterStoreEpilogue<Tile, true>;
  GemmPlan plan = gemm_plan<Tile>(first.m, first.n, first.k, 2, choice.splits, choice.whole);
  Tensor parts_a, parts_b;
  if constexpr (kSums) {
    plan.sums_pitch = int(gpu::ceil_div(first.m, Tile::kM) * Tile::kM);
    plan.sums_b_pitch = int(gpu::ceil_div(first.n, Tile::kN) * Tile::kN);
    parts_a = allocate_partial_sums(first, plan.partial_sum_rows<Tile>(), plan.sums_pitch, device);
    parts_b =
        allocate_partial_sums(second, plan.summing_tiles_b<Tile>() * plan.splits, plan.sums_b_pitch, device);
    plan.sums = first.sums, plan.partial_sums = parts_a.defined() ? parts_a.data<float>() : nullptr;
    plan.sums_b = second.sums, plan.partial_sums_b = parts_b.defined() ? parts_b.data<float>() : nullptr;
    plan.sums_arrived = reinterpret_cast<int*>(device.counters(kGemmCounters) + kSumsAt);
  }
  typename Epilogue::Params params{.d = first.d, .c = first.d, .ld = first.ldd, .stride = 0};
  params.wide = first.out == DType::f32;
  params.pairs = writes_pairs(first);
  params.second = {second.d, second.ldd, second.out == DType::f32, second.beta != 0};
  params.m = plan.m, params.n = plan.n;
  params.alpha = 1, params.beta = float(first.beta);
  const Tensor scratch = allocate_split_k_workspace<Epilogue>(plan, params, device);
  const GemmMaps one = operand_maps<Tile>(first, plan), other = operand_maps<Tile>(second, plan);
  const GemmMapsOf<2> maps{{one.a[0], other.a[0]}, {one.b[0], other.b[0]}};
  launch_gemm<Tile, Epilogue>(device, maps, plan, params);
}

template <int kIndex, class T>
void run_pair(const Gemm& first, const Gemm& second, const GemmChoice& choice, Device device) {
  if (first.sums || second.sums)
    run_pair<kIndex, T, true>(first, second, choice, device);
  else
    run_pair<kIndex, T, false>(first, second, choice, device);
}

}  // namespace

template <class T>
void gemm_pair_sm90(const Gemm& first, const Gemm& second, const GemmChoice& choice, Device device) {
  if (choice.tile == kPairTiles[0])
    run_pair<kPairTiles[0], T>(first, second, choice, device);
  else
    run_pair<kPairTiles[1], T>(first, second, choice, device);
}

}  // namespace tessera::ops
