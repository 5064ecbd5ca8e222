#pragma once

#include "gpu/barrier.cuh"
#include "gpu/global.cuh"
#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/pack.cuh"
#include "gpu/reduce.cuh"
#include "gpu/tma.cuh"
#include "ops/decoder_layers/decoder_layers_kernels.h"
#include "ops/indices.h"

/// The pipelines of decoder_layers_sm90.cu: each warp streams the tiles of weights and of cached keys and
/// values that only it reads through stages of shared memory. The load cursor runs ahead of the compute
/// cursor across phase and layer boundaries: which rows a warp multiplies and which keys it reads is known
/// from the start; only the key of the new token depends on this launch.

namespace tessera::ops::decoder {
namespace {

using gpu::kPackOf;
using gpu::kWarp;
using gpu::Words;

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kStages = 6;      // of each warp's ring
constexpr int kColumns = 1024;  // of both rows of weights in a stage
constexpr int kGroup = 4;       // query heads of one attention unit at most

/// Phases of a layer, in the order in which the ring delivers their tiles.
enum Phase : int { kQkv, kKeys, kOut, kUp, kDown, kPhases };

template <class T>
struct Layer {
  const T *norm1, *norm2;
  const T* weight[kPhases];  // weight[kKeys] is null
  T *keys, *values;
};

template <class T>
struct Args {
  T* y;
  const T* x;
  const float* table;  // [P, rotary]
  Indices lengths;
  float* stream;            // [d]: x after the last residual addition
  float* qkv;               // [(H + 2 Hk) D]
  T* mixed;                 // [H D]: output of the attention
  T* hidden;                // [F]
  float* partial;           // [H, splits, D]: partial results of the attention, not yet divided by their sums
  float2* stats;            // [H, splits]: largest score in units of log 2, sum
  int* barrier;             // arrivals at the grid barrier since the launch
  int* done;                // [Hk * tiles]: splits that have written their partial result
  int64_t stride[kPhases];  // of the weights' rows
  int64_t key_stride[2];    // of tokens, heads
  int64_t table_stride;
  int rows[kPhases], columns[kPhases];  // units of two rows; length of a row
  int layers, d, heads, kv_heads, rotary, tiles, splits, limit;
  float eps, scale;  // scale: 1 / sqrt(D) times log2(e)
  Layer<T> layer[kMaxLayers];

  /// Units of the attention: (key head, tile of its query heads, split of the keys).
  __device__ __forceinline__ int units() const { return kv_heads * tiles * splits; }
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
  __device__ __forceinline__ Keys(const Args<T>& args, int unit) {
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

/// A warp's pipeline. A stage holds (2, kColumns) elements: columns of two rows of a weight, or (2, kBatch,
/// kDim), keys and their values.
template <class T, int kDim>
class Ring {
 public:
  /// `tiles` and `full` are the warp's own. Issues the first loads.
  __device__ __forceinline__ Ring(const Args<T>& args, T* tiles, gpu::Barrier* full, int warp, int lane)
      : tiles_(tiles),
        full_(full),
        first_unit_(warp * int(gridDim.x) + int(blockIdx.x)),
        warp_(warp),
        lane_(lane),
        policy_(gpu::evict_first()),
        load_{0, kQkv, first_unit_, 0, 0, 0} {
    skip_empty_units(args);
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) issue(args, stage);
  }

  /// The warp's units of a GEMV are first_unit(), then every step()-th.
  __device__ __forceinline__ int first_unit() const {
    return first_unit_;
  }
  __device__ __forceinline__ int step() const {
    return kWarps * int(gridDim.x);
  }

  /// Waits for the next tile.
  __device__ __forceinline__ const T* wait() {
    full_[place_.stage].wait(place_.parity);
    return tiles_ + place_.stage * (2 * kColumns);
  }
  /// Releases the stage of the tile that wait() returned and loads the next tile into it. No lane may still
  /// read it; after a tile of keys, which cp.async copied, call fence_async_shared() first.
  __device__ __forceinline__ void refill(const Args<T>& args) {
    __syncwarp();
    issue(args, place_.stage);
    place_.advance();
  }

 private:
  /// Load cursor: a unit of two rows, from `column` on, or keys of an attention unit, from `column` on.
  struct Cursor {
    int layer, phase, unit, column, end, kv;
  };

  /// Moves the load cursor from the beginning of a unit to the first unit with work for this warp, in this
  /// phase or a later one; layer == layers at the end.
  __device__ __forceinline__ void skip_empty_units(const Args<T>& args) {
    while (load_.layer < args.layers) {
      if (load_.phase != kKeys) {
        load_.column = 0, load_.end = args.columns[load_.phase];
        if (load_.unit < args.rows[load_.phase]) return;  // a GEMV unit is left
      } else if (load_.unit < args.units()) {
        const Keys<kDim> keys(args, load_.unit);
        load_.column = keys.begin + warp_ * Keys<kDim>::kBatch, load_.end = keys.stored, load_.kv = keys.kv;
        if (load_.column < load_.end) return;  // an attention unit with keys for this warp
        load_.unit += int(gridDim.x);          // one without: try the next
        continue;
      }
      // No unit is left: first unit of the next phase, or of the next layer.
      if (++load_.phase == kPhases) load_.phase = 0, ++load_.layer;
      load_.unit = load_.phase == kKeys ? int(blockIdx.x) : first_unit_;
    }
  }

  /// Issues the loads of one tile into `stage`, whose last tile has been read by all lanes.
  __device__ __forceinline__ void issue(const Args<T>& args, int stage) {
    if (load_.layer >= args.layers) return;
    const bool keys = load_.phase == kKeys;
    if (keys)
      issue_keys(args, stage);
    else if (lane_ == 0)
      issue_weights(args, stage);
    load_.column += keys ? Keys<kDim>::kKeysPerStep : kColumns;
    if (load_.column < load_.end) return;
    load_.unit += keys ? int(gridDim.x) : step();
    skip_empty_units(args);
  }

  __device__ __forceinline__ void issue_weights(const Args<T>& args, int stage) {
    const T* const weight = args.layer[load_.layer].weight[load_.phase];
    // Gate and up of one feature are F rows apart; elsewhere the two rows are neighbours.
    const bool gated = load_.phase == kUp;
    const int64_t upper = gated ? load_.unit : 2 * int64_t(load_.unit);
    const int64_t lower = gated ? upper + args.rows[kUp] : upper + 1;
    const uint32_t bytes = uint32_t(min(kColumns, load_.end - load_.column)) * uint32_t(sizeof(T));
    const int64_t stride = args.stride[load_.phase];
    T* const to = tiles_ + stage * (2 * kColumns);
    full_[stage].arrive_expect(2 * bytes);
    gpu::bulk_load(to, weight + upper * stride + load_.column, bytes, full_[stage], policy_);
    gpu::bulk_load(to + kColumns, weight + lower * stride + load_.column, bytes, full_[stage], policy_);
  }

  /// By ordinary asynchronous copies of 16 bytes, not TMA: rows of 256 bytes are too short for it.
  __device__ __forceinline__ void issue_keys(const Args<T>& args, int stage) {
    constexpr int kPacks = kDim / 8,
                  kRows = kWarp / kPacks;  // packs per row; rows that the warp copies at a time
    const Layer<T>& layer = args.layer[load_.layer];
    const int count = load_.end - load_.column, first = lane_ / kPacks;
    const int64_t from =
        load_.kv * args.key_stride[1] + (load_.column + first) * args.key_stride[0] + lane_ % kPacks * 8;
    const uint32_t to = gpu::shared_address(tiles_ + stage * (2 * kColumns)) + uint32_t(lane_) * 16;
#pragma unroll
    for (int row = 0; row < Keys<kDim>::kBatch; row += kRows)
      if (first + row < count) {
        const int64_t at = from + row * args.key_stride[0];
        gpu::cp_async_16(to + uint32_t(row * kDim * 2), layer.keys + at, true);
        gpu::cp_async_16(to + uint32_t((kColumns + row * kDim) * 2), layer.values + at, true);
      }
    full_[stage].cp_async_arrive();
    __syncwarp();
    if (lane_ == 0) full_[stage].arrive();
  }

  T* tiles_;
  gpu::Barrier* full_;
  int first_unit_, warp_, lane_;
  uint64_t policy_;  // evict_first: weights and keys are read only once
  Cursor load_;
  gpu::RingState<kStages> place_;
};

}  // namespace
}  // namespace tessera::ops::decoder
