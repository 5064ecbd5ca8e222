#pragma once

#include "ops/sparse_linear/gated.cuh"
#include "ops/sparse_linear/sell_chunk.cuh"

/// y = gate(x) W^T for up to 8 tokens where W is sell_delta4: variant "sell".
///
/// A block has a window of 256 rows and some parts of the columns, of which each of its groups of 8 warps
/// takes one after the other; a cluster of up to 8 blocks has all of them. A warp has a slice: a lane has a
/// row and reads 16 bytes of values and one word of distances per chunk, next to its neighbours', some chunks
/// ahead, in straight-line code (sell_chunk.cuh).
///
/// The rows of a slice have walked about as far at any time, so that their x lie next to each other: few
/// banks are read twice. One token is kept in f32; of several the 16-bit values of a column lie together and
/// are read at once.
///
/// Sums are f32, entry by entry; a block adds its groups and the cluster its blocks in order: no workspace,
/// no atomics. Bound by memory: 2.5 bytes per stored element.

namespace tessera::ops::sparse {

inline constexpr int kWindow = int(sell_delta4::kGroupRows);  // rows, and threads of a group

/// The tokens' inputs, in parts of `width`.
template <class T>
struct SellInputs {
  const T* x;
  int64_t stride;
  int tokens, in, parts, width;
};

template <class T>
struct SellArgs {
  Output<T> to;
  SellInputs<T> x;
  const uint4* values;
  const uint32_t *gaps, *rows;
  const int32_t* offsets;
  DeviceGate gate;
  int blocks;  // of the cluster
};

template <class T>
SellInputs<T> inputs_of(const Tensor& x, const SparseWeight& weight) {
  return {.x = x.data<T>(),
          .stride = x.layout().stride(0),
          .tokens = int(x.size(0)),
          .in = int(weight.in),
          .parts = int(weight.group_columns()),
          .width = int(sell_delta4::width_of(weight.in))};
}

/// How many chunks a lane has read ahead, groups of 8 warps in a block, and blocks on an SM at least.
template <int kTokensOf, int kGroupsOf, int kAheadOf, int kBlocksOf>
struct SellShape {
  static constexpr int kTokens = kTokensOf, kGroups = kGroupsOf, kAhead = kAheadOf, kBlocks = kBlocksOf,
                       kThreads = kGroups * kWindow;
  static constexpr uint32_t kBytes = kTokens == 1 ? 4 : 2 * kTokens;  // of a column of x in shared memory
  /// A row's place runs past its part by the entries of a chunk that pad it.
  static size_t shared_bytes(int width) { return size_t(kGroups) * size_t(width + 8) * kBytes; }
};

/// The inputs of a part, under the gate, and zeros past it. The threads of a group.
template <class T, class Shape>
__device__ __forceinline__ void load_inputs(char* to, const SellInputs<T>& inputs, const DeviceGate& gate,
                                            int part, int thread) {
  for (int i = thread; i < inputs.width + 8; i += kWindow) {
    const int j = part * inputs.width + i;
#pragma unroll
    for (int t = 0; t < Shape::kTokens; ++t) {
      const bool there = i < inputs.width && j < inputs.in && t < inputs.tokens;
      T x(0.0f);
      if (there) x = inputs.x[t * inputs.stride + j];
      if (there && !gate.is_open && !gate.counts(t, j, float(x))) x = T(0.0f);
      if constexpr (Shape::kTokens == 1)
        reinterpret_cast<float*>(to)[i] = float(x);
      else
        reinterpret_cast<uint16_t*>(to)[i * Shape::kTokens + t] = x.bits;
    }
  }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) multiply_slices(const SellArgs<T> args) {
  constexpr int kTokens = Shape::kTokens, kAhead = Shape::kAhead, kGroups = Shape::kGroups;
  extern __shared__ __align__(16) char memory[];
  __shared__ float sums[kGroups][kTokens * kWindow];
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, slice = warp % 8,
            group = warp / 8, thread = int(threadIdx.x) % kWindow;
  const int rank = int(blockIdx.x) % args.blocks, window = int(blockIdx.x) / args.blocks;
  const int of_block = (args.x.parts + args.blocks - 1) / args.blocks,
            of_group = (of_block + kGroups - 1) / kGroups;  // parts
  char* const inputs = memory + uint32_t(group) * uint32_t(args.x.width + 8) * Shape::kBytes;
  gpu::grid_dependency_wait();
  const int64_t slot = int64_t(window) * 8 + slice;
  const int row = int(args.rows[slot * 8 + lane / 4] >> lane % 4 * 8 & 0xFF);
  float sum[kTokens] = {};
  for (int p = 0; p < of_group; ++p) {
    const int of_group_part = group * of_group + p, part = rank * of_block + of_group_part;
    const bool there = of_group_part < of_block && part < args.x.parts;
    const int64_t index = (int64_t(window) * args.x.parts + (there ? part : 0)) * 8 + slice;
    const int begin = args.offsets[index], chunks = there ? args.offsets[index + 1] - begin : 0;
    const uint4* const values = args.values + int64_t(begin) * kWarp + lane;
    const uint32_t* const gaps = args.gaps + int64_t(begin) * kWarp + lane;
    SellChunk ahead[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (a < chunks) ahead[a].load(values + a * kWarp, gaps + a * kWarp);
    __syncthreads();  // the inputs before are read
    load_inputs<T, Shape>(inputs, args.x, args.gate, part, thread);
    __syncthreads();
    uint32_t place = gpu::shared_address(inputs);
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
#pragma unroll
  for (int t = 0; t < kTokens; ++t) sums[group][t * kWindow + row] = sum[t];
  if constexpr (kGroups > 1) {
    __syncthreads();
    for (int i = int(threadIdx.x); i < kTokens * kWindow; i += Shape::kThreads)
#pragma unroll
      for (int g = 1; g < kGroups; ++g) sums[0][i] += sums[g][i];
  }
  reduce_cluster(&sums[0][0], args.x.tokens * kWindow, args.blocks, [&](int i, float value) {
    const int row = window * kWindow + i % kWindow;
    if (row < args.to.out) args.to.store(i / kWindow, row, value);
  });
}

}  // namespace tessera::ops::sparse
