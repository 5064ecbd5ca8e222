#include <lapacke.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/factor/factor_kernels.h"
#include "ops/gemm/sgemm_internal.h"

/// LAPACK's matrices are column-major: a packed matrix here is its transpose there. The SVD of a^T is vt^T s
/// u^T, whose factors lie as u and vt do here, so nothing is transposed; QR has no such symmetry, and its
/// matrix is.

namespace tessera::ops {
namespace {

template <class T>
bool all_finite(const T* values, int64_t count) {
  return std::all_of(values, values + count, [](T value) { return std::isfinite(value); });
}

template <class T>
int qr_of(T* q, T* r, const T* a, int64_t m, int64_t n) {
  if (!all_finite(a, m * n)) return -1;
  const int64_t k = std::min(m, n);
  std::vector<double> matrix(size_t(m * n)), tau(static_cast<size_t>(k));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) matrix[size_t(j * m + i)] = double(a[i * n + j]);
  const OneBlasThread one;
  if (const int info = LAPACKE_dgeqrf(LAPACK_COL_MAJOR, int(m), int(n), matrix.data(), int(m), tau.data()))
    return info;
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < n; ++j) r[i * n + j] = j < i ? T(0) : T(matrix[size_t(j * m + i)]);
  if (const int info =
          LAPACKE_dorgqr(LAPACK_COL_MAJOR, int(m), int(k), int(k), matrix.data(), int(m), tau.data()))
    return info;
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < k; ++j) q[i * k + j] = T(matrix[size_t(j * m + i)]);
  return 0;
}

template <class T>
int svd_of(T* u, T* s, T* vt, const T* a, int64_t m, int64_t n) {
  if (!all_finite(a, m * n)) return -1;
  const int64_t k = std::min(m, n);
  std::vector<double> matrix(a, a + m * n), left(size_t(n * k)), values(static_cast<size_t>(k)),
      right(size_t(k * m));
  const OneBlasThread one;
  if (const int info = LAPACKE_dgesdd(LAPACK_COL_MAJOR, 'S', int(n), int(m), matrix.data(), int(n),
                                      values.data(), left.data(), int(n), right.data(), int(k)))
    return info;
  std::transform(right.begin(), right.end(), u, [](double value) { return T(value); });
  std::transform(values.begin(), values.end(), s, [](double value) { return T(value); });
  std::transform(left.begin(), left.end(), vt, [](double value) { return T(value); });
  return 0;
}

void check_sizes(const char* op, const Tensor& a) {
  check(std::max(a.size(0), a.size(1)) <= std::numeric_limits<int32_t>::max(), op, ": a is ", describe(a),
        "; LAPACK counts in 32 bits");
}

}  // namespace

int qr_cpu(const Tensor& q, const Tensor& r, const Tensor& a) {
  check_sizes("qr", a);
  if (a.dtype() == DType::f64)
    return qr_of(q.data<double>(), r.data<double>(), a.data<double>(), a.size(0), a.size(1));
  return qr_of(q.data<float>(), r.data<float>(), a.data<float>(), a.size(0), a.size(1));
}

int svd_cpu(const Tensor& u, const Tensor& s, const Tensor& vt, const Tensor& a) {
  check_sizes("svd", a);
  if (a.dtype() == DType::f64)
    return svd_of(u.data<double>(), s.data<double>(), vt.data<double>(), a.data<double>(), a.size(0),
                  a.size(1));
  return svd_of(u.data<float>(), s.data<float>(), vt.data<float>(), a.data<float>(), a.size(0), a.size(1));
}

}  // namespace tessera::ops
