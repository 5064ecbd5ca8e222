#pragma once

#include "ops/matmul/gemm.h"

/// The row "wgmma" of products: 16-bit operands on compute capability 9.0 (gemm_sm90.cuh).

namespace tessera::ops {

/// How a product is cut up. A function of the problem and the number of SMs alone.
struct ProductChoice {
  int tile = 0;             // of kProductTiles
  int splits = 1;           // parts of k, summed in their order
  int whole = 0;            // the tiles (of a cluster) that are not split
  bool by_threads = false;  // gemm_sm90_sum.cuh: splits, an f32 d, or one that the copy engine cannot write
  double seconds = 0;       // what the model says
};

/// Rows and columns of a block's tile, blocks of a cluster, whether warpgroups take turns, stages of the
/// ring; whether it can add another 16-bit matrix to d by the copy engine, and whether its threads can write
/// d (192 accumulators leave them no registers); how much longer than the tensor cores' own time 64 of k
/// take, and the clocks between one tile and the next (both measured).
struct ProductTileShape {
  int rows, columns, cluster;
  bool ping_pong;
  int stages;
  bool adds, by_threads;
  double slack, between;
};
inline constexpr ProductTileShape kProductTiles[] = {
    {128, 128, 1, true, 5, true, true, 1.08, 150},    {128, 128, 2, true, 5, true, true, 1.07, 150},
    {128, 192, 1, true, 4, false, false, 1.00, 650},  {128, 192, 2, true, 4, false, false, 1.00, 650},
    {128, 256, 1, false, 4, false, true, 1.00, 3000}, {256, 128, 1, false, 4, false, true, 1.00, 3000},
    {64, 64, 1, true, 8, true, true, 1.25, 150},
};

/// What the row needs and the problem lacks, or an empty string.
std::string gemm_sm90_lacks(const Gemm& gemm, Device device);
/// Only if it lacks nothing. `tile` -1: the best by the model.
ProductChoice choose_product(const Gemm& gemm, int multiprocessors, int tile = -1);
/// Whether the row is expected to be no slower than cuBLASLt.
bool gemm_sm90_pays(const Gemm& gemm, Device device);
/// Row "wgmma".
void gemm_wgmma(const Gemm& gemm, Device device);

/// T: bf16 or f16, the dtype of a and b.
template <class T>
void product_sm90(const Gemm& gemm, const ProductChoice& choice, Device device);

}  // namespace tessera::ops
