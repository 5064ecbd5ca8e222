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

/// The gradient of take_along as an operator of its own: sums of src by number along one dimension, as
/// torch.zeros(...).scatter_add. src and indices have one shape; y has it but for `size` elements along
/// `dim`:
///
///   y[..., r, ...] = sum of src[..., n, ...] over the n with indices[..., n, ...] == r
///
/// src is floating; the sums are made as take_along makes dx (above), 0 where no index names the element.
/// dsrc = take_along(dy, indices, dim). To add to an x: x + scatter_add(src, indices, x.size(dim), dim). An
/// index outside [0, size): an error on the CPU; a GPU leaves its element out (and gives it the gradient
/// NaN).
Tensor scatter_add(const Tensor& src, const Tensor& indices, int64_t size, int dim, Site site = Site::here());

/// x with elements along one dimension replaced by those of src, as torch.scatter:
///
///   y[..., indices[..., n, ...], ...] = src[..., n, ...], elsewhere x
///
/// Of several n that name one element the largest counts. src and indices have one shape, in x's shape but
/// for `dim`; x and src have one dtype, any but f8. dx = dy where nothing was replaced, else 0; dsrc = dy of
/// the element that it replaced, 0 where a larger n did. An index outside x is an error on the CPU and left
/// out on a GPU.
Tensor scatter(const Tensor& x, const Tensor& indices, const Tensor& src, int dim, Site site = Site::here());

/// y[..., c] = 1 where indices[...] == c, else 0: indices i64 or i32 of any shape -> [..., classes] in
/// `dtype`, any of them. No gradient. An index outside [0, classes) is an error on the CPU; on a GPU its row
/// is all 0.
Tensor one_hot(const Tensor& indices, int64_t classes, DType dtype = DType::f32, Site site = Site::here());

}  // namespace tessera::ops
