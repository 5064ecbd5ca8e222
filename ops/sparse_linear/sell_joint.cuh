#pragma once

#include "ops/sparse_linear/joint.cuh"
#include "ops/sparse_linear/sell.cuh"

/// Up to kJointWeights sell_delta4 weights over the same x in one launch, and SwiGLU of two: variant
/// "sell_joint". The inner loop is that of sell.cuh; what differs is around it:
///
/// One launch. Tiles of 256 outputs of all weights (q, k and v) are numbered through; or, with kSwiglu, a
/// block has the same tile of gate and of up, one per group of 8 warps, and writes silu(gate) up alone.
///
/// One wave. The cluster of a tile has as many blocks as all clusters fit on the GPU at once (joint_plan.h),
/// and a block takes several parts of the columns where that is fewer than there are parts.
///
/// No barrier between a group's parts: its x of all parts is loaded at once, and a lane goes on with its row
/// from part to part. Then the sums of the groups are added, in order, and those of the cluster's blocks.
///
/// Before griddepcontrol.wait: for a constant weight (SparseWeight::constant), its offsets are read, its
/// first chunks are loaded and the next ones prefetched into L2, so that memory is busy while earlier kernels
/// end. Only x needs the wait.

namespace tessera::ops::sparse {

template <class T>
struct SellJointArgs {
  SellWeight<T> weights[kJointWeights];
  SellInputs<T> x;
  int count;   // weights
  int blocks;  // of a cluster
  int steps;   // parts of a group
  int early;   // chunks of a warp and part that are prefetched before the wait
};

template <class T, class Shape, bool kSwiglu>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    multiply_joint_slices(const __grid_constant__ SellJointArgs<T> args) {
  constexpr int kTokens = Shape::kTokens, kAhead = Shape::kAhead, kGroups = Shape::kGroups;
  static_assert(!kSwiglu || kGroups == 2);
  extern __shared__ __align__(16) char memory[];
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, slice = warp % 8,
            group = warp / 8, thread = int(threadIdx.x) % kWindow;
  const int rank = int(blockIdx.x) % args.blocks, tile = int(blockIdx.x) / args.blocks;
  const int w = kSwiglu ? group : weight_of_tile(args.weights, args.count, tile);
  const SellWeight<T> weight = pick(args.weights, w);
  const int window = kSwiglu ? tile : tile - weight.first_tile;
  // Parts first_part ... first_part + parts - 1 of the columns.
  const int first_part = kSwiglu ? rank * args.steps : (rank * kGroups + group) * args.steps,
            parts = max(0, min(args.steps, args.x.parts - first_part));
  // x of (kGroups, steps), then the sums of the groups
  const uint32_t x_bytes = uint32_t(args.x.width + 8) * Shape::kBytes;
  char* const inputs = memory + uint32_t(group * args.steps) * x_bytes;
  float* const all_sums = reinterpret_cast<float*>(memory + uint32_t(kGroups * args.steps) * x_bytes);

  // Where the chunks of this slice begin: lane p has those of the group's part p.
  const int64_t first_slice = (int64_t(window) * args.x.parts + first_part) * 8 + slice;
  if (!weight.constant) gpu::grid_dependency_wait();
  int begins = 0, counts = 0;
  if (lane < parts) {
    begins = weight.offsets[first_slice + lane * 8];
    counts = weight.offsets[first_slice + lane * 8 + 1] - begins;
  }
  SellChunk ahead[kAhead];
  const uint4* values = nullptr;
  const uint32_t* gaps = nullptr;
  int chunks = 0;
  const auto open = [&](int p) {
    const int begin = __shfl_sync(0xFFFFFFFFu, begins, p);
    chunks = __shfl_sync(0xFFFFFFFFu, counts, p);
    values = weight.values + int64_t(begin) * kWarp + lane;
    gaps = weight.gaps + int64_t(begin) * kWarp + lane;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      ahead[a] = {};
      if (a < chunks) ahead[a].load(values + a * kWarp, gaps + a * kWarp);
    }
  };
  open(0);
  if (weight.constant && lane < parts) {
    const int loaded = lane == 0 ? kAhead : 0, asked = min(counts, args.early) - loaded;
    const int64_t from = int64_t(begins + loaded) * kWarp;
    if (asked > 0) {
      gpu::bulk_prefetch_l2(weight.values + from, uint32_t(asked) * kWarp * uint32_t(sizeof(uint4)));
      gpu::bulk_prefetch_l2(weight.gaps + from, uint32_t(asked) * kWarp * uint32_t(sizeof(uint32_t)));
    }
  }
  gpu::grid_dependency_wait();

  for (int p = 0; p < parts; ++p)
    load_inputs<T, Shape>(inputs + uint32_t(p) * x_bytes, args.x, weight.gate, first_part + p, thread);
  __syncthreads();
  const int row = int(weight.rows[(int64_t(window) * 8 + slice) * 8 + lane / 4] >> lane % 4 * 8 & 0xFF);
  float sum[kTokens] = {};
  for (int p = 0; p < parts; ++p) {
    if (p > 0) open(p);
    uint32_t place = gpu::shared_address(inputs + uint32_t(p) * x_bytes);
    const uint32_t end = place + uint32_t(args.x.width) * Shape::kBytes;
    for (int c = 0; c < chunks; c += kAhead) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        // Past the last chunk come empty ones: no branch ends the straight line.
        add_chunk<T, Shape>(sum, ahead[a], place);
        place = min(place, end);
        const int next = c + kAhead + a;
        ahead[a] = {};
        if (next < chunks) ahead[a].load(values + next * kWarp, gaps + next * kWarp);
      }
    }
  }
  constexpr int kCount = kTokens * kWindow;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) all_sums[group * kCount + t * kWindow + row] = sum[t];
  __syncthreads();
  if constexpr (kGroups > 1 && !kSwiglu)
    for (int i = int(threadIdx.x); i < kCount; i += Shape::kThreads)
#pragma unroll
      for (int g = 1; g < kGroups; ++g) all_sums[i] += all_sums[g * kCount + i];
  const Output<T> to = pick(args.weights, kSwiglu ? 0 : w).to;
  visit_in_cluster(args.x.tokens * kWindow, args.blocks, [&](int i) {
    const int output = window * kWindow + i % kWindow;
    if (output >= to.out) return;
    float value = add_blocks(all_sums + i, args.blocks);
    if constexpr (kSwiglu) value = swiglu_value(value, add_blocks(all_sums + kCount + i, args.blocks));
    to.store(i / kWindow, output, value);
  });
}

}  // namespace tessera::ops::sparse
