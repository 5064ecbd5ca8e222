#pragma once

#include "ops/attention/attention_kernels.h"

/// How a kernel finds its sequence when the lengths are in device memory.
///
/// A launch is sized by what the host knows: N rows and S sequences. Cut into tiles of R rows, sequence s
/// gets the slots from cu_seqlens[s] / R + s on: those of the next one begin at least ceil(length / R) later,
/// and N / R + S + 1 slots are enough for all (the padding rows count as a last sequence). So there is no
/// scheduling kernel and no counting, and the slot alone determines the tile; a block finds its sequence by a
/// warp-wide search, 32 entries per step, and exits at once if its slot is one of those (at most one per
/// sequence) without a tile.

namespace tessera::ops {

/// The sequence of a tile. Fixed lengths: of batch b, from row 0 on.
struct AttentionSequence {
  int index, q_first, queries, k_first, keys;
  int tile;       // index of the tile of queries, or of keys
  bool has_tile;  // false: the slot has no tile, and the other fields are undefined
};

/// The slots of the lane's sequence in the order of decreasing length.
struct SequenceOrder {
  int before, tiles;
};

struct CuSeqlens {
  const void *q = nullptr, *k = nullptr;  // null: fixed lengths
  bool wide = false;                      // i64
  int count = 0;                          // number of sequences; index `count` stands for the padding rows
  int q_rows = 0, k_rows = 0;             // rows in all

  TESSERA_HD bool packed() const { return q != nullptr; }
  /// Number of tiles, or for packed sequences of tile slots, of so many rows.
  TESSERA_HD int64_t slots(int64_t length, int64_t tile_rows) const {
    return packed() ? length / tile_rows + count + 1 : (length + tile_rows - 1) / tile_rows;
  }

  /// Where sequence s starts, and for s = count + 1 where the padding rows end. In [0, rows] whatever the
  /// tensor holds.
  __device__ __forceinline__ int start(const void* seqlens, int rows, int s) const {
    if (s > count) return rows;
    const int64_t value = wide ? __ldg(static_cast<const long long*>(seqlens) + s)
                               : int64_t(__ldg(static_cast<const int*>(seqlens) + s));
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

  /// The sequence with tile slot `slot`, for tiles of `tile_rows` queries (kQueries) or keys. All lanes of a
  /// warp call it together.
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

  /// The same, but with slots sorted such that no tile walks further than the one before: blocks that take
  /// slots in that order end at about the same time. The order is computed where the sequences and the
  /// padding rows are at most one per lane; more sequences are taken in their own order. All lanes of a warp
  /// call both functions; the first does not need the slot.
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
  CuSeqlens seqlens;
  if (!problem.packed()) return seqlens;
  seqlens.q = problem.cu_seqlens_q.raw();
  seqlens.k = problem.cu_seqlens_k.raw();
  seqlens.wide = problem.cu_seqlens_q.dtype() == DType::i64;
  seqlens.count = int(problem.cu_seqlens_q.size(0)) - 1;
  seqlens.q_rows = int(q.size(1));
  seqlens.k_rows = int(k.size(1));
  return seqlens;
}

}  // namespace tessera::ops
