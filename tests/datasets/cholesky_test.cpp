#include "datasets/cholesky.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "runtime/gaussian.h"

namespace tessera::datasets {
namespace {

/// R^T R + I for a random R: symmetric positive definite with a condition number of about n.
std::vector<double> random_matrix(int64_t n) {
  std::vector<double> a(size_t(n * n), 0.0);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t k = 0; k < n; ++k)
        a[size_t(i * n + j)] +=
            gaussian(1, 1, uint64_t(k * n + i)) * gaussian(1, 1, uint64_t(k * n + j)) / double(n);
      a[size_t(i * n + j)] += i == j;
    }
  return a;
}

TEST(Cholesky, TheFactorGivesTheMatrixBackAndSolves) {
  for (const int64_t n : {1, 2, 3, 4, 5, 8, 33}) {
    const std::vector<double> a = random_matrix(n);
    std::vector<double> u = a;
    ASSERT_TRUE(cholesky(u.data(), n));
    double log_determinant = 0;
    for (int64_t i = 0; i < n; ++i) log_determinant += std::log(u[size_t(i * n + i)]);
    EXPECT_EQ(half_log_determinant(u.data(), n), log_determinant);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = i; j < n; ++j) {
        double sum = 0;
        for (int64_t k = 0; k <= i; ++k) sum += u[size_t(k * n + i)] * u[size_t(k * n + j)];
        // Entries of about 1 to 5, n + 1 products, each rounded to 2^-53 of the entry.
        EXPECT_NEAR(sum, a[size_t(i * n + j)], double(n + 1) * 5 * 0x1p-52);
      }
    // U^T (U^-T B) = B, two columns; the condition of U is below 10.
    std::vector<double> b(size_t(2 * n)), x;
    for (size_t i = 0; i < b.size(); ++i) b[i] = gaussian(1, 2, i);
    x = b;
    solve_lower(u.data(), n, x.data(), 2);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t column = 0; column < 2; ++column) {
        double sum = 0;
        for (int64_t k = 0; k <= i; ++k) sum += u[size_t(k * n + i)] * x[size_t(2 * k + column)];
        EXPECT_NEAR(sum, b[size_t(2 * i + column)], double(n + 1) * 50 * 0x1p-52);
      }
  }
}

TEST(Cholesky, RefusesWhatIsNotPositiveDefinite) {
  std::vector<double> indefinite{1, 2, 2, 1}, zero{0}, bad{std::nan("")};
  EXPECT_FALSE(cholesky(indefinite.data(), 2));
  EXPECT_FALSE(cholesky(zero.data(), 1));
  EXPECT_FALSE(cholesky(bad.data(), 1));
}

}  // namespace
}  // namespace tessera::datasets
