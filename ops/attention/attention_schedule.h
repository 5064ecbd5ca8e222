#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/attention_kernels.h"
#include "runtime/integers.h"

/// Tile scheduler of the persistent sm_90a forward kernel: a block's work tiles as a function of its index.
///
/// A "job" is one work item: a tile of queries, or under a causal mask, where tiles differ in length, a pair
/// of tiles of one head (the longest and the shortest, the second longest and the second shortest, ...), so
/// that jobs take equal time. They are numbered head by head, so that concurrent blocks share keys in L2.
/// Full waves of the grid get whole jobs. The remaining jobs, less than a wave, would leave some blocks idle:
/// instead their KV blocks are distributed in equal contiguous ranges ("shares"). A tile that is split leaves
/// partial results ("pieces") in scratch memory, which a second kernel adds in key order: a fixed order, so
/// results are reproducible.

namespace tessera::ops {

struct AttentionSchedule {
  int queries = 0, keys = 0;
  int rows = 0, key_rows = 0;  // of a tile
  bool causal = false;
  int tiles = 0;       // per head
  int heads = 0;       // B * H
  int jobs = 0;        // per head
  int whole = 0;       // jobs that are not split: those of full waves, or all
  int job_blocks = 0;  // KV blocks of the longest job; all jobs count as this long
  int share = 0;       // KV blocks of the remaining jobs per thread block; at most job_blocks

  TESSERA_HD int rest() const { return jobs * heads - whole; }
  TESSERA_HD int tiles_of_job() const { return causal ? 2 : 1; }
  TESSERA_HD int job_of(int nth_tile) const { return causal ? nth_tile / 2 : nth_tile; }
  TESSERA_HD int which_of(int nth_tile) const { return causal ? nth_tile % 2 : 0; }
  /// The job's first or second tile; -1: there is no second, in the middle of an odd number.
  TESSERA_HD int tile_of(int job, int which) const {
    if (!causal) return job;
    return which == 0 ? tiles - 1 - job : (2 * job == tiles - 1 ? -1 : job);
  }
  /// Key blocks that some query of the tile sees.
  TESSERA_HD int tile_blocks(int tile) const {
    const int end = (tile + 1) * rows < queries ? (tile + 1) * rows : queries;
    return (int(visible_keys(end - 1, queries, keys, causal)) + key_rows - 1) / key_rows;
  }
  /// Index of the first KV block of a remaining job's tile among all remaining KV blocks.
  TESSERA_HD int start_of(int rest_job, int which) const {
    return rest_job * job_blocks + (which == 0 ? 0 : tile_blocks(tile_of((whole + rest_job) % jobs, 0)));
  }
};

/// A block's share touches at most two jobs of two tiles.
inline constexpr int kSplitsPerBlock = 4;

inline AttentionSchedule attention_schedule(int64_t queries, int64_t keys, int64_t heads, bool causal,
                                            int rows, int key_rows, int64_t grid) {
  AttentionSchedule schedule;
  schedule.queries = int(queries);
  schedule.keys = int(keys);
  schedule.rows = rows;
  schedule.key_rows = key_rows;
  schedule.causal = causal;
  schedule.tiles = int(ceil_div(queries, rows));
  schedule.heads = int(heads);
  schedule.jobs = causal ? (schedule.tiles + 1) / 2 : schedule.tiles;
  for (int job = 0; job < (causal ? schedule.jobs : 1); ++job) {
    const int second = causal ? schedule.tile_of(job, 1) : -1;
    schedule.job_blocks = std::max(schedule.job_blocks, schedule.tile_blocks(schedule.tile_of(job, 0)) +
                                                            (second < 0 ? 0 : schedule.tile_blocks(second)));
  }
  const int64_t all = schedule.jobs * heads, rest = all % grid;
  const int64_t share = std::max<int64_t>(1, ceil_div(rest * schedule.job_blocks, grid));
  // Pieces, and adding them, cost a block about three steps.
  const bool cut = rest > 0 && share + 3 < schedule.job_blocks && schedule.job_blocks < (1 << 20);
  schedule.whole = int(cut ? all - rest : all);
  schedule.share = cut ? int(share) : 0;
  return schedule;
}

/// One unit of work of a block: KV blocks `begin` ... `end` - 1 of a query tile.
struct AttentionWork {
  int head_row, tile;
  int begin, end;  // key blocks
  int64_t piece;   // index of the split where the partial result goes; -1: the tile is not split
};

/// The item-th unit of work of block `block` of `grid`; skips empty ones, and returns false when there are no
/// more. Items of a block: first its tiles of whole jobs (full waves, rotated), then those of its share of
/// the remaining KV blocks, at most four tiles.
TESSERA_HD bool attention_work(const AttentionSchedule& schedule, int grid, int block, int& item,
                               AttentionWork& work) {
  const int tiles_of_job = schedule.tiles_of_job();
  const int waves = ceil_div(schedule.whole, grid);
  for (;; ++item) {
    int job, which;
    if (item < waves * tiles_of_job) {
      // Tile of a whole job. Rotated by one in each wave, so that a block does not get the same tile of a
      // head in all of them: the last one of a head may be nearly empty.
      const int wave = schedule.job_of(item);
      job = wave * grid + (block + wave) % grid;
      which = schedule.which_of(item);
      if (job >= schedule.whole) return false;  // past the end, in the last wave; then no tile is split
      work.tile = schedule.tile_of(job % schedule.jobs, which);
      if (work.tile < 0) continue;
      work.begin = 0;
      work.end = schedule.tile_blocks(work.tile);
      work.piece = -1;
    } else {
      // Tile of the share: the intersection of the block's share [first, last) of the remaining KV blocks
      // with its nth tile.
      const int nth = item - waves * tiles_of_job;
      const int first = block * schedule.share, end = schedule.rest() * schedule.job_blocks;
      const int last = first + schedule.share < end ? first + schedule.share : end;
      if (first >= last || nth >= 2 * tiles_of_job) return false;
      const int rest_job = first / schedule.job_blocks + schedule.job_of(nth);
      if (rest_job >= schedule.rest()) return false;
      job = schedule.whole + rest_job;
      which = schedule.which_of(nth);
      work.tile = schedule.tile_of(job % schedule.jobs, which);
      if (work.tile < 0) continue;
      const int start = schedule.start_of(rest_job, which), blocks = schedule.tile_blocks(work.tile);
      work.begin = first > start ? first - start : 0;
      work.end = last < start + blocks ? last - start : blocks;
      if (work.begin >= work.end) continue;
      const bool alone = work.end - work.begin == blocks;
      work.piece = alone ? -1 : kSplitsPerBlock * int64_t(block) + nth;
    }
    work.head_row = job / schedule.jobs;
    return true;
  }
}

/// The partial results of a tile of a remaining job: those of blocks first ... last of the grid, in key
/// order. None if only one block worked on it, which wrote the final result, or (`blind`) no block, since no
/// query sees a key.
struct AttentionSplits {
  int head_row, tile;
  int first, last;
  bool none, blind;
  int rest_job, which;

  TESSERA_HD AttentionSplits(const AttentionSchedule& schedule, int rest_job, int which)
      : rest_job(rest_job), which(which) {
    const int job = schedule.whole + rest_job;
    head_row = job / schedule.jobs;
    tile = schedule.tile_of(job % schedule.jobs, which);
    const int blocks = tile < 0 ? 0 : schedule.tile_blocks(tile);
    const int start = schedule.start_of(rest_job, which);
    first = start / schedule.share;
    last = (start + blocks - 1) / schedule.share;
    blind = tile >= 0 && blocks == 0;
    none = tile < 0 || blind || first == last;
  }
  TESSERA_HD int64_t split_of(const AttentionSchedule& schedule, int block) const {
    const int nth =
        (rest_job - block * schedule.share / schedule.job_blocks) * schedule.tiles_of_job() + which;
    return kSplitsPerBlock * int64_t(block) + nth;
  }
};

}  // namespace tessera::ops
