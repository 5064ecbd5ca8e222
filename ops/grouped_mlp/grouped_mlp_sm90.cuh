#pragma once

#include "gpu/barrier.cuh"
#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/activation/activation_approx.cuh"
#include "ops/grouped_mlp/grouped_mlp_kernels.h"

/// Shared by forward and backward of the heads: one operand of 128 or so rows stays in shared memory for many
/// tiles of the other, which is streamed through a pipeline. Two or three consumer warpgroups take whole
/// tiles in turn, so that the MMAs of one overlap the epilogues of the others; stages are consumed in the
/// order of the tiles, so no other synchronisation is needed.

namespace tessera::ops {

inline constexpr int kHeadDepth = 64;  // k per chunk: one box of 128 bytes
inline constexpr int kHeadChunks = 8;  // D up to 512
inline constexpr int kMostHeadOut = 3;

/// Threads of a block: warpgroup 0 is the producer, the others are consumers.
constexpr int head_threads(int consumers) {
  return (1 + consumers) * 128;
}

/// Order barrier of the consumer warpgroups, by named barriers. A warpgroup may wait for a stage of the
/// pipeline only when the one before it has waited for all of its own: a barrier identifies phases by parity
/// alone, and a warpgroup that skips a tile would take an old phase for its own.
template <int kConsumers>
struct OrderBarrier {
  static constexpr int kFirstBarrier = 5;
  int consumer;

  __device__ __forceinline__ explicit OrderBarrier(int consumer) : consumer(consumer) {
    if (consumer == kConsumers - 1) pass();  // warpgroup 0 begins
  }
  __device__ __forceinline__ void wait() const { gpu::sync_named(kFirstBarrier + consumer, 256); }
  __device__ __forceinline__ void pass() const { gpu::arrive_named(kFirstBarrier + next(consumer), 256); }
  static __device__ __forceinline__ int next(int next_consumer) {
    return next_consumer + 1 == kConsumers ? 0 : next_consumer + 1;
  }
  /// Tiles until this warpgroup's next one, if warpgroup `next_consumer` takes the next tile.
  __device__ __forceinline__ int ahead(int next_consumer) const {
    return consumer >= next_consumer ? consumer - next_consumer : consumer - next_consumer + kConsumers;
  }
};

/// Pipeline state of the streamed operand: `at` counts its chunks; stage and phase parity follow from it.
template <int kStages>
struct StreamState {
  uint32_t at = 0;
  __device__ __forceinline__ int stage() const { return int(at % kStages); }
  __device__ __forceinline__ uint32_t parity() const { return at / kStages & 1; }
};

/// Barriers of the resident operand, by chunks: filled for one unit of work, released after its last tile.
struct Resident {
  gpu::Barrier full[kHeadChunks], empty[kHeadChunks];

  __device__ __forceinline__ void init(int consumers) {
    for (int chunk = 0; chunk < kHeadChunks; ++chunk) {
      full[chunk].init(1);
      empty[chunk].init(consumers);
    }
  }
  /// Called by a consumer without a tile of this unit: releases the operand, but only after it has landed;
  /// otherwise the arrival would count for the unit before.
  __device__ __forceinline__ void pass(uint32_t parity, int chunks, bool is_leader) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      full[chunk].wait(parity);
      if (is_leader) empty[chunk].arrive();
    }
  }
};

/// MMAs of one tile by one warpgroup: d[i] = rows 64 i ... of `a` times `b`^T over `chunks` chunks.
/// Chunks of `a` are kABytes apart, of b kBBytes; one of them is the resident operand (kResidentA), the other
/// a stage of the ring.
template <class T, int kMBlocks, int kN, int kStages, bool kResidentA>
struct TileGemm {
  static constexpr int kABytes = kMBlocks * 64 * 128, kBBytes = kN * 128;

  /// `release`: this is the warpgroup's last tile of the unit.
  template <int kConsumers>
  static __device__ __forceinline__ void run(float (&d)[kMBlocks][kN / 2], uint32_t a_tile, uint32_t b_tile,
                                             Resident& resident, uint32_t resident_parity, bool release,
                                             gpu::Ring<kStages>& ring, StreamState<kStages>& stream,
                                             const OrderBarrier<kConsumers>& order, int chunks) {
    using enum gpu::TileOrder;
    const bool is_leader = threadIdx.x % 128 == 0;
    order.wait();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      resident.full[chunk].wait(resident_parity);
      ring.full[stream.stage()].wait(stream.parity());
      const int a_at = kResidentA ? chunk : stream.stage(), b_at = kResidentA ? stream.stage() : chunk;
      const uint64_t a = gpu::tile_descriptor<k_major>(a_tile + uint32_t(a_at * kABytes));
      const uint64_t b = gpu::tile_descriptor<k_major>(b_tile + uint32_t(b_at * kBBytes));
      gpu::warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < kHeadDepth / 16; ++step)
#pragma unroll
        for (int i = 0; i < kMBlocks; ++i)
          gpu::wgmma<T, k_major, k_major>(d[i],
                                          a + step * gpu::kDescriptorStep<k_major> + i * (64 * 128 >> 4),
                                          b + step * gpu::kDescriptorStep<k_major>, chunk > 0 || step > 0);
      gpu::warpgroup_commit();
      if (chunk > 0) {
        gpu::warpgroup_wait<1>();
        if (is_leader) {
          ring.empty[(stream.at - 1) % kStages].arrive();
          if (release) resident.empty[chunk - 1].arrive();
        }
      }
      ++stream.at;
    }
    order.pass();
    gpu::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) gpu::warpgroup_fence_operand(d[i]);
    if (is_leader) {
      ring.empty[(stream.at - 1) % kStages].arrive();
      if (release) resident.empty[chunks - 1].arrive();
    }
  }
};

/// Calls f with the kind as a constant: the branch is outside the loop over accumulators.
template <class F>
__device__ __forceinline__ void with_activation(Activation kind, F&& f) {
  switch (kind) {
    case Activation::silu:
      return f.template operator()<Activation::silu>();
    case Activation::relu:
      return f.template operator()<Activation::relu>();
    case Activation::relu_squared:
      return f.template operator()<Activation::relu_squared>();
    case Activation::gelu:
      return f.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return f.template operator()<Activation::gelu_tanh>();
    default:
      return f.template operator()<Activation::none>();
  }
}

/// Number of parts into which the tiles of a unit are split, so that the waves of blocks take the least time;
/// a part costs `overhead` tiles in addition to its own.
inline int choose_splits(int64_t units, int64_t tiles, int blocks, double overhead) {
  int best = 1;
  double best_time = 1e300;
  for (int splits = 1; splits <= 16 && splits <= tiles; ++splits) {
    const double time =
        double(gpu::ceil_div(units * splits, blocks)) * (double(gpu::ceil_div(tiles, splits)) + overhead);
    if (time < best_time * 0.98) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

}  // namespace tessera::ops
