#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Elements of x chosen along one dimension, as torch.gather and NumPy's take_along_axis do:
///
///   y[..., n, ...] = x[..., indices[..., n, ...], ...]
///
/// x has any dtype and layout; indices is i64 or i32, in x's shape but for dimension `dim` (negative: from
/// the end), in which it may have any size; y has its shape. To pick one number per row: take_along(log_p,
/// ops::unsqueeze(labels, -1), -1). Whole rows by number are ops::gather_rows.
///
/// dx is the sum of dy over the places that took an element: over ascending n, in f64 on the CPU and in f32
/// on a GPU, rounded once, without atomics, so that runs repeat bit for bit. (Where comparing all indices of
/// a line with all its elements takes long, a GPU goes through ops::scatter_rows, whose order is fixed, too.)
/// The indices are kept.
///
/// An index outside the dimension: on the CPU an error that names its position and value. A GPU cannot report
/// it without making the host wait, so there y is NaN (all bits set in integer dtypes), without a gradient.
Tensor take_along(const Tensor& x, const Tensor& indices, int dim, Site site = Site::here());

/// y[..., c] = 1 where indices[...] == c, else 0: indices i64 or i32 of any shape -> [..., classes] in
/// `dtype`, any of them. No gradient. An index outside [0, classes) is an error on the CPU; on a GPU its row
/// is all 0.
Tensor one_hot(const Tensor& indices, int64_t classes, DType dtype = DType::f32, Site site = Site::here());

}  // namespace tessera::ops
