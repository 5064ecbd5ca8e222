#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace tessera::ops {

/// Reductions of x, of any layout: over all elements, to a tensor of rank 0, or over one dimension
/// or several (negative: from the end), which go away or, with `keep`, stay with size 1.
///   sum    sum of x_i                      dx_i = dy
///   mean   sum / n                         dx_i = dy / n
///   max    largest x_i; NaN if any is NaN  dx_i = dy for the first element that is the maximum (the
///                                          first NaN if the maximum is NaN), 0 for the others
///   min    the same for the smallest       as for max
///   norm   sqrt(sum of x_i^2), L2          dx_i = dy x_i / y, and 0 where y is 0
///   logsumexp  ln(sum of e^x_i)            dx_i = dy e^(x_i - y), and 0 where y is -inf
/// Over nothing: sum and norm give 0, mean gives NaN, logsumexp gives -inf, max and min throw. "First" is in
/// row-major order.
///
/// x is floating or, for sum, max and min, i64, i32 or bool, without a gradient: sums are i64 (they wrap
/// around at 2^63), so that of a bool is a count; max and min have x's dtype, of bools any and all.
///
/// Rounding: accumulated in f64 on the CPU and in f32 on a GPU (many short partial sums, combined in a fixed
/// order, so runs repeat bit for bit), rounded once to x's dtype. Norm squares without scaling: elements
/// beyond 1.8e19 overflow on a GPU. logsumexp subtracts the largest x_i first, so nothing overflows, and
/// rounds exponentials to f32 (f64 for f64). Backward of max, min and norm keeps x and y, that of logsumexp
/// x, its maximum and the sum, of sum and mean nothing.
Tensor sum(const Tensor& x, Site site = Site::here());
Tensor sum(const Tensor& x, int dim, bool keep = false, Site site = Site::here());
Tensor sum(const Tensor& x, const std::vector<int>& dims, bool keep = false, Site site = Site::here());
Tensor mean(const Tensor& x, Site site = Site::here());
Tensor mean(const Tensor& x, int dim, bool keep = false, Site site = Site::here());
Tensor mean(const Tensor& x, const std::vector<int>& dims, bool keep = false, Site site = Site::here());
Tensor max(const Tensor& x, Site site = Site::here());
Tensor max(const Tensor& x, int dim, bool keep = false, Site site = Site::here());
Tensor max(const Tensor& x, const std::vector<int>& dims, bool keep = false, Site site = Site::here());
Tensor min(const Tensor& x, Site site = Site::here());
Tensor min(const Tensor& x, int dim, bool keep = false, Site site = Site::here());
Tensor min(const Tensor& x, const std::vector<int>& dims, bool keep = false, Site site = Site::here());
Tensor norm(const Tensor& x, Site site = Site::here());
Tensor norm(const Tensor& x, int dim, bool keep = false, Site site = Site::here());
Tensor norm(const Tensor& x, const std::vector<int>& dims, bool keep = false, Site site = Site::here());
Tensor logsumexp(const Tensor& x, Site site = Site::here());
Tensor logsumexp(const Tensor& x, int dim, bool keep = false, Site site = Site::here());
Tensor logsumexp(const Tensor& x, const std::vector<int>& dims, bool keep = false, Site site = Site::here());

/// Index along `dim` of the element that max or min takes, i64: the first of several, and the first NaN if
/// there is one. x is floating, i64 or i32. No gradient.
Tensor argmax(const Tensor& x, int dim, bool keep = false, Site site = Site::here());
Tensor argmin(const Tensor& x, int dim, bool keep = false, Site site = Site::here());

/// For backward functions, not recorded: x summed over the dimensions along which `shape` broadcasts to x's
/// shape. Accumulated as above and rounded once, to `dtype`: x's own or f32. x itself if nothing is to be
/// done.
Tensor sum_to(const Tensor& x, const Shape& shape, DType dtype, Site site = Site::here());
Tensor sum_to(const Tensor& x, const Shape& shape, Site site = Site::here());

}  // namespace tessera::ops
