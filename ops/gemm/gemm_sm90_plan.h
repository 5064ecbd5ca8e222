#pragma once

#include <iterator>

#include "ops/gemm/gemm.h"
#include "ops/variant.h"

/// Variant "wgmma" of GEMMs: 16-bit operands on compute capability 9.0 (gemm_sm90.cuh).

namespace tessera::ops {

/// Tile and split-K of a GEMM. A function of the problem and the number of SMs only.
struct GemmChoice {
  int tile = 0;             // index into kGemmTiles, kStreamTile or kFittedTile
  int splits = 1;           // split-K, added in the order of k; kStreamTile: thread blocks of a cluster
  int whole = 0;            // tiles (of a cluster) that are not split
  bool by_threads = false;  // gemm_sm90_register_store.cuh: splits, or a d that TMA cannot write
  int rows = 0;             // kStreamTile: rows of the weight per tile; kFittedTile: of d
  int columns = 0;          // kFittedTile: of d per tile, one of kFittedColumns
  int cluster = 1;          // kFittedTile: blocks that share an operand, 1 or 2
  bool along_n = false;     // kFittedTile: they share a, else b
  double seconds = 0;       // what the model says
};

/// Whether the operands are laid out like those of a weight gradient (both MN-major). What only such GEMMs
/// need (f32 d by TMA, sums of a) is compiled for no other layout.
constexpr bool product_is_gradient(bool a_k_major, bool b_k_major) {
  return !a_k_major && !b_k_major;
}

/// Whether elements of d may be computed and written twice: not where an addend is d itself.
inline bool may_write_twice(const Gemm& g) {
  return g.beta == 0 || (g.c && g.c != g.d);
}

/// Rows and columns of a block's tile, blocks per cluster, whether they are neighbours along n, ping-pong
/// (else cooperative), pipeline stages; and the epilogues that the tile has. stores, adds: TMA-store of a d
/// in the operands' dtype, without and with an addend. by_threads: register-store (176 accumulators leave no
/// registers for it). wide, wide_adds: TMA-store of an f32 d, without and with an addend (weight gradients
/// only).
struct GemmTileShape {
  int rows, columns, cluster;
  bool along_n, ping_pong;
  int stages;
  bool stores, adds, by_threads, wide, wide_adds;

  /// That multiply: cooperative tiles have 64 or 128 rows for each.
  constexpr int warpgroups() const { return !ping_pong && rows % 128 != 0 ? rows / 64 : 2; }
  constexpr int cluster_m() const { return along_n ? 1 : cluster; }
  constexpr int cluster_n() const { return along_n ? cluster : 1; }
  /// TMA boxes of an MN-major b are 64 columns wide; tiles of other widths would make them straddle lines.
  constexpr bool takes(bool a_k_major, bool b_k_major) const {
    return (b_k_major || columns % 64 == 0) && (stores || product_is_gradient(a_k_major, b_k_major));
  }
};
inline constexpr GemmTileShape kGemmTiles[] = {
    {128, 128, 1, false, true, 5, true, true, true, true, true},
    {128, 128, 2, false, true, 5, true, true, true, true, true},
    {128, 176, 1, false, true, 5, true, false, false, false, false},
    {128, 176, 2, false, true, 5, true, false, false, false, false},
    {128, 192, 1, false, true, 4, true, false, false, true, false},
    {128, 192, 2, false, true, 4, true, false, false, true, false},
    {128, 256, 1, false, false, 4, true, false, true, false, false},
    {256, 128, 1, false, false, 4, true, false, true, false, false},
    {128, 256, 2, true, false, 4, false, false, true, false, false},
    {256, 128, 2, false, false, 4, false, false, true, false, false},
    {64, 64, 1, false, true, 8, true, true, true, true, true},
    {128, 192, 1, false, false, 4, true, true, false, true, true},
    {192, 192, 1, false, false, 4, false, false, true, false, false},
    {192, 192, 2, false, false, 4, false, false, true, false, false},
};

/// The "tile" of skinny GEMMs (gemm_sm90_stream.cuh): at most kStreamTokens rows or columns of d, the tokens,
/// against the rows of the other operand, the weight.
inline constexpr int kStreamTile = int(std::size(kGemmTiles));
inline constexpr int64_t kStreamTokens = 64;
inline constexpr int64_t kStreamRows = 128;  // of the weight per tile, at most
/// Whether d's rows are the tokens, else its columns are.
bool stream_tokens_are_rows(const Gemm& gemm);
/// What the skinny kernel needs beyond gemm_sm90_lacks() and the problem lacks, or an empty string.
std::string gemm_stream_lacks(const Gemm& gemm);
/// Only if it lacks nothing. `gated`: d = silu(gate) up from n gates and n ups; d's rows are the tokens.
GemmChoice choose_stream(const Gemm& gemm, const Gpu& gpu, bool gated = false);
/// d = silu(a gate^T) (a up^T), rounded once, with b [2n, k] transposed, gate first; no alpha, beta, bias.
/// T: bf16 or f16, the dtype of a and b.
template <class T>
void swiglu_stream_sm90(const Gemm& gemm, const GemmChoice& choice, Device device);
template <class T>
void gemm_stream_sm90(const Gemm& gemm, const GemmChoice& choice, Device device);

/// The "tile" of GEMMs whose tiles have as many rows as fill whole waves (gemm_sm90_fitted.cuh).
inline constexpr int kFittedTile = kStreamTile + 1;
/// A tile's columns, and for each the most rows of a tile, so that four stages of k (with 64 columns eight)
/// fit into shared memory: multiples of 8 up to 128, of 16 above.
inline constexpr int kFittedColumns[] = {64, 128, 192};
constexpr int64_t most_fitted_rows(int columns) {
  return columns == 64 ? 112 : columns == 128 ? 208 : 144;
}
constexpr int64_t next_fitted_rows(int64_t rows) {
  return rows + (rows < 128 ? 8 : 16);
}
/// Whether there is such a tile. With 64 columns, each of two warpgroups takes every second 64 of k.
constexpr bool has_fitted_tile(const GemmChoice& choice, int64_t k) {
  const int rows = choice.rows, columns = choice.columns;
  return (columns == 64 || columns == 128 || columns == 192) && rows > 0 &&
         rows <= most_fitted_rows(columns) && rows % (rows > 128 ? 16 : 8) == 0 &&
         (columns != 64 || k > 64) && (choice.cluster == 1 || choice.cluster == 2);
}
/// What it needs beyond gemm_sm90_lacks() and the problem lacks, or an empty string.
std::string gemm_fitted_lacks(const Gemm& gemm);
/// The best by the model, of at most three waves of tiles with at most `columns` columns; 0 seconds if there
/// is none. Only if it lacks nothing.
GemmChoice choose_fitted(const Gemm& gemm, const Gpu& gpu, int columns = kFittedColumns[2]);
/// What the model says of a choice with that tile.
double fitted_seconds(const Gemm& gemm, const Gpu& gpu, const GemmChoice& choice);
template <class T>
void gemm_fitted_sm90(const Gemm& gemm, const GemmChoice& choice, Device device);

/// Whether the variant computes Gemm::sums next to the GEMM (for at most kMostSummedRows rows).
inline constexpr int64_t kMostSummedRows = 1 << 17;
bool gemm_sm90_sums(const Gemm& gemm);
/// What the variant needs and the problem lacks, or an empty string.
std::string gemm_sm90_lacks(const Gemm& gemm, const Gpu& gpu);
/// Only if it lacks nothing. `tile` -1: the best by the model. `splits`: whether k may be split.
GemmChoice choose_gemm(const Gemm& gemm, const Gpu& gpu, int tile = -1, bool splits = true);
/// Two GEMMs of weights' gradients as one launch (gemm_sm90_pair.cuh). The same m, n and k, both operands
/// MN-major, alpha 1, no bias, no batch; but `second` describes the transpose of the wanted result: its d is
/// written (or added to) with m along the rows. first.sums gets the sums of op(A)'s rows, second.sums those
/// of op(B)'s columns; each may be null. gemm_pair_pays: whether both would run in variant "wgmma", and one
/// launch is expected to be faster than two.
bool gemm_pair_pays(const Gemm& first, const Gemm& second, const Gpu& gpu);
void gemm_pair(const Gemm& first, const Gemm& second, Device device);
/// The tiles of kGemmTiles that are instantiated for pairs; `tile` -1: the best by the model.
inline constexpr int kPairTiles[] = {6, 8};
GemmChoice choose_pair(const Gemm& first, const Gpu& gpu, int tile = -1);

/// Variant "wgmma".
void gemm_wgmma(const Gemm& gemm, Device device);

/// T: bf16 or f16, the dtype of a and b.
template <class T>
void gemm_pair_sm90(const Gemm& first, const Gemm& second, const GemmChoice& choice, Device device);
template <class T>
void gemm_sm90(const Gemm& gemm, const GemmChoice& choice, Device device);

}  // namespace tessera::ops
