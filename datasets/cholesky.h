#pragma once

#include <cstdint>

/// Dense symmetric positive definite systems in f64 on one thread. The order of operations is fixed and does
/// not depend on threads or on a library's choice of kernels: a batch drawn through a factor has the
/// same bits on any number of threads. (LAPACK's dpotrf rounds differently with another number of
/// threads.) Row-major throughout.

namespace tessera::datasets {

/// A = U^T U: replaces the upper triangle of a [n, n] by U and leaves the lower as it is. False, with the
/// triangle spoilt, if A is not positive definite. n^3 / 3 FLOPs.
[[nodiscard]] bool cholesky(double* a, int64_t n);
/// b [n, m] = U^-T b.
void solve_lower(const double* u, int64_t n, double* b, int64_t m);
/// Sum of log U_ii: half the log-determinant of A.
double half_log_determinant(const double* u, int64_t n);

}  // namespace tessera::datasets
