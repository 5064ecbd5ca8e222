#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Rows of `table` [V, C] named by `indices` [...] (i64 or i32): y [..., C], y[i] = table[indices[i]].
/// Backward: dtable[v] = sum of dy[i] over the i with indices[i] = v, added in the order of i; rows that no
/// index names are 0.
///
/// table is floating, of any layout; y has its dtype, values unchanged. dtable is f32 (f64 for f64), summed
/// in that, on the CPU in f64; a gradient of that dtype that is there already is added to in place, of which
/// only the named rows are touched. Kept for backward: indices. An index outside [0, V): on the CPU an error
/// that names its position and value; on a GPU, where the host does not wait to look, that row of y is NaN
/// and its gradient goes nowhere. Throws for shapes, dtypes or devices that do not fit, and for 2^31 - 1 or
/// more rows of table or indices.
Tensor embedding(const Tensor& table, const Tensor& indices, Site site = Site::here());

/// The share of it that a rank has whose `table` [P, C] is rows first ... first + P of a table of `rows`
/// rows: y[i] = table[indices[i] - first], zeros where the index is another rank's. Summed over ranks it is
/// the embedding. An index outside [0, rows) is an error as above. Inference only: throws if a gradient would
/// be needed.
Tensor embedding_share(const Tensor& table, const Tensor& indices, int64_t first, int64_t rows,
                       Site site = Site::here());

}  // namespace tessera::ops
