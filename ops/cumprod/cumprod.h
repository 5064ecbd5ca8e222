#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Running products along dimension `dim` (negative: from the end) of an x of any layout, in x's shape:
///
///   y_i = x_0 ... x_i        dx_i = y_(i-1) s_i, with s_i = dy_i + x_(i+1) s_(i+1)
///
/// which divides by nothing, so that an x may hold zeros.
/// A floating x gives its own dtype, multiplied in f64 and rounded once; x and the rounded y are kept. i32
/// and i64 give i64, which wraps at 2^63, without a gradient. The order of the multiplications is a function
/// of the shape alone, so runs repeat bit for bit. Throws for other dtypes and a dimension that x does not
/// have.
Tensor cumprod(const Tensor& x, int dim, Site site = Site::here());

}  // namespace tessera::ops
