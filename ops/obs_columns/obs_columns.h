#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// How the weights that stay are rounded: w becomes scale_i (clamp(round(w / scale_i) + zero_i, 0, levels -
/// 1) - zero_i) in row i, ties to even.
struct RoundingGrid {
  Tensor scale, zero;  // [rows], of the weights' dtype; zero holds integers. Undefined: no rounding
  int64_t levels = 0;  // 2^bits
};

struct ObsColumns {
  /// u8 [rows, columns], 0 where a weight is dropped. Undefined: of each `group` columns the `zeros` of
  /// smallest (w_ij / U_jj)^2 are dropped, w as it is when the first column of the group is reached; of equal
  /// ones the lowest index. A NaN counts as infinity.
  Tensor keep = {};
  int64_t zeros = 0, group = 0;
  RoundingGrid grid = {};
};

inline constexpr int64_t kMostObsColumns = 256;  // on a GPU: 8 per lane; 16 spill registers

/// What a block of columns became.
struct ObsBlock {
  Tensor weight;  // [rows, columns]
  Tensor error;   // [rows, columns]: (w_ij - q_ij) / U_jj, with w_ij as it was when column j was reached
};

/// Drops (and rounds) weights of a block of columns from left to right and passes each error on to the later
/// columns of the block, as optimal brain surgeon does with the factor of the inverse Hessian (Frantar,
/// Alistarh, arXiv:2301.00774, algorithm 1):
///
///   for j: q_ij = keep_ij ? round(w_ij) : 0,  error_ij = (w_ij - q_ij) / U_jj,  w_ik -= error_ij U_jk for k
///   > j
///
/// weight [rows, columns], factor U [columns, columns] upper triangular with a positive diagonal, of one
/// dtype: f32, or f64 on the CPU. At most kMostObsColumns columns on a GPU. Rows do not depend on each other.
/// Columns beyond the block: W -= error U[block, beyond] afterwards. No gradient flows through it.
ObsBlock obs_columns(const Tensor& weight, const Tensor& factor, const ObsColumns& how,
                     Site site = Site::here());

}  // namespace tessera::ops
