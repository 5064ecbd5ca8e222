#pragma once

#include "gpu/dependent_launch.cuh"
#include "ops/sparse_linear/sell_wgmma_args.cuh"

/// What comes before and after multiply_tiles (sell_wgmma.cuh): x in the order in which WGMMA takes it, and
/// the sum over the blocks.

namespace tessera::ops::sparse {

constexpr int kPackThreads = 256;

/// x under the gates: 8 runs of `apart` columns of a pass next to each other, zeros where there are no
/// columns or tokens. A thread has one column of each run for a token.
template <class T>
__global__ void __launch_bounds__(kPackThreads, 4) pack_inputs(const __grid_constant__ tiles::Args<T> args) {
  const SellWgmmaPlan& plan = args.plan;
  const int index = int(blockIdx.x) * kPackThreads + int(threadIdx.x), column = index % plan.apart,
            token = index / plan.apart, pass = int(blockIdx.y) % plan.passes,
            part = int(blockIdx.y) / plan.passes % plan.parts,
            token_tile = int(blockIdx.y) / (plan.passes * plan.parts), weight = int(blockIdx.z);
  gpu::wait_and_launch_dependents();
  if (token >= plan.tokens) return;
  const int before = pass * plan.columns, all = token_tile * plan.tokens + token,
            columns = min(plan.columns, args.x.width - before), first = part * args.x.width + before;
  uint16_t elements[8];
  const T* const from = args.x.x + int64_t(all) * args.x.stride;
#pragma unroll
  for (int run = 0; run < 8; ++run) {
    const int of_pass = run * plan.apart + column, j = first + of_pass;
    elements[run] = 0;
    if (all < args.x.tokens && of_pass < columns && j < args.x.in) elements[run] = from[j].bits;
  }
  if (args.has_gates) {
    const DeviceGate gate = pick(args.weights, weight).gate;
#pragma unroll
    for (int run = 0; run < 8; ++run) {
      T x;
      x.bits = elements[run];
      const int of_pass = run * plan.apart + column, j = first + of_pass;
      if (all < args.x.tokens && of_pass < columns && j < args.x.in && !gate.counts(all, j, float(x)))
        elements[run] = 0;
    }
  }
  const auto pair = [&](int i) { return uint32_t(elements[i]) | uint32_t(elements[i + 1]) << 16; };
  auto* const to = const_cast<char*>(args.packed_at(weight, token_tile, part, pass));
  *reinterpret_cast<uint4*>(to + (int64_t(column) * plan.tokens + token) * 16) = {pair(0), pair(2), pair(4),
                                                                                  pair(6)};
}

constexpr int kSumRows = 32, kSumThreads = 256;

/// Adds the sums of the blocks, in their order. A block has 32 rows of a window and up to 32 tokens. With
/// kSwiglu the rows are gate's, and y is silu(gate) up.
template <class T, bool kSwiglu>
__global__ void __launch_bounds__(kSumThreads, 4)
    add_splits(const __grid_constant__ tiles::Args<T> args, int tokens_at_once) {
  using namespace tiles;
  constexpr int kOf = kSwiglu ? 2 : 1;
  __shared__ uint8_t sorted[kOf][kWindow];
  __shared__ float sums[kSumRows][33];
  const SellWgmmaPlan& plan = args.plan;
  const int thread = int(threadIdx.x), window = int(blockIdx.x) / (kWindow / kSumRows),
            first_row = int(blockIdx.x) % (kWindow / kSumRows) * kSumRows,
            first_token = int(blockIdx.y) * tokens_at_once;
  const int index = kSwiglu ? 0 : weight_of_tile(args.weights, args.count, window);
  const SellWeight<T> weight = pick(args.weights, index);
  const int of_weight = window - weight.first_tile;
  const auto window_of = [&](int of) { return of == 0 ? window : args.weights[1].first_tile + of_weight; };
  if (!args.constant) gpu::wait_and_launch_dependents();
#pragma unroll
  for (int of = 0; of < kOf; ++of) {
    const auto* const rows = reinterpret_cast<const uint8_t*>(of == 0 ? weight.rows : args.weights[1].rows) +
                             int64_t(of_weight) * kWindow;
    static_assert(kSumThreads == kWindow);
    sorted[of][rows[thread]] = uint8_t(thread);
  }
  __syncthreads();
  if (args.constant) gpu::wait_and_launch_dependents();
  // A thread has a row and four tokens.
  const int quads = tokens_at_once / 4, row = thread / quads, quad = thread % quads;
  float4 totals[kOf] = {};
  if (row < kSumRows) {
    const int token_tile = first_token / plan.tokens, token = first_token % plan.tokens + quad * 4;
#pragma unroll
    for (int of = 0; of < kOf; ++of) {
      const int at = sorted[of][first_row + row], pair = at / kPairRows,
                tile = window_of(of) * kTilesOfWindow + pair / kTeams,
                of_tile = pair % kTeams * kPairRows + at % kWarp * 2 + at / kWarp % 2,
                tiles_before = tile * plan.token_tiles + token_tile, splits = plan.splits_of(tile);
      const float* const from =
          args.partial + (int64_t(tiles_before) * plan.splits * kRows + of_tile) * plan.tokens + token;
#pragma unroll 4
      for (int split = 0; split < splits; ++split) {
        const float4 more = *reinterpret_cast<const float4*>(from + int64_t(split) * kRows * plan.tokens);
        totals[of].x += more.x, totals[of].y += more.y, totals[of].z += more.z, totals[of].w += more.w;
      }
    }
    float4 total = totals[0];
    if constexpr (kSwiglu)
      total = {swiglu_value(total.x, totals[1].x), swiglu_value(total.y, totals[1].y),
               swiglu_value(total.z, totals[1].z), swiglu_value(total.w, totals[1].w)};
    sums[row][quad * 4] = total.x, sums[row][quad * 4 + 1] = total.y;
    sums[row][quad * 4 + 2] = total.z, sums[row][quad * 4 + 3] = total.w;
  }
  __syncthreads();
  const int to_row = of_weight * kWindow + first_row + thread % kSumRows;
  if (to_row >= weight.to.out) return;
  for (int t = thread / kSumRows; t < tokens_at_once; t += kSumThreads / kSumRows)
    if (first_token + t < args.x.tokens) weight.to.store(first_token + t, to_row, sums[thread % kSumRows][t]);
}

}  // namespace tessera::ops::sparse
