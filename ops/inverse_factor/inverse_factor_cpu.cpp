#include <lapacke.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/gemm/sgemm_internal.h"
#include "ops/inverse_factor/inverse_factor_kernels.h"

/// Reversing the order of rows and columns turns R R^T into the usual V^T V, and reversing both is reversing
/// the packed elements. What LAPACK calls the upper triangle of a column-major matrix is its row of the same
/// number here, so the inverse of V, reversed once more, lies as U does row by row.

namespace tessera::ops {
namespace {

template <class T>
bool factor(T* u, const T* a, const T* shift, int64_t n) {
  std::vector<double> matrix(size_t(n * n));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = i; j < n; ++j)
      matrix[size_t((n - 1 - i) * n + (n - 1 - j))] = double(a[i * n + j]) + (i == j ? double(shift[i]) : 0);
  {
    const OneBlasThread one;
    if (LAPACKE_dpotrf_work(LAPACK_COL_MAJOR, 'U', int(n), matrix.data(), int(n)) != 0) return false;
    if (LAPACKE_dtrtri_work(LAPACK_COL_MAJOR, 'U', 'N', int(n), matrix.data(), int(n)) != 0) return false;
  }
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    std::fill(u + i * n, u + i * n + i, T(0));
    for (int64_t j = i; j < n; ++j) {
      u[i * n + j] = T(matrix[size_t((n - 1 - i) * n + (n - 1 - j))]);
      finite &= std::isfinite(u[i * n + j]);
    }
  }
  return finite;
}

}  // namespace

bool inverse_factor_cpu(const Tensor& u, const Tensor& a, const Tensor& shift) {
  const int64_t n = u.size(0);
  check(n <= std::numeric_limits<int32_t>::max(), "inverse_factor: ", n, " rows; LAPACK counts in 32 bits");
  if (u.dtype() == DType::f64) return factor(u.data<double>(), a.data<double>(), shift.data<double>(), n);
  return factor(u.data<float>(), a.data<float>(), shift.data<float>(), n);
}

}  // namespace tessera::ops
