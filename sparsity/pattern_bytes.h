#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sparsity/features.h"
#include "sparsity/masks.h"

/// What a pattern could buy at best: bytes of its weights in formats that a kernel can read, and the share of
/// blocks that can be skipped. A bound says what memory traffic allows if nothing else costs time; it is no
/// measured speed-up.

namespace tessera::sparsity {

struct FormatBytes {
  std::string format;
  int64_t bytes = 0;
  double of_dense = 0;  // bytes / bytes of the dense matrix
  double bound = 0;     // its inverse: no kernel that reads all bytes can be faster by more
};
/// Values of 2 bytes in these formats:
///   dense
///   csr           values, column indices of 2 bytes (4 from 65,537 columns on), row starts of 4
///   bitmap        values, a bit per weight
///   column_tiles  values, tiles of 256 rows x 1 column: a bit per weight and 4 bytes per tile
///   gaps          values with the gap to the one before in the row in 4 bits; a gap above 15 needs filler
///                 values of 0
///   2:4           half of the weights with 2 bits each; left out if a group of 4 has more than 2
std::vector<FormatBytes> format_bytes(const Mask& mask);

/// Blocks of `group` features x 1 position: which share is pruned as a whole, so that it need not be read.
struct SkippedBlocks {
  std::string order;  // "given", or "exhaustive": the permutation of exhaustive_order
  int64_t group = 0;  // 1: single weights
  double share = 0;
  double bound = 0;  // 1 / (1 - share)
};
/// Of features as they are and after the permutation; groups of 1 and `group`. Features that fill no group
/// are left out.
std::vector<SkippedBlocks> skipped_blocks(const Features& features, const Tensor& overlaps, int64_t group);

}  // namespace tessera::sparsity
