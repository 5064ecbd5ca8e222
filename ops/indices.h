#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace tessera::ops {

/// The elements of a packed i64 or i32 tensor as 64-bit numbers, for kernels on either side: one kernel
/// serves both widths.
struct Indices {
  explicit Indices(const Tensor& packed) : data(packed.raw()), wide(packed.dtype() == DType::i64) {}
  TESSERA_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }

  const void* data;
  bool wide;
};

/// Positions of `count` indices within [0, rows), grouped by row and ascending within each: those of row r
/// are order[first[r]] ... order[first[r + 1] - 1].
struct IndexGroups {
  IndexGroups(const Indices& index, int64_t count, int64_t rows)
      : first(size_t(rows) + 1, 0), order(size_t(count)) {
    for (int64_t n = 0; n < count; ++n) first[size_t(index[n]) + 1] += 1;
    for (size_t row = 0; row < size_t(rows); ++row) first[row + 1] += first[row];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t n = 0; n < count; ++n) order[size_t(next[size_t(index[n])]++)] = n;
  }

  std::vector<int64_t> first, order;
};

}  // namespace tessera::ops
