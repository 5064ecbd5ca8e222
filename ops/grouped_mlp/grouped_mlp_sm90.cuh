#pragma once

#include "gpu/barrier.cuh"
#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/activation/activation_approx.cuh"
#include "ops/grouped_mlp/grouped_mlp_kernels.h"

/// What forward and backward of the heads share: one operand of 128 or so rows stays in shared memory for
/// many tiles of the other, which streams through a ring. Two or three consumer warpgroups take whole tiles
/// in turn, so that one's products run next to the epilogues of the others; the order of the ring is the
/// order of the tiles, so they need no other agreement.

namespace tessera::ops {

inline constexpr int kHeadDepth = 64;  // k of a chunk: one box of 128 bytes
inline constexpr int kHeadChunks = 8;  // D up to 512
inline constexpr int kMostHeadOut = 3;

/// Threads of a block: warpgroup 0 copies, the others multiply.
constexpr int head_threads(int consumers) {
  return (1 + consumers) * 128;
}

/// The turns of the consumer warpgroups, as named barriers. A warpgroup may look at a stage of the ring only
/// when the one before has seen all of its own: a barrier tells phases apart by parity alone, and the one
/// that skips a tile would take an old phase for its own.
template <int kConsumers>
struct Turns {
  static constexpr int kFirstBarrier = 5;
  int me;

  __device__ __forceinline__ explicit Turns(int me) : me(me) {
    if (me == kConsumers - 1) pass();  // warpgroup 0 begins
  }
  __device__ __forceinline__ void wait() const { gpu::sync_named(kFirstBarrier + me, 256); }
  __device__ __forceinline__ void pass() const { gpu::arrive_named(kFirstBarrier + next(me), 256); }
  static __device__ __forceinline__ int next(int turn) { return turn + 1 == kConsumers ? 0 : turn + 1; }
  /// Tiles until this warpgroup's next, where the next tile of all is `turn`'s.
  __device__ __forceinline__ int ahead(int turn) const {
    return me >= turn ? me - turn : me - turn + kConsumers;
  }
};

/// Position in the stream of chunks: `tile` chunks belong to one tile.
template <int kStages>
struct StreamPlace {
  uint32_t at = 0;
  __device__ __forceinline__ int stage() const { return int(at % kStages); }
  __device__ __forceinline__ uint32_t parity() const { return at / kStages & 1; }
};

/// The operand that stays, by chunks: filled for one unit of work, emptied after its last tile.
struct Resident {
  gpu::Barrier full[kHeadChunks], empty[kHeadChunks];

  __device__ __forceinline__ void init(int consumers) {
    for (int chunk = 0; chunk < kHeadChunks; ++chunk) {
      full[chunk].init(1);
      empty[chunk].init(consumers);
    }
  }
  /// A consumer that has no tile of this unit lets it go: not before it is there, or the arrival would count
  /// for the unit before.
  __device__ __forceinline__ void pass(uint32_t parity, int chunks, bool speaker) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      full[chunk].wait(parity);
      if (speaker) empty[chunk].arrive();
    }
  }
};

/// One tile's products by one warpgroup: d[i] = rows 64 i ... of `a` times `b`^T over `chunks` chunks.
/// Chunks of `a` lie kABytes apart, of b kBBytes; one of them is the resident operand (kResidentA), the other
/// a stage of the ring.
template <class T, int kParts, int kN, int kStages, bool kResidentA>
struct TileGemm {
  static constexpr int kABytes = kParts * 64 * 128, kBBytes = kN * 128;

  /// `release`: this is the warpgroup's last tile of the unit.
  template <int kConsumers>
  static __device__ __forceinline__ void run(float (&d)[kParts][kN / 2], uint32_t a_tile, uint32_t b_tile,
                                             Resident& resident, uint32_t resident_parity, bool release,
                                             gpu::Ring<kStages>& ring, StreamPlace<kStages>& place,
                                             const Turns<kConsumers>& turns, int chunks) {
    using enum gpu::TileOrder;
    const bool speaker = threadIdx.x % 128 == 0;
    turns.wait();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      resident.full[chunk].wait(resident_parity);
      ring.full[place.stage()].wait(place.parity());
      const int a_at = kResidentA ? chunk : place.stage(), b_at = kResidentA ? place.stage() : chunk;
      const uint64_t a = gpu::tile_descriptor<k_major>(a_tile + uint32_t(a_at * kABytes));
      const uint64_t b = gpu::tile_descriptor<k_major>(b_tile + uint32_t(b_at * kBBytes));
      gpu::warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < kHeadDepth / 16; ++step)
#pragma unroll
        for (int i = 0; i < kParts; ++i)
          gpu::multiply<T, k_major, k_major>(d[i],
                                             a + step * gpu::kDescriptorStep<k_major> + i * (64 * 128 >> 4),
                                             b + step * gpu::kDescriptorStep<k_major>, chunk > 0 || step > 0);
      gpu::warpgroup_commit();
      if (chunk > 0) {
        gpu::warpgroup_wait<1>();
        if (speaker) {
          ring.empty[(place.at - 1) % kStages].arrive();
          if (release) resident.empty[chunk - 1].arrive();
        }
      }
      ++place.at;
    }
    turns.pass();
    gpu::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < kParts; ++i) gpu::pin(d[i]);
    if (speaker) {
      ring.empty[(place.at - 1) % kStages].arrive();
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

/// Into how many parts of its tiles a unit is cut, so that whole waves of blocks take least time; a part
/// costs `overhead` tiles next to its own.
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
