#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace tessera::ops {

/// A weight [out, in] that is a product of low rank plus a sparse matrix (SLTrain: Han et al.,
/// arXiv:2406.02214):
///   W[rows of part p] = scale b[rows of p] a[p r ... (p + 1) r - 1] + S
/// a [parts * r, in], b [out, r]; `rows` of each part, at least 1, which add up to out; r is b's second size.
/// S has `values` [n] at the places `support` [n], i32, row * in + column, ascending and different; n may be
/// 0.
struct SparseLowRank {
  Tensor a, b, values, support;
  std::vector<int64_t> rows;
  double scale = 1;

  int64_t out() const { return b.size(0); }
  int64_t in() const { return a.size(1); }
  int64_t rank() const { return b.size(1); }
};

/// Throws, beginning with `op`, unless the parts fit together; out * in must be below 2^31. Does not read
/// `support`.
void check_sparse_low_rank(const char* op, const SparseLowRank& w);

/// W as one matrix, in the dtype of a: the product rounded once, the sum with a value of S once more. Off the
/// tape. A place outside W: on the CPU an error, on a GPU left out.
Tensor sparse_low_rank_weight(const SparseLowRank& w, Site site = Site::here());

/// y = x W^T + bias + residual as ops::linear has them: x [..., in] -> [..., out]. One floating dtype and
/// device.
///
/// W lives during the call only; backward makes it again for dx = dy W, so that x is all of the size of
/// activations that is saved. With dW = dy^T x the gradients are
///   db[p] = scale dy_p^T (x a_p^T)     da[p] = scale (dy_p b_p)^T x     sums in f32 (f64); the inner
///   products rounded
///                                                                       to x's dtype
///   dvalues[i] = dW[support[i]]        (SDDMM) in f32 (f64)
/// dW exists in panels of at most 2^22 elements: tensor cores make a panel faster than other units its
/// sampled elements (at a density of 3 % on an H200 by some 2.5 times, on paper), and its memory does not
/// grow with W.
Tensor sparse_low_rank_linear(const Tensor& x, const SparseLowRank& w, const Tensor& bias = {},
                              const Tensor& residual = {}, Site site = Site::here());

}  // namespace tessera::ops
