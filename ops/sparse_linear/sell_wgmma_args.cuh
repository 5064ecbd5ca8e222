#pragma once

#include "gpu/barrier.cuh"
#include "ops/sparse_linear/joint.cuh"
#include "ops/sparse_linear/sell.cuh"

/// What the kernels of variant "sell_wgmma" share (sell_wgmma.cuh).

namespace tessera::ops::sparse::tiles {

constexpr int kTeams = 2, kTeamWarps = 8, kTeamThreads = kTeamWarps * kWarp, kMultiplyThreads = 4 * kWarp,
              kThreads = kTeams * kTeamThreads + kMultiplyThreads;
constexpr int kPairRows = 64, kRows = kTeams * kPairRows, kTilesOfWindow = kWindow / kRows;
static_assert(kRows == kWgmmaRows);
constexpr int kQuarters = 4;     // of a slice's chunks
constexpr int kColumnShift = 7;  // places are columns times 128
constexpr uint32_t kColumn = 1u << kColumnShift;
constexpr int kMostApart = int(kWgmmaColumns) / 8;
constexpr uint32_t kSkew = 16;  // bytes
constexpr int kTileBytes = 8 * (kMostApart * int(kColumn) + int(kSkew));
constexpr int kAhead = 5, kGapsAhead = 4;  // chunks that a warp has asked for, and distances after them
constexpr int kTeamRegisters = 88, kMultiplyRegisters = 128;  // of a thread; 96 on average
/// x comes in stages of 4 steps of k: 8 columns of each run.
constexpr int kStageSteps = 4, kStageColumns = 2 * kStageSteps;
template <int kTokens>
constexpr int kStageBytes = kTokens* kStageSteps * 32;
/// Of a pass there are up to 8, and all of them are needed until the second tile has been multiplied.
template <int kTokens>
constexpr int kStages = kTokens == 64 ? 10 : 16;

template <int kTokens>
struct Memory {
  alignas(128) char tiles[kTeams][kTileBytes];
  alignas(128) char x[kStages<kTokens>][kStageBytes<kTokens>];
  gpu::Barrier arrived[kStages<kTokens>];           // of x
  gpu::Barrier filled[kTeams], multiplied[kTeams];  // of the tiles
  /// Columns that a quarter of a slice covers, as places; of this pass and the next one.
  uint32_t covered[2][kTeams][2][kQuarters][kWarp];
  /// Where the next pass of a slice begins: the lanes' places, and the chunk, or -1 if not in that quarter.
  uint32_t places[kTeams][2][kQuarters][kWarp];
  int chunks[kTeams][2][kQuarters];
};

template <class T>
struct Args {
  SellWeight<T> weights[kJointWeights];
  SellInputs<T> x;
  SellWgmmaPlan plan;
  int count;       // weights
  bool has_gates;  // x is arranged once for each weight
  bool constant;   // all weights
  T* packed;       // (weight, tile of tokens, pass of all parts, column, token, run): x as WGMMA takes it
  float* partial;  // (tile of rows, tile of tokens, split, row of the tile, token)

  /// Bytes of x for one pass.
  __device__ __forceinline__ int64_t pass_bytes() const { return int64_t(plan.apart) * plan.tokens * 16; }
  __device__ __forceinline__ const char* packed_at(int weight, int token_tile, int part, int pass) const {
    const int64_t of =
        ((int64_t(has_gates ? weight : 0) * plan.token_tiles + token_tile) * plan.parts + part) *
            plan.passes +
        pass;
    return reinterpret_cast<const char*>(packed) + of * pass_bytes();
  }
};

/// A pass of a unit.
struct Pass {
  int tile, part, pass;

  __device__ __forceinline__ void advance(const SellWgmmaPlan& plan) {
    if (++pass < plan.passes) return;
    pass = 0;
    if (++part < plan.parts) return;
    part = 0;
    ++tile;
  }
  __device__ __forceinline__ bool ends_rows(const SellWgmmaPlan& plan) const {
    return part + 1 == plan.parts && pass + 1 == plan.passes;
  }
};

}  // namespace tessera::ops::sparse::tiles
