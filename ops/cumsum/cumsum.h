#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Running sums along dimension `dim` (negative: from the end) of an x of any layout, in x's shape:
/// y_i = x_0 + ... + x_i, dx_i = dy_i + ... + dy_last. Nothing is saved.
///
/// A floating x gives its own dtype, summed in f64 and rounded once. bool, i32 and i64 give i64 (counts and
/// offsets; it wraps at 2^63) and have no gradient. The order of the additions is a function of the shape
/// alone, so runs repeat bit for bit. A NaN makes all sums from it on NaN. Throws for other dtypes and a
/// dimension that x does not have.
Tensor cumsum(const Tensor& x, int dim, Site site = Site::here());

}  // namespace tessera::ops
