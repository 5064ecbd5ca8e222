#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

struct TopK {
  Tensor values;   // x's dtype, in x's shape but for k elements along the dimension
  Tensor indices;  // i64, of that shape: where along the dimension each value stood
};

/// The k largest elements along dimension `dim` (negative: from the end) of an x of any layout, which is
/// floating, i64 or i32, largest first. Of equal ones the lowest index comes first; -0 is 0 and a NaN is
/// larger than +inf, all NaN alike, as in ops::max and ops::keep_largest. 0 <= k <= size, which all are
/// sorted for. The k smallest are those of ops::neg(x).
///
/// The values are the elements themselves, bit for bit: ops::take_along(x, indices, dim), whose gradient they
/// have. The indices have none. Throws for other dtypes, k outside that range, and more than 2^32 - 1
/// elements along the dimension.
TopK topk(const Tensor& x, int64_t k, int dim = -1, Site site = Site::here());

}  // namespace tessera::ops
