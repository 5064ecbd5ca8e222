#pragma once

#include "gpu/pack.cuh"
#include "ops/sparse_linear/gated.cuh"

/// y = gate(x) W^T for up to 8 tokens where W is sell_delta4: variant "sell".
///
/// A block has a window of 256 rows and some parts of the columns, of which each of its groups of 8 warps
/// takes one after the other; a cluster of up to 8 blocks has all of them. A warp has a slice: a lane has a
/// row and reads 16 bytes of values and one word of distances per chunk, next to its neighbours', some chunks
/// ahead, in straight-line code. A distance is added to the lane's place in x by one dot product of bytes
/// (dp4a), so an element costs four instructions: place, x from shared memory, conversion, multiply-add.
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

/// A chunk of one row.
struct SellChunk {
  uint4 values{};
  uint32_t gaps = 0;

  __device__ __forceinline__ void load(const uint4* from, const uint32_t* gaps_from) {
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "l"(from));
    asm volatile("ld.global.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(gaps) : "l"(gaps_from));
  }
};

/// The two elements of a word.
template <class T>
__device__ __forceinline__ float2 unpack_pair(uint32_t word) {
  T low, high;
  low.bits = uint16_t(word), high.bits = uint16_t(word >> 16);
  return {float(low), float(high)};
}

/// Adds value times the tokens' x at `from`.
template <class T, int kTokens>
__device__ __forceinline__ void add_entry(float (&sum)[kTokens], float value, uint32_t from) {
  if constexpr (kTokens == 1) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
    sum[0] = fmaf(value, x, sum[0]);
  } else {
    uint32_t words[kTokens / 2];
    if constexpr (kTokens == 2)
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from));
    else if constexpr (kTokens == 4)
      asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
    else
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(from));
#pragma unroll
    for (int w = 0; w < kTokens / 2; ++w) {
      const float2 x = unpack_pair<T>(words[w]);
      sum[2 * w] = fmaf(value, x.x, sum[2 * w]);
      sum[2 * w + 1] = fmaf(value, x.y, sum[2 * w + 1]);
    }
  }
}

/// `place`: of the column after the entry before, and then after the last one.
template <class T, class Shape>
__device__ __forceinline__ void add_chunk(float (&sum)[Shape::kTokens], const SellChunk& chunk,
                                          uint32_t& place) {
  const uint32_t even = chunk.gaps & 0x0F0F0F0Fu, odd = chunk.gaps >> 4 & 0x0F0F0F0Fu;
  const uint32_t words[4] = {chunk.values.x, chunk.values.y, chunk.values.z, chunk.values.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 value = unpack_pair<T>(words[w]);
    const uint32_t scale = Shape::kBytes << 8 * w;  // of the word's byte w alone
    place = __dp4a(even, scale, place);
    add_entry<T>(sum, value.x, place + 2 * w * Shape::kBytes);
    place = __dp4a(odd, scale, place);
    add_entry<T>(sum, value.y, place + (2 * w + 1) * Shape::kBytes);
  }
  place += 8 * Shape::kBytes;
}

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
  for (int i = thread; i < kTokens * kWindow; i += kWindow) sums[group][i] = 0;
  gpu::grid_dependency_wait();
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
    const int row = int(args.rows[index * 8 + lane / 4] >> lane % 4 * 8 & 0xFF);
    __syncthreads();  // the inputs before are read
    load_inputs<T, Shape>(inputs, args.x, args.gate, part, thread);
    __syncthreads();
    uint32_t place = gpu::shared_address(inputs);
    const uint32_t end = place + uint32_t(args.x.width) * Shape::kBytes;
    float sum[kTokens] = {};
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
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[group][t * kWindow + row] += sum[t];
  }
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
