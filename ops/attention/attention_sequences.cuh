#pragma once

#include "ops/attention/attention_kernels.h"

/// How a kernel finds its sequence when lengths live on the device.
///
/// A launch is sized by what the host knows: N rows and S sequences. Cut into tiles of R rows, sequence s
/// gets the slots from starts[s] / R + s on: the next one's begin at least ceil(length / R) later, and N / R
/// + S + 1 slots hold all (the last sequence stands for the padding rows). So no plan is made, nothing is
/// counted, and the slot of a tile is known from one number; a block finds its sequence by a search of a
/// warp, 32 places a step, and leaves at once if its slot is one of those (at most one a sequence) that hold
/// no tile.

namespace tessera::ops {

/// The sequence of a tile. Fixed lengths: of batch b, from row 0 on.
struct AttentionSequence {
  int index, q_first, queries, k_first, keys;
  int tile;       // of the side that was asked for
  bool has_tile;  // false: the slot holds none, and nothing else here means anything
};

/// What each lane knows of its sequence's slots in the order of the longest.
struct SequenceOrder {
  int before, tiles;
};

struct CuSeqlens {
  const void *q = nullptr, *k = nullptr;  // null: fixed lengths
  bool wide = false;                      // i64
  int count = 0;                          // sequences; that of index `count` are the padding rows
  int q_rows = 0, k_rows = 0;             // of all

  TESSERA_HD bool packed() const { return q != nullptr; }
  /// Tiles, or with sequences slots of tiles, of so many rows.
  TESSERA_HD int64_t slots(int64_t length, int64_t tile_rows) const {
    return packed() ? length / tile_rows + count + 1 : (length + tile_rows - 1) / tile_rows;
  }

  /// Where sequence s starts, and for s = count + 1 where the padding rows end. In [0, rows] whatever the
  /// tensor holds.
  __device__ __forceinline__ int start(const void* starts, int rows, int s) const {
    if (s > count) return rows;
    const int64_t value = wide ? __ldg(static_cast<const long long*>(starts) + s)
                               : int64_t(__ldg(static_cast<const int*>(starts) + s));
    return int(value < 0 ? 0 : (value < rows ? value : rows));
  }

  /// Sequence s, and one of its tiles.
  template <bool kQueries>
  __device__ __forceinline__ AttentionSequence sequence(int s, int tile, int tile_rows) const {
    AttentionSequence found;
    found.index = s;
    found.q_first = start(q, q_rows, s);
    found.k_first = start(k, k_rows, s);
    found.queries = max(0, start(q, q_rows, s + 1) - found.q_first);
    found.keys = max(0, start(k, k_rows, s + 1) - found.k_first);
    found.tile = tile;
    const int length = kQueries ? found.queries : found.keys;
    found.has_tile = unsigned(tile) < unsigned((length + tile_rows - 1) / tile_rows);
    // Padding rows do not attend to each other.
    if (s == count) (kQueries ? found.keys : found.queries) = 0;
    return found;
  }

  /// The sequence that has that slot of tiles of `tile_rows` queries (kQueries) or keys. All lanes of a warp
  /// call it together.
  template <bool kQueries>
  __device__ __forceinline__ AttentionSequence find(int slot, int tile_rows) const {
    const int lane = int(threadIdx.x) % 32;
    const void* const own = kQueries ? q : k;
    const int rows = kQueries ? q_rows : k_rows;
    int low = 0, end = count + 1;  // the last whose slots begin at or before `slot` is in [low, end)
    while (end - low > 1) {
      const int step = (end - low + 31) / 32, s = low + lane * step;
      const bool before = s < end && (lane == 0 || start(own, rows, s) / tile_rows + s <= slot);
      const int last = 31 - __clz(int(__ballot_sync(0xFFFFFFFFu, before)));
      end = min(end, low + (last + 1) * step);
      low += last * step;
    }
    const int first = kQueries ? start(q, q_rows, low) : start(k, k_rows, low);
    return sequence<kQueries>(low, slot - first / tile_rows - low, tile_rows);
  }

  /// The same, but slots go to the sequences in another order, in which no tile has more to walk than the one
  /// before: a grid that takes them in turn ends evenly. That order is known where the sequences and the rows
  /// past the last sequence are one for each lane; more are taken in order. All lanes of a warp call both
  /// functions; the first does not need the slot.
  template <bool kQueries>
  __device__ __forceinline__ SequenceOrder order(int tile_rows) const {
    SequenceOrder own{0, 0};
    if (count >= 32) return own;
    const int lane = int(threadIdx.x) % 32;
    int walked = 0;
    if (lane <= count) {
      const AttentionSequence mine = sequence<kQueries>(lane, 0, tile_rows);
      walked = kQueries ? mine.keys : mine.queries;
      own.tiles = ((kQueries ? mine.queries : mine.keys) + tile_rows - 1) / tile_rows;
    }
#pragma unroll 4
    for (int other = 0; other <= count; ++other) {
      const int other_walked = __shfl_sync(0xFFFFFFFFu, walked, other);
      const int other_tiles = __shfl_sync(0xFFFFFFFFu, own.tiles, other);
      if (other_walked > walked || (other_walked == walked && other < lane)) own.before += other_tiles;
    }
    return own;
  }
  template <bool kQueries>
  __device__ __forceinline__ AttentionSequence find_in(const SequenceOrder& order, int slot,
                                                       int tile_rows) const {
    if (count >= 32) return find<kQueries>(slot, tile_rows);
    const unsigned lanes =
        __ballot_sync(0xFFFFFFFFu, order.before <= slot && slot < order.before + order.tiles);
    if (lanes == 0) return {};
    const int found = __ffs(int(lanes)) - 1;
    return sequence<kQueries>(found, slot - __shfl_sync(0xFFFFFFFFu, order.before, found), tile_rows);
  }
};

inline CuSeqlens cu_seqlens(const AttentionProblem& problem, const Tensor& q, const Tensor& k) {
  CuSeqlens starts;
  if (!problem.packed()) return starts;
  starts.q = problem.cu_seqlens_q.raw();
  starts.k = problem.cu_seqlens_k.raw();
  starts.wide = problem.cu_seqlens_q.dtype() == DType::i64;
  starts.count = int(problem.cu_seqlens_q.size(0)) - 1;
  starts.q_rows = int(q.size(1));
  starts.k_rows = int(k.size(1));
  return starts;
}

}  // namespace tessera::ops
