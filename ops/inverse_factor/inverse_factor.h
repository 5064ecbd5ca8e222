#pragma once

#include <optional>

#include "tensor/tensor.h"

namespace tessera::ops {

/// The upper triangular U, diagonal positive, with (A + diag(shift))^-1 = U^T U: a symmetric [n, n], shift
/// [n], both f64 (on the CPU only) or f32 -> [n, n] of that dtype, zeros below the diagonal. Nothing if A +
/// diag(shift) is not positive definite, or U not finite, as computed. The host waits for the answer.
///
/// With A + diag(shift) = R R^T, R upper triangular (a Cholesky factor from the last row up), U is R^-1: one
/// factorisation and one triangular inverse, 2 n^3 / 3 FLOPs, instead of the three factorisations of
/// Cholesky, inverse, Cholesky. Computed in f64 and rounded once: LAPACK on one thread, cuSOLVER on a GPU.
/// Reads the upper triangle of A. No gradient flows through it.
std::optional<Tensor> inverse_factor(const Tensor& a, const Tensor& shift, Site site = Site::here());

}  // namespace tessera::ops
