#pragma once

#include "gpu/mma.cuh"
#include "gpu/tma.cuh"
#include "ops/sparse_linear/gated.cuh"

/// y = gate(x) W^T for up to 32 tokens where W is TCA-BME: variant "bitmap".
///
/// A block of four warps has one row of groups (64 outputs, 16 per warp: a median) and one of the ranges of
/// groups that a cluster of up to 8 blocks cuts the inputs into. A group's values, bitmaps and `info` arrive
/// by bulk copies, up to eight groups ahead: one thread issues them, as its stage is free. Meanwhile all
/// threads bring the next 64 inputs of the tokens, under the gate, to shared memory.
///
/// Decoding goes straight to the registers of mma.m16n8k16: bits 2 l and 2 l + 1 of the four bitmaps of a
/// tile are lane l's elements of the four words of an A fragment. A lane counts one half of a bitmap, and a
/// scan over the warp says where each of the median's 32 halves starts: so a pair of elements costs one POPC,
/// and the second element of a pair lies next to the first.
///
/// Sums are f32: first along a block's range, in the accumulators, then over the cluster's blocks in order
/// (gated.cuh). Bound by memory: 2 bytes per stored element and 1/8 per element.

namespace tessera::ops::sparse {

inline constexpr int kBitmapThreads = 128, kBitmapStages = 8, kGroup = 64;
inline constexpr int kBitmapBytes = 64 * 8, kInfoBytes = 16;
inline constexpr int kXPitch = kGroup + 8;  // elements: fragments of 8 tokens lie in different banks

template <class T>
struct BitmapArgs {
  Output<T> to;
  const T *x, *values;
  const int64_t* bitmaps;
  const int32_t *offsets, *info;
  int64_t x_stride;
  DeviceGate gate;
  int tokens, in, group_columns, range, blocks;  // range: groups of a block of the cluster
  int stages, stage_bytes, bitmaps_at;           // of a stage: values, bitmaps, info
};

/// Shared memory after the stages.
template <int kTiles>
struct BitmapShared {
  gpu::Barrier full[kBitmapStages];
  alignas(16) uint16_t x[2][kTiles * 8 * kXPitch];
  float sums[kTiles * 8][kGroup];
};

/// Issues the copies of group `group` into a stage. One thread.
template <class T>
__device__ __forceinline__ void load_group(char* stage, gpu::Barrier& full, const BitmapArgs<T>& args,
                                           int64_t group, int begin, int end) {
  const uint32_t bytes = uint32_t(end - begin) * uint32_t(sizeof(T));
  full.arrive_expect(bytes + kBitmapBytes + kInfoBytes);
  if (bytes > 0) gpu::bulk_load(stage, args.values + begin, bytes, full, gpu::evict_first());
  gpu::bulk_load(stage + args.bitmaps_at, args.bitmaps + group * 64, kBitmapBytes, full, gpu::evict_first());
  gpu::bulk_load(stage + args.bitmaps_at + kBitmapBytes, args.info + group * 4, kInfoBytes, full,
                 gpu::evict_first());
}

/// 64 inputs of all tokens, under the gate; rows of tokens that are not there are 0.
template <class T, int kTiles>
struct InputTile {
  static constexpr int kPacks = kTiles * 8 * (kGroup / 8),
                       kOwn = (kPacks + kBitmapThreads - 1) / kBitmapThreads;
  gpu::Words<T> words[kOwn];

  static __device__ __forceinline__ int token_of(int own) {
    return (own * kBitmapThreads + int(threadIdx.x)) / (kGroup / 8);
  }
  static __device__ __forceinline__ int column_of(int own) {
    return (own * kBitmapThreads + int(threadIdx.x)) % (kGroup / 8) * 8;
  }
  __device__ __forceinline__ void load(const BitmapArgs<T>& args, int first) {
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int token = token_of(o), j = first + column_of(o), left = args.in - j;
      words[o] = {};
      if (token >= args.tokens || left <= 0) continue;
      const T* const from = args.x + token * args.x_stride + j;
      words[o] = left >= 8 ? gpu::load_words(from) : gpu::load_part(from, left);
    }
  }
  __device__ __forceinline__ void store(uint16_t* to, const BitmapArgs<T>& args, int first) const {
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int token = token_of(o), column = column_of(o);
      if (token >= kTiles * 8) continue;
      gpu::Words<T> kept = words[o];
      if (!args.gate.is_open && token < args.tokens) {
        float value[8];
        gpu::unpack(value, words[o]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int j = first + column + i;
          if (j < args.in && !args.gate.counts(token, j, value[i]))
            kept.word[i / 2] &= i % 2 == 0 ? 0xFFFF0000u : 0x0000FFFFu;
        }
      }
      *reinterpret_cast<gpu::Words<T>*>(to + token * kXPitch + column) = kept;
    }
  }
};

/// Adds a median [16, 64] times the tile of inputs.
template <class T, int kTiles>
__device__ __forceinline__ void multiply_median(float (&sum)[kTiles][4], const char* stage, int bitmaps_at,
                                                const uint16_t* x) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const uint32_t* const halves = reinterpret_cast<const uint32_t*>(stage + bitmaps_at) + warp * 32;
  const int32_t* const info = reinterpret_cast<const int32_t*>(stage + bitmaps_at + kBitmapBytes);
  const uint16_t* const values = reinterpret_cast<const uint16_t*>(stage) + info[warp];
  // Where the values of each half of a bitmap start.
  const int own = __popc(halves[lane]);
  int start = own;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, start, step);
    if (lane >= step) start += other;
  }
  start -= own;
  const int half = lane / 16, bit = lane % 16 * 2;  // of a bitmap
  const uint32_t below = (1u << bit) - 1;
  const uint16_t* const mine = x + lane / 4 * kXPitch + lane % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
    uint32_t a[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int index = (tile * 4 + b) * 2 + half;
      const uint32_t bits = halves[index];
      const int at = __shfl_sync(0xFFFFFFFFu, start, index) + __popc(bits & below);
      const uint32_t pair = bits >> bit & 3;
      // Both are read in any case, at most two elements past the group's values, where its bitmaps lie: a
      // branch would cost more.
      const uint32_t first = values[at], second = values[at + int(pair & 1)];
      a[b] = (pair & 1 ? first : 0) | (pair & 2 ? second << 16 : 0);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint16_t* const from = mine + n * 8 * kXPitch + tile * 16;
      gpu::mma_m16n8k16<T>(sum[n], a, *reinterpret_cast<const uint32_t*>(from),
                           *reinterpret_cast<const uint32_t*>(from + 8));
    }
  }
}

template <class T, int kTiles>
__global__ void __launch_bounds__(kBitmapThreads, 4) multiply_bitmaps(const BitmapArgs<T> args) {
  extern __shared__ __align__(128) char memory[];
  BitmapShared<kTiles>& shared =
      *reinterpret_cast<BitmapShared<kTiles>*>(memory + args.stages * args.stage_bytes);
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int group_row = int(blockIdx.x) / args.blocks, from = int(blockIdx.x) % args.blocks * args.range,
            groups = max(0, min(args.group_columns - from, args.range));
  const int64_t base = int64_t(group_row) * args.group_columns + from;
  if (threadIdx.x == 0) {
    for (int s = 0; s < args.stages; ++s) shared.full[s].init(1);
    gpu::fence_barrier_init();
  }
  __syncthreads();
  gpu::grid_dependency_wait();

  // The first groups: a thread each, so that their offsets are read at once.
  const int ahead = min(groups, args.stages);
  if (int(threadIdx.x) < ahead)
    load_group(memory + int(threadIdx.x) * args.stage_bytes, shared.full[threadIdx.x], args,
               base + threadIdx.x, args.offsets[base + threadIdx.x], args.offsets[base + threadIdx.x + 1]);
  // Thread 0 goes on with the others; it knows the offsets of the next one group ahead.
  int begin = 0, end = 0;
  if (threadIdx.x == 0 && ahead < groups) {
    begin = args.offsets[base + ahead];
    end = args.offsets[base + ahead + 1];
  }
  InputTile<T, kTiles> tile;
  tile.load(args, from * kGroup);
  tile.store(shared.x[0], args, from * kGroup);
  __syncthreads();

  float sum[kTiles][4] = {};
  int stage = 0;
  uint32_t parity = 0;
  for (int g = 0; g < groups; ++g) {
    const int next_input = (from + g + 1) * kGroup;
    if (g + 1 < groups) tile.load(args, next_input);
    shared.full[stage].wait(parity);
    multiply_median<T, kTiles>(sum, memory + stage * args.stage_bytes, args.bitmaps_at, shared.x[g % 2]);
    if (g + 1 < groups) tile.store(shared.x[(g + 1) % 2], args, next_input);
    __syncthreads();  // the stage is read, the next inputs are there
    const int refill = g + args.stages;
    if (threadIdx.x == 0 && refill < groups) {
      load_group(memory + stage * args.stage_bytes, shared.full[stage], args, base + refill, begin, end);
      begin = end;
      if (refill + 1 < groups) end = args.offsets[base + refill + 2];
    }
    if (++stage == args.stages) stage = 0, parity ^= 1;
  }

#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      shared.sums[n * 8 + lane % 4 * 2 + i % 2][warp * 16 + i / 2 * 8 + lane / 4] = sum[n][i];
  reduce_cluster(&shared.sums[0][0], args.tokens * kGroup, args.blocks, [&](int i, float value) {
    const int row = group_row * kGroup + i % kGroup;
    if (row < args.to.out) args.to.store(i / kGroup, row, value);
  });
}

}  // namespace tessera::ops::sparse
