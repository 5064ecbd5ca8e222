#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Among which elements of a matrix [rows, columns] the smallest are dropped.
enum class KeepWithin : uint8_t {
  row,     // of each row
  matrix,  // of the whole matrix
  group    // of each `group` consecutive elements of a row (n:m)
};

struct KeepLargest {
  KeepWithin within = KeepWithin::row;
  int64_t zeros = 0;  // elements dropped of each row, matrix or group
  int64_t group = 0;  // elements of a group; columns are a multiple of it
};

/// keep[r, c] = 0 for the `zeros` elements of smallest score of each row, matrix or group, and 1 for all
/// others: scores [rows, columns], floating, any layout -> u8 [rows, columns].
///
/// Scores are compared as f32 (others are rounded to that first). -0 is 0 and a NaN larger than +inf. Of
/// equal scores the one of lowest index, row by row, is dropped first, as a stable sort has it, so the result
/// is the same on the CPU and every GPU. A statistic: no gradient flows through it.
Tensor keep_largest(const Tensor& scores, const KeepLargest& how, Site site = Site::here());

const char* name_of(KeepWithin within);  // "row"

}  // namespace tessera::ops
