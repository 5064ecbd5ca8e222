#pragma once

#include "ops/sparse_linear/gated.cuh"

/// y = gate(x) W^T for up to 8 tokens where W lies column by column: variants "columns" (every element of a
/// column) and "tiles" (Tiled-CBC: bitmaps, and the elements that are stored).
///
/// A block has 256 outputs and one of the ranges that a cluster of up to 8 blocks cuts the inputs into. It
/// reads its range of x, 1024 or 2048 inputs at a time, and writes those that count for one of the tokens,
/// with each token's value (0 where that token's own gate is closed), to a list in shared memory, in
/// ascending order: each warp votes on a part of the range, and one scan over the warps' counts places the
/// parts. Then the warps take the list's entries in turn; a lane has 8 neighbouring outputs, 16 bytes of a
/// dense column, and keeps their sums in f32 registers. At the end the block adds its warps in order, and the
/// cluster its blocks, in order, through distributed shared memory: no workspace, no atomics, no second
/// launch. Which warp adds which input depends on x alone, so bits repeat; the grid depends on the shapes
/// alone.
///
/// Bound by memory: 2 bytes per element of a column that counts. Compaction costs each block its range of x,
/// read once from L2 by every tile of outputs: in / 8 x 2 bytes against in / 8 x 512 of weights.

namespace tessera::ops::sparse {

inline constexpr int kColumnThreads = 256, kColumnWarps = kColumnThreads / kWarp, kTileOutputs = 256;

/// The tokens' inputs.
template <class T>
struct ColumnInputs {
  const T* x;
  int64_t stride;
  int tokens, in;
};

template <class T>
struct ColumnArgs {
  Output<T> to;
  ColumnInputs<T> x;
  DeviceGate gate;
  int range, blocks;  // range: inputs of a block of the cluster
  const T* values;
  int64_t column_stride;           // columns
  const uint32_t *bitmaps, *info;  // tiles
  const int32_t* offsets;
  int group_columns;
};

/// Inputs of one pass over x, per warp and lane.
template <int kTokens>
inline constexpr int kListSteps = kTokens >= 4 ? 4 : 8;
template <int kTokens>
inline constexpr int kListInputs = kListSteps<kTokens>* kColumnThreads;

/// The list of the inputs that count, and, when they are multiplied, the sums of the warps and of the block.
template <int kTokens>
struct ColumnShared {
  struct List {
    int input[kListInputs<kTokens>];
    alignas(16) float x[kListInputs<kTokens>][kTokens];
  };
  struct Sums {
    alignas(16) float of_warps[kColumnWarps][kTileOutputs];
    alignas(16) float of_block[kTokens][kTileOutputs];
  };
  union {
    List list;
    Sums sums;
  };
  int counts[kColumnWarps];
};

/// Fills the list with those of the inputs begin ... end - 1 that count. Returns their number. Called by
/// kColumnThreads threads, of which this is the one of index `thread`; sync() is a barrier among them, and
/// the last is after the list is written.
template <class T, int kTokens, class Sync>
__device__ __forceinline__ int list_inputs(ColumnShared<kTokens>& shared, const ColumnInputs<T>& inputs,
                                           const DeviceGate& gate, int begin, int end, int thread,
                                           Sync&& sync) {
  constexpr int kSteps = kListSteps<kTokens>;
  const int lane = thread % kWarp, warp = thread / kWarp, first = begin + warp * (kSteps * kWarp) + lane;
  float x[kSteps][kTokens];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int j = first + s * kWarp;
      x[s][t] = j < end && t < inputs.tokens ? float(inputs.x[t * inputs.stride + j]) : 0.0f;
    }
  unsigned votes[kSteps];
  int count = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int j = first + s * kWarp;
    bool any = false;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const bool counts = j < end && t < inputs.tokens && gate.counts(t, j, x[s][t]);
      if (!counts) x[s][t] = 0;
      any |= counts;
    }
    votes[s] = __ballot_sync(0xFFFFFFFFu, any);
    count += __popc(votes[s]);
  }
  sync();  // the list before is multiplied
  if (lane == 0) shared.counts[warp] = count;
  sync();
  int at = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kColumnWarps; ++w) {
    if (w == warp) at = all;
    all += shared.counts[w];
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int place = at + __popc(votes[s] & ((1u << lane) - 1));
    if (votes[s] >> lane & 1) {
      shared.list.input[place] = first + s * kWarp;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) shared.list.x[place][t] = x[s][t];
    }
    at += __popc(votes[s]);
  }
  sync();
  return all;
}

template <int kTokens>
__device__ __forceinline__ void add_column(float (&sum)[kTokens][8], const float (&weight)[8],
                                           const float (&x)[kTokens]) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[t][i] += weight[i] * x[t];
}

/// Adds the warps' sums in order, into shared.sums.of_block. Lane l has the outputs 8 l ... 8 l + 7 of the
/// tile. Called as list_inputs is.
template <int kTokens, class Sync>
__device__ __forceinline__ void add_warps(ColumnShared<kTokens>& shared, const float (&sum)[kTokens][8],
                                          int thread, Sync&& sync) {
  const int lane = thread % kWarp, warp = thread / kWarp;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    sync();  // the list, or the token before, is read
    float4* const mine = reinterpret_cast<float4*>(&shared.sums.of_warps[warp][lane * 8]);
    mine[0] = {sum[t][0], sum[t][1], sum[t][2], sum[t][3]};
    mine[1] = {sum[t][4], sum[t][5], sum[t][6], sum[t][7]};
    sync();
    float total = shared.sums.of_warps[0][thread];
#pragma unroll
    for (int w = 1; w < kColumnWarps; ++w) total += shared.sums.of_warps[w][thread];
    shared.sums.of_block[t][thread] = total;
  }
}

/// Adds the warps' sums, then those of the cluster's blocks, and stores the results.
template <class T, int kTokens>
__device__ __forceinline__ void finish_columns(ColumnShared<kTokens>& shared, const ColumnArgs<T>& args,
                                               int first, const float (&sum)[kTokens][8]) {
  add_warps<kTokens>(shared, sum, int(threadIdx.x), [] { __syncthreads(); });
  reduce_cluster(&shared.sums.of_block[0][0], args.x.tokens * kTileOutputs, args.blocks,
                 [&](int i, float value) {
                   const int row = first + i % kTileOutputs;
                   if (row < args.to.out) args.to.store(i / kTileOutputs, row, value);
                 });
}

/// Adds the columns of the list's entries, which the warps take in turn. kAhead columns are on the way per
/// warp; a slot is filled again as soon as it was used. `mine`: the lane's outputs of column 0, of which
/// `left` exist.
template <class T, int kTokens, int kAhead>
__device__ __forceinline__ void add_listed(float (&sum)[kTokens][8], const ColumnShared<kTokens>& shared,
                                           int count, const T* mine, int64_t column_stride, int left,
                                           int warp) {
  gpu::Words<T> words[kAhead];
  const auto load = [&](int a, int entry) {
    if (entry >= count || left <= 0) return;
    const T* const column = mine + shared.list.input[entry] * column_stride;
    words[a] = left >= 8 ? gpu::load_no_allocate(column) : gpu::load_part(column, left);
  };
#pragma unroll
  for (int a = 0; a < kAhead; ++a) load(a, warp + a * kColumnWarps);
  for (int base = warp; base < count; base += kColumnWarps * kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int entry = base + a * kColumnWarps;
      if (entry >= count) break;
      float weight[8], x[kTokens];
      gpu::unpack(weight, words[a]);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) x[t] = shared.list.x[entry][t];
      add_column<kTokens>(sum, weight, x);
      load(a, entry + kColumnWarps * kAhead);
    }
  }
}

template <class T, int kTokens, int kAhead, int kBlocks>
__global__ void __launch_bounds__(kColumnThreads, kBlocks) multiply_columns(const ColumnArgs<T> args) {
  __shared__ ColumnShared<kTokens> shared;
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int first = int(blockIdx.x) / args.blocks * kTileOutputs,
            from = int(blockIdx.x) % args.blocks * args.range, until = min(args.x.in, from + args.range);
  const int left = args.to.out - (first + lane * 8);  // outputs of this lane that exist
  const T* const mine = args.values + first + lane * 8;
  gpu::grid_dependency_wait();

  float sum[kTokens][8] = {};
  for (int begin = from; begin < until; begin += kListInputs<kTokens>) {
    const int count =
        list_inputs<T, kTokens>(shared, args.x, args.gate, begin, min(until, begin + kListInputs<kTokens>),
                                int(threadIdx.x), [] { __syncthreads(); });
    add_listed<T, kTokens, kAhead>(sum, shared, count, mine, args.column_stride, left, warp);
  }
  finish_columns<T, kTokens>(shared, args, first, sum);
}

/// Tiled-CBC. Lane l has rows 8 l ... 8 l + 7 of a column tile: one byte of its bitmaps, and as many values,
/// next to each other, as the byte has bits. Where they start is a scan over the eight words of the tile. The
/// values of a tile, up to 512 bytes from any place on, are read by aligned packs, one per lane, and pass
/// through shared memory, where a lane finds its own; kAhead tiles at a time per warp.
inline constexpr int kTileWords = (tiled_cbc::kGroupRows + 8) / 8;  // packs that a tile can touch

template <class T, int kTokens, int kAhead, int kBlocks>
__global__ void __launch_bounds__(kColumnThreads, kBlocks) multiply_tiles(const ColumnArgs<T> args) {
  __shared__ ColumnShared<kTokens> shared;
  __shared__ gpu::Words<T> staged[kColumnWarps][kAhead][kTileWords];
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int group_row = int(blockIdx.x) / args.blocks, first = group_row * kTileOutputs,
            from = int(blockIdx.x) % args.blocks * args.range, until = min(args.x.in, from + args.range);
  const unsigned below = (1u << (lane % 4 * 8)) - 1;  // bits of the word that are other lanes', lower ones
  gpu::grid_dependency_wait();

  float sum[kTokens][8] = {};
  for (int begin = from; begin < until; begin += kListInputs<kTokens>) {
    const int count =
        list_inputs<T, kTokens>(shared, args.x, args.gate, begin, min(until, begin + kListInputs<kTokens>),
                                int(threadIdx.x), [] { __syncthreads(); });
    for (int base = warp; base < count; base += kColumnWarps * kAhead) {
      uint32_t word[kAhead], info[kAhead];
      int start[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int entry = base + a * kColumnWarps;
        word[a] = 0, info[a] = 0, start[a] = 0;
        if (entry >= count) continue;
        const int j = shared.list.input[entry];
        const int64_t column = (int64_t(group_row) * args.group_columns + j / 64) * 64 + j % 64;
        word[a] = args.bitmaps[column * 8 + lane / 4];
        info[a] = args.info[column];
        start[a] = args.offsets[column / 64];
      }
      gpu::Words<T> pack[kAhead], last[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        start[a] += int(info[a] >> tiled_cbc::kCountBits);
        const int values = int(info[a] & ((1u << tiled_cbc::kCountBits) - 1));
        const int packs = values == 0 ? 0 : (start[a] % 8 + values + 7) / 8;
        const T* const aligned = args.values + start[a] / 8 * 8;
        if (lane < packs) pack[a] = gpu::load_no_allocate(aligned + lane * 8);
        if (kWarp + lane < packs) last[a] = gpu::load_no_allocate(aligned + (kWarp + lane) * 8);
      }
      __syncwarp();  // the tiles before are read
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        staged[warp][a][lane] = pack[a];
        if (lane < kTileWords - kWarp) staged[warp][a][kWarp + lane] = last[a];
      }
      __syncwarp();
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int entry = base + a * kColumnWarps;
        // Bits of the words before this lane's: lanes of one word hold the same number.
        const uint32_t own = uint32_t(__popc(word[a]));
        uint32_t before = own;
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) {
          const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, before, step);
          if (lane >= step) before += other;
        }
        int at = start[a] % 8 + int(before - own) + __popc(word[a] & below);
        const uint32_t byte = word[a] >> (lane % 4 * 8) & 0xFF;
        const T* const values = reinterpret_cast<const T*>(&staged[warp][a][0]);
        float weight[8], x[kTokens];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const bool stored = byte >> i & 1;
          const float value = float(values[min(at, kTileWords * 8 - 1)]);  // read in any case: no branch
          weight[i] = stored ? value : 0.0f;
          at += stored;
        }
        if (entry >= count) continue;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) x[t] = shared.list.x[entry][t];
        add_column<kTokens>(sum, weight, x);
      }
    }
  }
  finish_columns<T, kTokens>(shared, args, first, sum);
}

}  // namespace tessera::ops::sparse
