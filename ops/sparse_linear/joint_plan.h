#pragma once

#include <cstdint>
#include <string>

#include "ops/variant.h"
#include "runtime/integers.h"

/// How the variants "sell_joint" and "columns_joint" cut a call into blocks: on the host, from shapes and the
/// GPU's properties alone, so that tests plan for GPUs that are not there.

namespace tessera::ops::sparse {

/// A kernel: for up to `tokens` tokens, with `groups` groups of 8 warps per block; each warp keeps `ahead`
/// chunks (sell) or columns (columns) in flight; the register limit allows `per_sm` blocks per SM. `swiglu`:
/// two weights, one per group.
struct JointShape {
  int tokens, groups, ahead, per_sm;
  bool swiglu;
};

/// As many loads in flight as registers allow without spilling; columns with SwiGLU has no shape
/// for exactly two tokens, and none for more than four. Of several shapes for the same number of
/// tokens, the one with more in flight comes first: it is used if all its blocks fit on the GPU at
/// once.
inline constexpr JointShape kSellShapes[] = {
    {1, 1, 8, 2, false}, {1, 1, 4, 4, false}, {2, 2, 8, 1, false}, {2, 2, 4, 2, false},
    {4, 2, 4, 1, false}, {4, 1, 4, 3, false}, {8, 1, 4, 3, false},  //
    {1, 2, 4, 2, true},  {2, 2, 3, 2, true},  {4, 2, 4, 1, true},  {8, 2, 4, 1, true}};
inline constexpr JointShape kColumnShapes[] = {{1, 2, 6, 2, false}, {2, 2, 3, 2, false},
                                               {4, 2, 4, 1, false}, {8, 1, 8, 1, false},  //
                                               {1, 2, 5, 2, true},  {4, 2, 4, 1, true}};

inline constexpr int kTileRows = 256;
inline constexpr int64_t kMostShared = 227 * 1024;  // bytes of a block, sm_90

/// Weights of one launch. More parts than that are several launches, each with a variant of its own.
inline constexpr int kJointWeights = 4;

/// Bytes that a launch prefetches into L2: what memory delivers in about 4 us, the time for which attention,
/// a norm or the tail of a kernel leaves it idle, and a third of the L2 of 50 MB.
inline constexpr int64_t kEarlyBytes = int64_t{16} << 20;

/// One launch. Each tile of 256 outputs has one cluster of blocks, which share the inputs.
struct JointPlan {
  int shape = 0;           // index in the table of the variant
  int tiles = 0;           // with swiglu: of one weight
  int blocks = 1;          // of a cluster
  int steps = 0;           // parts (sell) or inputs (columns) that a group has
  int early = 0;           // sell: chunks of each part and warp; columns: columns of a group
  int fits = 0;            // clusters that the GPU has room for at a time
  int64_t per_unit = 0;    // bytes of a warp's chunk or column
  int64_t shared = 0;      // sell: bytes of a block
  const char* lacks = "";  // what such a call needs and has not; empty: it can run
  int waves() const { return ceil_div(tiles, fits); }
};

/// Clusters of `blocks` blocks that fit at a time. A cluster lies within a GPC, of which an H200 has 8 with
/// 16 or 18 of its 132 SMs, so that some room is left over: of 49.5 clusters of 8 with 3 blocks per SM, 45
/// fitted.
constexpr int clusters_that_fit(int multiprocessors, int per_sm, int blocks) {
  const int slots = multiprocessors * per_sm;
  return blocks == 1 ? slots : slots * 9 / (10 * blocks);
}

/// `tiles`: of all weights of the launch, each rounded up by itself; with swiglu those of gate, or of up,
/// which has as many.
JointPlan plan_sell(int64_t tiles, int64_t in, int64_t tokens, bool swiglu, int multiprocessors);
JointPlan plan_columns(int64_t tiles, int64_t in, int64_t tokens, bool swiglu, int multiprocessors);

inline constexpr int64_t kWgmmaRows = 128, kWgmmaColumns = 512;  // of a unit; of a pass, at most

/// One launch of variant "sell_wgmma": one block per SM, each for one tile of `tokens` tokens; units of
/// work are kWgmmaRows rows in a part of the columns.
struct SellWgmmaPlan {
  int windows = 0, tokens = 0, token_tiles = 0, parts = 0;
  int passes = 1, columns = 0;  // of a part
  int apart = 0;   // columns that share a core matrix are so many from each other: a power of two
  int blocks = 1;  // for each tile of tokens
  int splits = 1;  // blocks that share rows, at most
  const char* lacks = "";
  constexpr int units() const { return windows * int(kTileRows / kWgmmaRows) * parts; }
  /// The units of the blocks for a tile of tokens are consecutive: a block's first one, and the block that
  /// has one.
  constexpr int first_unit(int block) const {
    return int(uint32_t(units()) * uint32_t(block) / uint32_t(blocks));
  }
  constexpr int block_of(int unit) const {
    return int((uint32_t(unit + 1) * uint32_t(blocks) - 1) / uint32_t(units()));
  }
  /// Blocks that share a tile of kWgmmaRows rows.
  constexpr int splits_of(int tile) const {
    return block_of((tile + 1) * parts - 1) - block_of(tile * parts) + 1;
  }
};
inline constexpr int64_t kSellWgmmaTokens = 128;  // more are decompressed: its time grows with every 64
SellWgmmaPlan plan_sell_wgmma(int64_t windows, int64_t in, int64_t tokens, int multiprocessors);
/// "48 windows of 256 outputs in 8 parts, 1 x 32 tokens, 132 blocks, 5 to 6 units of 128 rows"
std::string describe(const SellWgmmaPlan& plan);

/// One launch of variant "mma": one block per SM; units of work are strips of 16 rows in a part of the
/// columns, times tiles of `tokens` tokens.
struct MmaPlan {
  int windows = 0, parts = 0, tokens = 0, token_tiles = 0, blocks = 1;
  const char* lacks = "";
  int strips() const { return windows * (kTileRows / 16); }
};
inline constexpr int kMmaWarps = 12;       // of a block
inline constexpr int64_t kMmaTokens = 64;  // more are decompressed: its time grows with every 32
MmaPlan plan_mma(int64_t windows, int64_t in, int64_t tokens, int multiprocessors);
/// "48 windows of 256 outputs in 8 parts, 1 x 32 tokens, 132 blocks of 12 warps, up to 4 units per warp"
std::string describe(const MmaPlan& plan);

/// "43 tiles of 256 outputs of gate and up, 172 blocks of 512 threads in clusters of 4, one wave (59 clusters
/// fit), 52 KB per SM on the way"
std::string describe(const JointPlan& plan, const JointShape& shape, int multiprocessors);

}  // namespace tessera::ops::sparse
