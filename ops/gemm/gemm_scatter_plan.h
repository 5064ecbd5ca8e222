#pragma once

#include <cstdint>

#include "ops/gemm/gemm_sm90_plan.h"
#include "runtime/config.h"

/// Variant "wgmma scatter": a GEMM whose result is some of the rows of a larger matrix, and the zeros of the
/// other rows next to it, in one launch (gemm_sm90_scatter.cuh). The arithmetic of which block and warp
/// writes which zeros is here, so that tests on the CPU run it.

namespace tessera::ops {

/// The blocks of a grid, each with a range of the rows of d. The first `busy` blocks have one more tile of
/// the GEMM than the others, and less time.
struct FillShares {
  /// Rows of a block that has a tile less, next to 1 for one that has it: where most SMs have no tile, those
  /// write nearly all zeros, and where a few have none, the others still write most. Not measured.
  static constexpr int kIdle = 4;
  static constexpr int kWarps = 3;  // of a block: those of the producer warpgroup that issue no loads
  int blocks = 1, busy = 0;

  /// For `items` tiles that the blocks take in turn.
  static FillShares of(int64_t blocks, int64_t items) { return {int(blocks), int(items % blocks)}; }
  /// The first row of block `block`; that of block `blocks` is `rows`.
  TESSERA_HD int64_t begin(int block, int64_t rows) const {
    const auto before = [&](int some) {
      return int64_t(some < busy ? some : busy) + int64_t(some > busy ? some - busy : 0) * kIdle;
    };
    return rows * before(block) / before(blocks);
  }
  /// The first row of a warp of the block; that of warp kWarps is the next block's first.
  TESSERA_HD int64_t begin(int block, int warp, int64_t rows) const {
    const int64_t first = begin(block, rows);
    return first + (begin(block + 1, rows) - first) * warp / kWarps;
  }
};

/// Rows are looked at 32 at a time. The bit of the row `index`, if it is one of first ... first + 31.
TESSERA_HD uint32_t bit_of_row(int64_t index, int64_t first) {
  const int64_t at = index - first;
  return at >= 0 && at < 32 ? uint32_t{1} << at : 0;
}
/// The rows that are zero: those of first ... end - 1 among the 32 that are not `named`.
TESSERA_HD uint32_t rows_to_fill(uint32_t named, int64_t first, int64_t end) {
  const int64_t inside = end - first;
  return ~named & (inside >= 32 ? ~uint32_t{0} : (uint32_t{1} << inside) - 1);
}

/// Where the rows of a GEMM go.
struct GemmScatter {
  const int32_t* indices = nullptr;  // m of them, ascending, those past the last row of d at the end; null:
                                     // the first m rows
  int64_t rows = 0;                  // of d
};

/// Tiles of kGemmTiles that the variant has.
inline constexpr int kScatterTiles[] = {0, 6, 7, 10};
/// What the variant needs and a GEMM lacks, or an empty string. `gemm` describes its m rows; gemm.d is the
/// whole matrix.
std::string gemm_scatter_lacks(const Gemm& gemm, const Gpu& gpu);
/// Tile and splits. Only if it lacks nothing. `tile` -1: the best by the model.
GemmChoice choose_scatter(const Gemm& gemm, const Gpu& gpu, int tile = -1);
/// d[indices[i]] = alpha (a b)[i] and 0 in all other rows; with beta they are added to, and the others stay.
/// An index outside d is skipped. Each element is written once. T: bf16 or f16, the dtype of a and b.
template <class T>
void gemm_scatter_sm90(const Gemm& gemm, const GemmScatter& scatter, const GemmChoice& choice, Device device);
/// With the choice.
void gemm_scatter(const Gemm& gemm, const GemmScatter& scatter, Device device);

}  // namespace tessera::ops
