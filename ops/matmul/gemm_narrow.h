#pragma once

#include "ops/matmul/gemm.h"

/// The row "narrow" of products: one of m, n and k is a few, so that memory or latency bounds them and not
/// the arithmetic (gemm_narrow.cuh, docs/ops/gemm.md). f32, bf16 and f16, any strides, any card.

namespace tessera::ops {

/// How a product is cut up. A function of the problem and the number of SMs alone.
struct NarrowChoice {
  int tile = 0;          // of kNarrowTiles
  bool swapped = false;  // d^T = b^T a^T: the tile's rows are d's columns
  int splits = 1;        // parts of k, each a block
  int group = 1;         // parts that are added up by one block
  double seconds = 0;    // what the model says
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

/// What the row needs and the problem lacks, or an empty string.
std::string gemm_narrow_lacks(const Gemm& gemm);
/// Only if it lacks nothing. `tile` -1: the best by the model.
NarrowChoice choose_narrow(const Gemm& gemm, int multiprocessors, int tile = -1);
/// Whether the row is expected to be the fastest of all.
bool gemm_narrow_pays(const Gemm& gemm, Device device);
/// Row "narrow". a may be null here: a row of ones (m = 1), so that d is the sums of b's columns.
void gemm_narrow(const Gemm& gemm, Device device);

/// T: the dtype of a and b.
template <class T>
void narrow_cuda(const Gemm& gemm, const NarrowChoice& choice, Device device);

}  // namespace tessera::ops
