#pragma once

#include "runtime/rng.h"
#include "tensor/tensor.h"

/// Factorisations of one matrix: f64 (on the CPU only) or f32, any strides, both sizes at least 1. Computed
/// in f64 and rounded once, whatever the dtype: LAPACK on one thread on the CPU, cuSOLVER on a GPU. The host
/// waits for the result, so no graph can capture them, and no gradient flows through them.
///
/// Signs are fixed, so that CPU and GPU agree: R's diagonal is not negative, and of each left singular vector
/// the element of the largest magnitude (the first of equal ones) is positive. Singular vectors of equal
/// singular values are any orthonormal basis of their space.

namespace tessera::ops {

/// a = q r.
struct QrFactors {
  Tensor q;  // [m, k], orthonormal columns
  Tensor r;  // [k, n], upper triangular, diagonal >= 0
};
/// a [m, n] with k = min(m, n). Throws if an element of a is not finite.
QrFactors qr(const Tensor& a, Site site = Site::here());

/// a = u diag(s) vt.
struct SvdFactors {
  Tensor u;   // [m, k], orthonormal columns
  Tensor s;   // [k], descending, >= 0
  Tensor vt;  // [k, n], orthonormal rows
};
/// a [m, n] with k = min(m, n). Throws if an element of a is not finite, or if the iteration does not
/// converge.
SvdFactors svd(const Tensor& a, Site site = Site::here());

struct SketchOptions {
  int64_t oversample = 8;  // columns of the sketch beyond the rank, as far as the matrix has them
  int iterations = 2;      // of the power method, each followed by a QR
};
/// q [m, rank + oversample], orthonormal columns, whose span holds most of that of a's leading `rank` left
/// singular vectors: a random sketch a w, w uniform in [-1, 1), refined by a (a^T q) (Halko, Martinsson,
/// Tropp, arXiv:0909.4061, algorithms 4.3 and 4.4). Reserves one stream of `rng`; the GEMMs are a's own
/// dtype. Throws unless rank is from 1 to min(m, n).
Tensor range_finder(const Tensor& a, int64_t rank, const Rng& rng, const SketchOptions& options = {},
                    Site site = Site::here());

/// The leading `rank` singular triples: of the whole decomposition.
SvdFactors truncated_svd(const Tensor& a, int64_t rank, Site site = Site::here());
/// The same from the range finder's subspace (ibid., algorithm 5.1): an SVD of [rank + oversample, n].
SvdFactors truncated_svd(const Tensor& a, int64_t rank, const Rng& rng, const SketchOptions& options = {},
                         Site site = Site::here());

}  // namespace tessera::ops
