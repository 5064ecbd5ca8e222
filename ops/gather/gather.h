#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Rows by number; a row is everything but the first dimension. `indices` is i64 or i32 of rank 1; x has any
/// strides. Nothing is saved but the indices.
///
/// An index outside [0, R): on the CPU an error that names its position and value. A GPU cannot report it
/// without making the host wait, so there the row that gather_rows makes is NaN (all bits set in integer
/// dtypes) and scatter_rows leaves that row of x out; the gradient of such a row is 0.

/// y[n] = x[indices[n]]: x [R, ...], indices [N] -> [N, ...]. Any dtype. dx = scatter_rows(dy, indices, R).
Tensor gather_rows(const Tensor& x, const Tensor& indices, Site site = Site::here());

/// y[r] = sum of x[n] over the n with indices[n] == r, rows without any are 0: x [N, ...], indices [N] ->
/// [rows, ...]. Floating dtypes. Deterministic: on the CPU, and on a GPU for up to 256 indices, the sum runs
/// over ascending n; for more over pieces of the indices sorted stably, each ascending, then over the pieces.
/// Summed in f64 on the CPU, in f32 on a GPU, rounded once. dx = gather_rows(dy, indices).
Tensor scatter_rows(const Tensor& x, const Tensor& indices, int64_t rows, Site site = Site::here());

}  // namespace tessera::ops
