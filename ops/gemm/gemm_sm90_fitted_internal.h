#pragma once

#include <algorithm>

/// Shared memory of fitted tiles (gemm_sm90_fitted.cuh), for the kernel and for its cost model.

namespace tessera::ops {

/// Of 227 KiB; the barriers take the first, since the stages begin on a multiple of 1024.
inline constexpr int kFittedShared = 226 * 1024;
inline constexpr int kMostFittedStages = 12;

/// 64 of k of both operands, in bytes.
constexpr int fitted_stage_bytes(int rows, int columns) {
  return (rows + columns) * 128;
}
/// After the stages: d's tile, and, where two warpgroups share k, half a sum.
constexpr int fitted_epilogue_bytes(int rows, int columns) {
  return rows * 128 * (columns / 64 + (columns == 64 ? 2 : 0));
}
/// Stages of k that fit; an even number where two warpgroups take turns.
constexpr int fitted_stages(int rows, int columns) {
  const int stages = std::min(kMostFittedStages, (kFittedShared - fitted_epilogue_bytes(rows, columns)) /
                                                     fitted_stage_bytes(rows, columns));
  return columns == 64 ? stages - stages % 2 : stages;
}

}  // namespace tessera::ops
