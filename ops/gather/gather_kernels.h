#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// What a gather writes for an index outside the rows of x (a GPU only): every byte of the row.
enum class OutOfRange : uint8_t { zeros = 0, ones = 0xFF };

/// y[n] = x[indices[n]]
void gather_rows_cpu(const Tensor& y, const Tensor& x, const Tensor& indices);
void gather_rows_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, OutOfRange rule);
/// y[r] = sum of x[n] over the n with indices[n] == r; writes every row of y.
void scatter_rows_cpu(const Tensor& y, const Tensor& x, const Tensor& indices);
void scatter_rows_cuda(const Tensor& y, const Tensor& x, const Tensor& indices);

/// Calls `f.template operator()<Word>()` with an unsigned type of the dtype's size: rows are moved, not read.
template <class F>
void dispatch_size(DType dtype, F&& f) {
  switch (size_of(dtype)) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

/// The layout of one row (all dimensions but the first) at offset 0.
inline Layout row_layout(const Tensor& x) {
  Layout layout;
  layout.shape = x.shape().without(0);
  for (int dim = 1; dim < x.rank(); ++dim) layout.strides[size_t(dim - 1)] = x.layout().stride(dim);
  return layout;
}

}  // namespace tessera::ops
