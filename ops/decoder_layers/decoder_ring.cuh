#pragma once

#include "gpu/barrier.cuh"
#include "gpu/global.cuh"
#include "gpu/launch.cuh"
#include "gpu/pack.cuh"
#include "gpu/tma.cuh"
#include "ops/decoder_layers/decoder_layers_kernels.h"
#include "ops/indices.h"

/// The pipelines of decoder_layers_sm90.cuh: each warp streams the parts of the weights, and the cached keys
/// and values, that only it reads through stages of shared memory. The load cursor runs ahead of the compute
/// cursor across phase and layer boundaries: what a warp multiplies and which keys it reads is known from the
/// start; only the key of the new token depends on this launch.
///
/// What depends on how weights are stored is a class `Weights` (decoder_dense.cuh, decoder_sell.cuh), the
/// load cursor of one warp within the GEMV of a phase, with the constants and argument types of its kernel.

namespace tessera::ops::decoder {
namespace {

using gpu::kPackOf;
using gpu::kWarp;
using gpu::Words;

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kMostStages = 6;  // of each warp's ring
constexpr int kColumns = 1024;  // elements of keys, and as many of values, in a stage
constexpr int kGroup = 4;       // query heads of one attention unit at most

/// Phases of a layer, in the order in which the ring delivers their tiles.
enum Phase : int { kQkv, kKeys, kOut, kUp, kDown, kPhases };

/// What a launch needs besides its weights.
template <class T>
struct Shared {
  T* y;
  const T* x;
  const float* table;  // [P, rotary]
  Indices lengths;
  float* stream;          // [d]: x after the last residual addition
  float* qkv;             // [(H + 2 Hk) D]
  T* mixed;               // [H D]: output of the attention
  T* hidden;              // [F]
  float* partial;         // [H, splits, D]: partial results of the attention, not yet divided by their sums
  float2* stats;          // [H, splits]: largest score in units of log 2, sum
  int* barrier;           // arrivals at the grid barrier since the launch
  int* done;              // [Hk * tiles]: splits that have written their partial result
  int64_t key_stride[2];  // of tokens, heads
  int64_t table_stride;
  int columns[kPhases];  // inputs of the phase's GEMV
  int layers, d, heads, kv_heads, rotary, tiles, splits, limit;
  int stages;        // of each warp's ring
  int vector_bytes;  // of shared memory for the input vector, or for the attention
  float eps, scale;  // scale: 1 / sqrt(D) times log2(e)

  /// Units of the attention: (key head, tile of its query heads, split of the keys).
  __device__ __forceinline__ int units() const { return kv_heads * tiles * splits; }
};

template <class Weights>
struct Layer {
  using T = typename Weights::T;
  const T *norm1, *norm2;
  const T *qkv_bias, *q_norm, *k_norm;  // or null
  T *keys, *values;
  typename Weights::Layer weights;
};

/// The parameters of the kernel.
template <class Weights>
struct Args : Shared<typename Weights::T> {
  typename Weights::Plan plan;
  Layer<Weights> layer[Weights::kMaxLayers];
};

/// The keys of one attention unit. A warp takes every kWarps-th batch of them.
template <int kDim>
struct Keys {
  static constexpr int kBatch = kColumns / kDim;        // keys per stage, which holds their values too
  static constexpr int kKeysPerStep = kBatch * kWarps;  // of a block

  int kv, tile, split, length, begin, end, stored,
      used;    // stored: end of the keys in the cache; used: number of splits
  bool valid;  // the length is one that the cache can have

  template <class T>
  __device__ __forceinline__ Keys(const Shared<T>& args, int unit) {
    kv = unit % args.kv_heads;
    tile = unit / args.kv_heads % args.tiles;
    split = unit / args.kv_heads / args.tiles;
    const int64_t given = args.lengths[0];
    valid = 1 <= given && given <= args.limit;
    length = valid ? int(given) : 0;
    const int even = (length + args.splits - 1) / args.splits;
    const int keys = max((even + kBatch - 1) / kBatch * kBatch, kKeysPerStep);
    used = (length + keys - 1) / keys;
    begin = min(split * keys, length), end = min(begin + keys, length);
    stored = min(end, length - 1);
  }
};

/// Loads of elements that other blocks wrote, bypassing L1, which may hold stale copies.
template <class T>
__device__ __forceinline__ Words<T> load_fresh(const T* from) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
  return {{words.x, words.y, words.z, words.w}};
}
/// vector = `count` elements that the previous phase wrote.
template <class T>
__device__ __forceinline__ void copy_vector(T* vector, const T* from, int count) {
  for (int k = int(threadIdx.x) * kPackOf<T>; k < count; k += kThreads * kPackOf<T>)
    gpu::store_words(vector + k, load_fresh(from + k));
}

/// A warp's pipeline. A stage holds what `Weights` puts there, or (2, kBatch, kDim): keys and their values.
template <class Weights, int kDim>
class Ring {
  using T = typename Weights::T;
  static constexpr int kStageBytes = Weights::kStageBytes;
  static_assert(sizeof(T) == 2 && 2 * kColumns * int(sizeof(T)) <= kStageBytes);

 public:
  /// `memory` and `full` are the warp's own. Issues the first loads.
  __device__ __forceinline__ Ring(const Args<Weights>& args, char* memory, gpu::Barrier* full, int warp,
                                  int lane)
      : memory_(memory),
        full_(full),
        warp_(warp),
        lane_(lane),
        policy_(gpu::evict_first()),
        weights_(warp, lane) {
    if (!weights_.begin(args, 0, kQkv)) next_phase(args);
#pragma unroll 1
    for (int stage = 0; stage < args.stages; ++stage) issue(args, stage);
  }

  /// Waits for the next stage.
  __device__ __forceinline__ const char* wait() {
    full_[stage_].wait(parity_);
    return memory_ + stage_ * kStageBytes;
  }
  /// Releases the stage that wait() returned and loads into it. No lane may still read it; after keys, which
  /// cp.async copied, call fence_async_shared() first.
  __device__ __forceinline__ void refill(const Args<Weights>& args) {
    __syncwarp();
    issue(args, stage_);
    if (++stage_ == args.stages) stage_ = 0, parity_ ^= 1;
  }

 private:
  /// Keys of an attention unit that are not issued yet.
  struct KeyCursor {
    int unit, first, end, kv;
  };

  /// Moves the load cursor from the end of a phase to the next one in which this warp has work; layer ==
  /// layers at the end.
  __device__ __forceinline__ void next_phase(const Args<Weights>& args) {
    do {
      if (++phase_ == kPhases) {
        phase_ = 0;
        if (++layer_ >= args.layers) return;
      }
      if (phase_ == kKeys) keys_.unit = int(blockIdx.x);
    } while (phase_ == kKeys ? !find_keys(args) : !weights_.begin(args, layer_, phase_));
  }

  /// The first attention unit, from keys_.unit on, with keys for this warp; false if there is none.
  __device__ __forceinline__ bool find_keys(const Args<Weights>& args) {
    for (; keys_.unit < args.units(); keys_.unit += int(gridDim.x)) {
      const Keys<kDim> keys(args, keys_.unit);
      keys_.first = keys.begin + warp_ * Keys<kDim>::kBatch, keys_.end = keys.stored, keys_.kv = keys.kv;
      if (keys_.first < keys_.end) return true;
    }
    return false;
  }

  /// Issues the loads of one stage, whose last contents have been read by all lanes.
  __device__ __forceinline__ void issue(const Args<Weights>& args, int stage) {
    if (layer_ >= args.layers) return;
    char* const to = memory_ + stage * kStageBytes;
    bool more;
    if (phase_ == kKeys) {
      issue_keys(args, reinterpret_cast<T*>(to), full_[stage]);
      keys_.first += Keys<kDim>::kKeysPerStep;
      more = keys_.first < keys_.end;
      if (!more) {
        keys_.unit += int(gridDim.x);
        more = find_keys(args);
      }
    } else {
      more = weights_.issue(args, layer_, phase_, to, full_[stage], policy_);
    }
    if (!more) next_phase(args);
  }

  /// By ordinary asynchronous copies of 16 bytes, not TMA: rows of 256 bytes are too short for it.
  __device__ __forceinline__ void issue_keys(const Args<Weights>& args, T* stage, gpu::Barrier& full) {
    constexpr int kPacks = kDim / 8,
                  kRows = kWarp / kPacks;  // packs per row; rows that the warp copies at a time
    const Layer<Weights>& layer = args.layer[layer_];
    const int count = keys_.end - keys_.first, first = lane_ / kPacks;
    const int64_t from =
        keys_.kv * args.key_stride[1] + (keys_.first + first) * args.key_stride[0] + lane_ % kPacks * 8;
    const uint32_t to = gpu::shared_address(stage) + uint32_t(lane_) * 16;
#pragma unroll
    for (int row = 0; row < Keys<kDim>::kBatch; row += kRows)
      if (first + row < count) {
        const int64_t at = from + row * args.key_stride[0];
        gpu::cp_async_16(to + uint32_t(row * kDim * 2), layer.keys + at, true);
        gpu::cp_async_16(to + uint32_t((kColumns + row * kDim) * 2), layer.values + at, true);
      }
    full.cp_async_arrive();
    __syncwarp();
    if (lane_ == 0) full.arrive();
  }

  char* memory_;
  gpu::Barrier* full_;
  int warp_, lane_, layer_ = 0, phase_ = kQkv, stage_ = 0;
  uint32_t parity_ = 0;
  uint64_t policy_;  // evict_first: weights and keys are read only once
  Weights weights_;
  KeyCursor keys_{};
};

}  // namespace
}  // namespace tessera::ops::decoder
