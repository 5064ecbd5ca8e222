#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor/dtype.h"

/// Which tiles a persistent block of the sm_90a forward kernel works on, as a function of its index alone.
///
/// Tiles are numbered head by head, so that blocks at work share keys in L2; under a causal mask the heads
/// are taken in groups whose keys fit there, within a group the longest tiles of all heads first, and every
/// second round of the grid runs backwards, so that no block gets the longest tile of each round.
///
/// Whole rounds of the grid get whole tiles. What is left, less than a round, would occupy some blocks for a
/// tile's time and leave the others idle: instead the steps of the remaining tiles (tiles x key blocks) are
/// dealt out in equal contiguous shares. A tile that is cut leaves pieces in scratch memory, which a second
/// kernel adds in key order: a fixed order, so the numbers repeat.

namespace tessera::ops {

struct AttentionSchedule {
  int tiles = 0;   // a head
  int heads = 0;   // B * H
  int group = 1;   // heads taken together; group * tiles fits in 31 bits
  int whole = 0;   // so many tiles of all are not cut
  int blocks = 0;  // key blocks of a tile that may be cut
  int share = 0;   // key blocks of a block of the grid in the remaining tiles; at least one; at most `blocks`
  bool longest_first = false;

  TESSERA_HD int rest() const { return tiles * heads - whole; }
};

/// Pieces that a block can leave: its share touches at most two tiles.
inline constexpr int kPiecesPerBlock = 2;

inline AttentionSchedule attention_schedule(int64_t tiles, int64_t heads, int64_t key_blocks, int64_t grid,
                                            bool causal, int64_t heads_in_l2) {
  AttentionSchedule schedule;
  schedule.tiles = int(tiles);
  schedule.heads = int(heads);
  schedule.longest_first = causal;
  schedule.group = causal ? int(std::clamp<int64_t>(heads_in_l2, 1, heads)) : 1;
  const int64_t all = tiles * heads, rest = all % grid;
  // A cut costs a block the writing of its pieces, a start and an end: about two steps. Causal tiles differ
  // in length and their last round is short anyway.
  const int64_t share = std::max<int64_t>(1, (rest * key_blocks + grid - 1) / grid);
  const bool cut = !causal && rest > 0 && share + 2 < key_blocks;
  schedule.whole = int(cut ? all - rest : all);
  schedule.blocks = int(key_blocks);
  schedule.share = int(share);
  return schedule;
}

/// What a block does at one time.
struct AttentionWork {
  int head_row, tile;
  int begin, end;  // key blocks; `end` may lie behind the last
  int64_t piece;   // where the result goes as a piece; -1: the tile is whole
};

#ifdef __CUDACC__
/// The block's item-th work; false when there is none. Index and grid are read by volatile instructions, so
/// that a kernel that asks again after its loop does not keep the answer in registers through it.
__device__ __forceinline__ bool attention_work(const AttentionSchedule& schedule, int item,
                                               AttentionWork& work) {
  int grid, place;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(grid));
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(place));
  const int rounds = (schedule.whole + grid - 1) / grid;
  int index, unit = 0;
  if (item < rounds) {
    const bool backwards = schedule.longest_first && item % 2 == 1;
    index = item * grid + (backwards ? grid - 1 - place : place);
    if (index >= schedule.whole) return false;  // only where nothing is cut
    work.begin = 0;
    work.end = 0x7FFFFFFF;
    work.piece = -1;
  } else {
    // The share [unit, last) of the remaining key blocks, up to the end of the first tile in it, then the
    // rest.
    const int nth = item - rounds;
    unit = place * schedule.share;
    const int last = min(unit + schedule.share, schedule.rest() * schedule.blocks);
    if (nth > 0) unit = (unit / schedule.blocks + 1) * schedule.blocks;
    if (nth >= kPiecesPerBlock || unit >= last) return false;
    const int tile = unit / schedule.blocks;
    index = schedule.whole + tile;
    work.begin = unit - tile * schedule.blocks;
    work.end = min(schedule.blocks, work.begin + last - unit);
    work.piece = kPiecesPerBlock * place + nth;
  }
  const int group_tiles = schedule.group * schedule.tiles, group = index / group_tiles;
  const int first = group * schedule.group, in_group = index - group * group_tiles;
  if (schedule.longest_first) {
    const int heads = min(schedule.group, schedule.heads - first);
    work.head_row = first + in_group % heads;
    work.tile = schedule.tiles - 1 - in_group / heads;
  } else {
    work.head_row = first + in_group / schedule.tiles;
    work.tile = in_group % schedule.tiles;
  }
  return true;
}
#endif

}  // namespace tessera::ops
