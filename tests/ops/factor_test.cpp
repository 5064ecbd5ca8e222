#include "ops/factor/factor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

Tensor identity(int64_t n) {
  std::vector<double> values(size_t(n * n));
  for (int64_t i = 0; i < n; ++i) values[size_t(i * n + i)] = 1;
  return Tensor::from(values, {n, n});
}

constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1}, {1, 6}, {6, 1}, {5, 3}, {3, 5}, {17, 17}, {40, 9}};

TEST(Factor, QrIsAnOrthonormalBasisAndATriangle) {
  for (const auto& [m, n] : kShapes)
    for (const bool transposed : {false, true}) {
      const Tensor a = transposed ? normal({n, m}, 3).transpose(0, 1) : normal({m, n}, 3);
      const QrFactors made = qr(a);
      const int64_t k = std::min(m, n);
      EXPECT_LT(largest_difference(matmul(made.q, made.r), a), 1e-12);
      EXPECT_LT(largest_difference(matmul(made.q, made.q, true), identity(k)), 1e-12);
      const std::vector<double> r = made.r.to_vector<double>();
      for (int64_t i = 0; i < k; ++i) {
        EXPECT_GE(r[size_t(i * n + i)], 0);
        for (int64_t j = 0; j < i; ++j) EXPECT_EQ(r[size_t(i * n + j)], 0);
      }
    }
}

TEST(Factor, SvdIsOrthonormalDescendingAndOfFixedSigns) {
  for (const auto& [m, n] : kShapes) {
    const Tensor a = normal({m, n}, 5);
    const SvdFactors made = svd(a);
    const int64_t k = std::min(m, n);
    EXPECT_LT(largest_difference(matmul(mul(made.u, made.s), made.vt), a), 1e-12);
    EXPECT_LT(largest_difference(matmul(made.u, made.u, true), identity(k)), 1e-12);
    EXPECT_LT(largest_difference(matmul(made.vt, made.vt, false, true), identity(k)), 1e-12);
    const std::vector<double> s = made.s.to_vector<double>(), u = made.u.to_vector<double>();
    EXPECT_TRUE(std::is_sorted(s.rbegin(), s.rend()) && s.back() >= 0);
    for (int64_t j = 0; j < k; ++j) {
      double most = 0;
      for (int64_t i = 0; i < m; ++i)
        if (std::abs(u[size_t(i * k + j)]) > std::abs(most)) most = u[size_t(i * k + j)];
      EXPECT_GT(most, 0);
    }
    // The signs do not depend on those of the matrix' factors: -a has the same u, and the opposite vt.
    const SvdFactors opposite = svd(scale(a, -1));
    EXPECT_LT(largest_difference(opposite.u, made.u), 1e-10);
    EXPECT_LT(largest_difference(opposite.vt, scale(made.vt, -1)), 1e-10);
  }
}

TEST(Factor, OfADiagonalMatrixIsItsElements) {
  const Tensor a = Tensor::from(std::vector<double>{0, -3, 0, 1, 0, 0, 0, 0, 2}, {3, 3});
  const SvdFactors made = svd(a);
  EXPECT_EQ(made.s.to_vector<double>(), (std::vector<double>{3, 2, 1}));
  EXPECT_LT(
      largest_difference(made.vt, Tensor::from(std::vector<double>{0, -1, 0, 0, 0, 1, 1, 0, 0}, {3, 3})),
      1e-15);
}

TEST(Factor, TheSketchFindsTheLeadingTriples) {
  // Singular values 1, 1/2, 1/4, ...: the rest is far below the leading three.
  const Tensor left = qr(normal({60, 20}, 1)).q, right = qr(normal({45, 20}, 2)).q;
  std::vector<double> values;
  for (int i = 0; i < 20; ++i) values.push_back(std::pow(0.5, i));
  const Tensor a = matmul(mul(left, Tensor::from(values, {20})), right, false, true);
  Rng rng(3);
  const SvdFactors exact = truncated_svd(a, 3), sketched = truncated_svd(a, 3, rng);
  EXPECT_EQ(exact.u.shape(), Shape({60, 3}));
  EXPECT_EQ(sketched.vt.shape(), Shape({3, 45}));
  EXPECT_LT(largest_difference(sketched.s, exact.s), 1e-9);
  EXPECT_LT(largest_difference(sketched.u, exact.u), 1e-6);
  EXPECT_LT(largest_difference(sketched.vt, exact.vt), 1e-6);
  Rng again(3);
  EXPECT_EQ(truncated_svd(a, 3, again).u.to_vector<double>(), sketched.u.to_vector<double>());
  Rng other(4);
  const Tensor q = range_finder(a, 4, other, {.oversample = 2, .iterations = 1});
  EXPECT_EQ(q.shape(), Shape({60, 6}));
  EXPECT_LT(largest_difference(matmul(q, q, true), identity(6)), 1e-12);
  // As much as the matrix has.
  EXPECT_EQ(range_finder(normal({5, 4}, 1), 4, other).shape(), Shape({5, 4}));
}

TEST(Factor, SaysWhatIsWrong) {
  const Tensor a = normal({4, 3}, 1), vector = Tensor::zeros({3}, DType::f64, Device::cpu());
  Rng rng(1);
  expect_error([&] { qr({}); }, {"qr: a is undefined"});
  expect_error([&] { svd(vector); }, {"svd: a is f64[3]", "expected a matrix"});
  expect_error([&] { qr(Tensor::zeros({0, 3}, DType::f64, Device::cpu())); }, {"at least one row"});
  expect_error([&] { svd(a.to(DType::bf16)); }, {"a is bf16[4, 3]", "expected f32, or f64"});
  expect_error([&] { truncated_svd(a, 4); }, {"the rank is 4", "1 to 3"});
  expect_error([&] { truncated_svd(a, 0); }, {"the rank is 0"});
  expect_error([&] { range_finder(a, 4, rng); }, {"range_finder: the rank is 4"});
  expect_error([&] { range_finder(a, 2, rng, {.oversample = -1}); }, {"oversample is -1"});
  for (const double bad : {double(NAN), double(INFINITY)}) {
    const Tensor broken = a.clone();
    broken.at({2, 1}).fill(bad);
    expect_error([&] { qr(broken); }, {"qr: an element of a, f64[4, 3]", "is not finite"});
    expect_error([&] { svd(broken); }, {"svd: an element of a", "is not finite"});
  }
}

}  // namespace
}  // namespace tessera::ops
