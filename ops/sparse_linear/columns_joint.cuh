#pragma once

#include "ops/sparse_linear/columns.cuh"
#include "ops/sparse_linear/joint.cuh"

/// Up to kJointWeights dense_columns weights over the same x in one launch, and SwiGLU of two: variant
/// "columns_joint". List and inner loop are those of columns.cuh. A block has up to two groups of 8 warps,
/// each with a list of its own: they share the block's range of inputs, or, with kSwiglu, one has gate and
/// the other up, each under its own gate, and silu(gate) up alone is written. Blocks of 16 warps have 48 KB
/// on the way where one of 8 had 32, and all clusters are on the GPU at once (joint_plan.h).
///
/// Which columns count follows from x, so nothing is loaded ahead of griddepcontrol.wait; where all count,
/// the first ones are asked for in L2, where that is right even if a kernel ahead still writes them.

namespace tessera::ops::sparse {

template <class T>
struct ColumnWeight {
  Output<T> to;
  const T* values;
  int64_t column_stride;
  DeviceGate gate;
  int first_tile;
};

template <class T>
struct ColumnJointArgs {
  ColumnWeight<T> weights[kJointWeights];
  ColumnInputs<T> x;
  int count;   // weights
  int blocks;  // of a cluster
  int range;   // inputs of a group
  int early;   // columns of a group that are prefetched before the wait
};

template <class T, int kTokens, int kGroups, int kAhead, int kBlocks, bool kSwiglu>
__global__ void __launch_bounds__(kGroups* kColumnThreads, kBlocks)
    multiply_joint_columns(const __grid_constant__ ColumnJointArgs<T> args) {
  static_assert(!kSwiglu || kGroups == 2);
  extern __shared__ __align__(16) char memory[];
  ColumnShared<kTokens>* const groups = reinterpret_cast<ColumnShared<kTokens>*>(memory);
  gpu::launch_dependents();
  const int thread = int(threadIdx.x) % kColumnThreads, group = int(threadIdx.x) / kColumnThreads,
            lane = thread % kWarp, warp = thread / kWarp;
  const int rank = int(blockIdx.x) % args.blocks, tile = int(blockIdx.x) / args.blocks;
  const int w = kSwiglu ? group : weight_of_tile(args.weights, args.count, tile);
  const ColumnWeight<T> weight = pick(args.weights, w);
  const int first = (kSwiglu ? tile : tile - weight.first_tile) * kTileOutputs,
            from = (kSwiglu ? rank : rank * kGroups + group) * args.range,
            until = min(args.x.in, from + args.range);
  const int left = weight.to.out - (first + lane * 8);  // outputs of this lane that exist
  const T* const mine = weight.values + first + lane * 8;
  ColumnShared<kTokens>& shared = groups[group];
  const auto sync = [&] {  // two numbers instead of one that is computed: the latter takes all 16 barriers
    if (group == 0)
      gpu::sync_named(1, kColumnThreads);
    else
      gpu::sync_named(2, kColumnThreads);
  };
  if (weight.gate.is_open) {
    const uint32_t bytes = uint32_t(min(kTileOutputs, weight.to.out - first)) * uint32_t(sizeof(T)) / 16 * 16;
    if (bytes > 0)
      for (int j = from + thread; j < min(until, from + args.early); j += kColumnThreads)
        gpu::bulk_prefetch_l2(weight.values + first + j * weight.column_stride, bytes);
  }
  gpu::grid_dependency_wait();

  float sum[kTokens][8] = {};
  for (int begin = from; begin < until; begin += kListInputs<kTokens>) {
    const int count = list_inputs<T, kTokens>(shared, args.x, weight.gate, begin,
                                              min(until, begin + kListInputs<kTokens>), thread, sync);
    add_listed<T, kTokens, kAhead>(sum, shared, count, mine, weight.column_stride, left, warp);
  }
  add_warps<kTokens>(shared, sum, thread, sync);
  float* const sums = &groups[0].sums.of_block[0][0];
  float* const others = kGroups > 1 ? &groups[kGroups - 1].sums.of_block[0][0] : nullptr;
  if constexpr (kGroups > 1 && !kSwiglu) {
    __syncthreads();
    for (int i = int(threadIdx.x); i < kTokens * kTileOutputs; i += kGroups * kColumnThreads)
      sums[i] += others[i];
  }
  const Output<T> to = pick(args.weights, kSwiglu ? 0 : w).to;
  visit_in_cluster(args.x.tokens * kTileOutputs, args.blocks, [&](int i) {
    const int output = first + i % kTileOutputs;
    if (output >= to.out) return;
    float value = add_blocks(sums + i, args.blocks);
    if constexpr (kSwiglu) value = swiglu_value(value, add_blocks(others + i, args.blocks));
    to.store(i / kTileOutputs, output, value);
  });
}

}  // namespace tessera::ops::sparse
