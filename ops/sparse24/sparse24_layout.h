#pragma once

#include <cstdint>

#include "runtime/config.h"

/// Where the elements of a 2:4 matrix lie in memory: in the order in which `wgmma.sp` of sm_90a takes its
/// fragments (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", sparse wgmma), so that each thread
/// of a warpgroup loads the 16 bytes of its A fragment and the 32-bit word of its metadata at once, with
/// all 32 lanes side by side. It is also the order in which a tensor core GEMM leaves its sums, but for
/// exchanges among four neighbouring lanes: an epilogue can write it without shared memory.
///
/// A is m x k, with groups of four along k. It is cut into tiles of 64 x 64; those of one block of 64 rows
/// lie one after the other. A tile is two steps of 32 along k (one instruction each), a step has 8 groups per
/// row. With thread t of the warpgroup, warp w = t / 32, g = t % 32 / 4, c = t % 4:
///
///   values    [m tiles][k tiles][2 steps][128 threads][8]: the pair of
///               row 16 w + g,     group c      then   row 16 w + g + 8, group c
///               row 16 w + g,     group c + 4         row 16 w + g + 8, group c + 4
///   metadata  [m tiles][k tiles][128 threads] words: lanes with c = 0, 1 hold groups 0 ... 3 and 4 ... 7 of
///             the first step (sparsity selector 0), those with c = 2, 3 of the second (selector 1). Bits
///             0 ... 15 belong to row 16 w + g, bits 16 ... 31 to row 16 w + g + 8; four bits per group: the
///             position of its first value, then of its second, ascending.
///
/// Rows and groups past the edge are zeros with positions 0 and 1. This is the layout of elements of 16 bits,
/// which wider ones (f32 and f64, that no sparse tensor core multiplies) share. 8-bit elements have another:
/// steps of 64 along k, metadata in all lanes and selector 0.

namespace tessera::ops::sparse24 {

inline constexpr int64_t kTileRows = 64, kTileDepth = 64;  // of A
inline constexpr int64_t kTileGroups = kTileDepth / 4;     // per row
inline constexpr int64_t kTileValues = kTileRows * kTileDepth / 2, kTileWords = 128;
inline constexpr int64_t kStepValues = kTileValues / 2;

/// Where the first of a group's two values lies; the second follows it. `tile`: m tile * k tiles + k tile;
/// `row` (0 ... 63) and `group` (0 ... 15) within the tile.
TESSERA_HD constexpr int64_t value_index(int64_t tile, int row, int group) {
  const int thread = row / 16 * 32 + row % 8 * 4 + group % 4, pair = row % 16 / 8 + group % 8 / 4 * 2;
  return tile * kTileValues + group / 8 * kStepValues + thread * 8 + pair * 2;
}
/// The word with a group's metadata, and its lowest bit there.
TESSERA_HD constexpr int64_t word_index(int64_t tile, int row, int group) {
  return tile * kTileWords + row / 16 * 32 + row % 8 * 4 + group / 4;
}
TESSERA_HD constexpr int word_bit(int row, int group) {
  return row % 16 / 8 * 16 + group % 4 * 4;
}

}  // namespace tessera::ops::sparse24
