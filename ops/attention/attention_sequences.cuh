#pragma once

#include "ops/attention/attention_kernels.h"

/// How a kernel finds its sequence when lengths live on the device.
///
/// A launch is sized by what the host knows: N rows and S sequences. Cut into tiles of R rows, sequence s
/// gets the slots from starts[s] / R + s on: the next one's begin at least ceil(length / R) later, and N / R
/// + S + 1 slots hold all (the last sequence stands for the rows of none). So no plan is made, nothing is
/// counted, and the slot of a tile is known from one number; a block finds its sequence by a search of a
/// warp, 32 places a step, and leaves at once if its slot is one of those (at most one a sequence) that hold
/// no tile.

namespace tessera::ops {

/// The sequence of a tile. Fixed lengths: of batch b, from row 0 on.
struct AttentionSequence {
  int index, q_first, queries, k_first, keys;
  int tile;       // of the side that was asked for
  bool has_tile;  // false: the slot holds none, and `tile` means nothing
};

struct SequenceStarts {
  const void *q = nullptr, *k = nullptr;  // null: fixed lengths
  bool wide = false;                      // i64
  int count = 0;                          // sequences; that of index `count` are the rows of none
  int q_rows = 0, k_rows = 0;             // of all

  TESSERA_HD bool packed() const { return q != nullptr; }
  /// Tiles, or with sequences slots of tiles, of so many rows.
  TESSERA_HD int64_t slots(int64_t length, int64_t tile_rows) const {
    return packed() ? length / tile_rows + count + 1 : (length + tile_rows - 1) / tile_rows;
  }

  /// Where sequence s starts, and for s = count + 1 where the rows of none end. In [0, rows] whatever the
  /// tensor holds.
  __device__ __forceinline__ int start(const void* starts, int rows, int s) const {
    if (s > count) return rows;
    const int64_t value = wide ? __ldg(static_cast<const long long*>(starts) + s)
                               : int64_t(__ldg(static_cast<const int*>(starts) + s));
    return int(value < 0 ? 0 : (value < rows ? value : rows));
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
    AttentionSequence found;
    found.index = low;
    found.q_first = start(q, q_rows, low);
    found.k_first = start(k, k_rows, low);
    found.queries = max(0, start(q, q_rows, low + 1) - found.q_first);
    found.keys = max(0, start(k, k_rows, low + 1) - found.k_first);
    found.tile = slot - (kQueries ? found.q_first : found.k_first) / tile_rows - low;
    const int length = kQueries ? found.queries : found.keys;
    found.has_tile = unsigned(found.tile) < unsigned((length + tile_rows - 1) / tile_rows);
    // The rows of none do not see each other.
    if (low == count) (kQueries ? found.keys : found.queries) = 0;
    return found;
  }
};

inline SequenceStarts sequence_starts(const AttentionProblem& problem, const Tensor& q, const Tensor& k) {
  SequenceStarts starts;
  if (!problem.packed()) return starts;
  starts.q = problem.q_starts.raw();
  starts.k = problem.k_starts.raw();
  starts.wide = problem.q_starts.dtype() == DType::i64;
  starts.count = int(problem.q_starts.size(0)) - 1;
  starts.q_rows = int(q.size(1));
  starts.k_rows = int(k.size(1));
  return starts;
}

}  // namespace tessera::ops
