#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace tessera::ops {

/// Shape and place of elements; no arithmetic, so no rounding. Dimensions, and the bounds of a slice, count
/// from the end when negative; sizes are 0 or more. Errors are those of the Tensor functions of the same
/// name.
///
/// All but concat and stack are views (reshape where the strides allow it): y shares x's storage, on
/// the tape or off it. An in-place write to either is a write to both and bumps their one version, so the
/// backward of any operator that saved either of them throws. Forward saves nothing. The gradient of a view
/// is the same view of dx (autograd/gradient.h): an operator that writes its gradient in place writes it
/// there, another tensor is copied or added there. Only expand has one of its own, since its elements
/// overlap.

/// Parts of equal shape but for `dim`, joined in order: y is new. Any dtype, the same for all parts, one
/// device. dparts are slices of dy, not copied.
Tensor concat(const std::vector<Tensor>& parts, int dim, Site site = Site::here());

/// Parts of one shape, joined along a new dimension before `dim` of theirs (dim = rank, or -1: at the end).
/// Otherwise as concat.
Tensor stack(const std::vector<Tensor>& parts, int dim = 0, Site site = Site::here());

/// Elements begin, begin + step, ... before end of dimension `dim`. dx is zero outside the slice.
Tensor slice(const Tensor& x, int dim, int64_t begin, int64_t end, int64_t step = 1,
             Site site = Site::here());

/// x cut along `dim` into parts of these sizes, which add up to x's: views, in order. The part of dx of a
/// part that was not used is zero. Sizes may be 0.
std::vector<Tensor> split(const Tensor& x, int dim, const std::vector<int64_t>& sizes,
                          Site site = Site::here());

/// Element `index` of dimension `dim`, which goes away. dx is zero elsewhere.
Tensor select(const Tensor& x, int dim, int64_t index, Site site = Site::here());

/// Dimensions a and b exchanged.
Tensor transpose(const Tensor& x, int a, int b, Site site = Site::here());

/// Dimension i of the result is dimension order[i] of x; all of them are named, once each.
Tensor permute(const Tensor& x, const std::vector<int>& order, Site site = Site::here());

/// A dimension of size 1 added before dimension `dim` (dim = rank, or -1: at the end).
Tensor unsqueeze(const Tensor& x, int dim, Site site = Site::here());

/// Dimension `dim`, of size 1, removed; throws if it has another size.
Tensor squeeze(const Tensor& x, int dim, Site site = Site::here());

/// The elements in row-major order under another shape of as many. A view where the strides allow it, else a
/// copy, whose rows are pitched if one pass can write them so.
Tensor reshape(const Tensor& x, const Shape& shape, Site site = Site::here());
/// The same for sizes of which one may be -1: what the others leave for it.
Tensor reshape(const Tensor& x, std::initializer_list<int64_t> sizes, Site site = Site::here());

/// Broadcast to `shape` with strides of 0. dx is the sum of dy over the expanded dimensions, as sum_to makes
/// it: in a fixed order, rounded once.
Tensor expand(const Tensor& x, const Shape& shape, Site site = Site::here());

}  // namespace tessera::ops
