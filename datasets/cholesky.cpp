#include "datasets/cholesky.h"

#include <algorithm>
#include <cmath>

namespace tessera::datasets {
namespace {

/// row[j] -= sum over four rows u_i of factor_i * u_i[j]: four at once, so that `row` is read and written a
/// quarter as often.
void subtract_four(double* __restrict row, const double* __restrict u, int64_t stride, const double factor[4],
                   int64_t count) {
  const double f0 = factor[0], f1 = factor[1], f2 = factor[2], f3 = factor[3];
  const double *const u0 = u, *const u1 = u + stride, *const u2 = u + 2 * stride, *const u3 = u + 3 * stride;
  for (int64_t j = 0; j < count; ++j) row[j] -= (f0 * u0[j] + f1 * u1[j]) + (f2 * u2[j] + f3 * u3[j]);
}

void subtract(double* __restrict row, const double* __restrict u, double factor, int64_t count) {
  for (int64_t j = 0; j < count; ++j) row[j] -= factor * u[j];
}

}  // namespace

bool cholesky(double* a, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    double* const row = a + k * n + k;
    const int64_t left = n - k;
    int64_t i = 0;
    for (; i + 4 <= k; i += 4) {
      const double* const above = a + i * n + k;
      const double factor[4] = {above[0], above[n], above[2 * n], above[3 * n]};
      subtract_four(row, above, n, factor, left);
    }
    for (; i < k; ++i) subtract(row, a + i * n + k, a[i * n + k], left);
    if (!(row[0] > 0) || !std::isfinite(row[0])) return false;
    const double inverse = 1 / std::sqrt(row[0]);
    for (int64_t j = 0; j < left; ++j) row[j] *= inverse;
  }
  return true;
}

void solve_lower(const double* u, int64_t n, double* b, int64_t m) {
  for (int64_t k = 0; k < n; ++k) {
    double* const row = b + k * m;
    const double inverse = 1 / u[k * n + k];
    for (int64_t c = 0; c < m; ++c) row[c] *= inverse;
    for (int64_t j = k + 1; j < n; ++j) subtract(b + j * m, row, u[k * n + j], m);
  }
}

double half_log_determinant(const double* u, int64_t n) {
  double sum = 0;
  for (int64_t k = 0; k < n; ++k) sum += std::log(u[k * n + k]);
  return sum;
}

}  // namespace tessera::datasets
