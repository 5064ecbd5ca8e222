#pragma once

#include <iterator>

#include "ops/gemm/gemm.h"
#include "ops/variant.h"

/// Variant "narrow" of GEMMs: one of m, n and k is small, so that memory or latency bounds them and not the
/// arithmetic (docs/ops/gemm_narrow.md). bf16 and f16 on the tensor cores (gemm_narrow_mma.cuh); f32, and
/// sums of columns, by multiply-adds (gemm_narrow.cuh). Any strides, any GPU.

namespace tessera::ops {

/// Tile and split-K of a GEMM. A function of the problem and the number of SMs only.
struct NarrowChoice {
  int tile = 0;               // of kNarrowTiles or kNarrowMmaTiles, or kNarrowTerms
  bool swapped = false;       // d^T = b^T a^T: the tile's rows are d's columns
  int splits = 1;             // split-K, each split a block
  int group = 1;              // splits that one block adds up
  int rows = 0, columns = 0;  // kNarrowTerms: per block
  bool staged = false;        // kNarrowTerms: rows leave by way of shared memory
  double seconds = 0;         // by the cost model
};

/// Rows and columns of a block's tile, and how much of k it holds at once in 16 bits (in f32 half of it).
struct NarrowTile {
  int rows, columns, depth;
};
inline constexpr NarrowTile kNarrowTiles[] = {{64, 64, 16}, {256, 4, 16},  {128, 8, 32}, {64, 16, 64},
                                              {32, 32, 64}, {16, 16, 128}, {8, 8, 256}};
constexpr int narrow_depth(const NarrowTile& tile, size_t element) {
  return tile.depth * 2 / int(element);
}
inline constexpr int kNarrowThreads = 256;

/// The tiles of 16-bit GEMMs (gemm_narrow_mma.cuh): rows, columns and depth, how many of the eight warps lie
/// along rows and along columns (the others alternate along k), blocks per SM.
struct NarrowMmaTile {
  int rows, columns, depth, down, across, resident;
};
inline constexpr NarrowMmaTile kNarrowMmaTiles[] = {{128, 64, 64, 4, 2, 2}, {128, 32, 64, 4, 2, 3},
                                                    {128, 16, 64, 8, 1, 4}, {128, 8, 64, 8, 1, 4},
                                                    {32, 32, 256, 2, 1, 2}, {32, 8, 256, 2, 1, 3}};
inline constexpr int kNarrowStages = 3;

/// The "tile" of 16-bit GEMMs with small k (gemm_narrow_terms.cuh), and their largest k.
inline constexpr int kNarrowTerms = int(std::size(kNarrowMmaTiles)), kMostTerms = 32;

/// What the variant needs and the problem lacks, or an empty string.
std::string gemm_narrow_lacks(const Gemm& gemm);
/// Whether tensor cores compute it (gemm_narrow_mma.cuh), or multiply-adds.
bool narrow_by_mma(const Gemm& gemm);
/// Only if it lacks nothing. `tile` -1: the best by the cost model. For FMA kernels, and for tensor cores.
NarrowChoice choose_narrow(const Gemm& gemm, const Gpu& gpu, int tile = -1);
NarrowChoice choose_narrow_mma(const Gemm& gemm, const Gpu& gpu, int tile = -1);
/// Variant "narrow". a may be null here: a row of ones (m = 1), so that d is the sums of b's columns.
void gemm_narrow(const Gemm& gemm, Device device);

/// T: bf16 or f16; the tile is one of kNarrowMmaTiles or kNarrowTerms, a is not null.
template <class T>
void narrow_mma_cuda(const Gemm& gemm, const NarrowChoice& choice, Device device);
/// The same of tile kNarrowTerms.
template <class T>
void narrow_terms_cuda(const Gemm& gemm, const NarrowChoice& choice, Device device);
/// T: the dtype of a and b.
template <class T>
void narrow_cuda(const Gemm& gemm, const NarrowChoice& choice, Device device);

}  // namespace tessera::ops
