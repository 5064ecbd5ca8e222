#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "datasets/cholesky.h"
#include "datasets/fourier.h"
#include "datasets/matern_math.h"
#include "datasets/posterior.h"
#include "tests/errors.h"

/// The structures that make the priors fast to draw and to condition, against the dense definitions.

namespace tessera::datasets {
namespace {

TEST(FourierSeries, IsTheKernel) {
  struct One {
    PriorKind kind;
    double lengthscale, span;
    int64_t most_functions;
    double tolerance;
  };
  // From some harmonics on the rounding of the cosines' arguments, 2 pi k r 2^-53, decides, here as
  // elsewhere.
  for (const One& one :
       {One{PriorKind::rbf, 0.5, 4, 51, 1e-15}, One{PriorKind::periodic, 0.5, 4, 51, 5e-15},
        One{PriorKind::rbf, 0.05, 4, 300, 1e-14}, One{PriorKind::rbf, 30, 4, 51, 1e-15},
        One{PriorKind::rbf, 0.5, 40, 300, 1e-14}, One{PriorKind::periodic, 0.05, 4, 400, 1e-13},
        One{PriorKind::periodic, 20, 4, 51, 1e-15}}) {
    const PriorOptions options{
        .kind = one.kind, .lengthscale = one.lengthscale, .scale = 1.5, .period = 1.25};
    const FourierSeries series = fourier_series(options, one.span);
    EXPECT_LE(series.functions(), one.most_functions);
    for (int i = 0; i <= 1000; ++i) {
      const double r = one.span * (i / 500.0 - 1);
      double sum = 0;
      for (int64_t k = series.harmonics(); k >= 0; --k)
        sum += series.amplitude[size_t(k)] * series.amplitude[size_t(k)] *
               std::cos(2 * std::numbers::pi * double(k) * series.frequency * r);
      ASSERT_NEAR(sum / 2.25, covariance(options, r) / 2.25, one.tolerance)
          << name_of(one.kind) << ", lengthscale " << one.lengthscale << " at " << r;
    }
  }
  EXPECT_THROW(fourier_series({.kind = PriorKind::matern52}, 4), Error);
}

using Matrix = std::array<std::array<double, 3>, 3>;

Matrix full(const Matern3& q) {
  return {{{q.q00, q.q01, q.q02}, {q.q01, q.q11, q.q12}, {q.q02, q.q12, q.q22}}};
}
/// A(tau) m A(tau)^T
Matrix carried(double tau, Matrix m) {
  const MaternDecay decay(tau);
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t column = 0; column < 3; ++column) {
      double z[3] = {m[0][column], m[1][column], m[2][column]};
      decay.apply(z);
      for (size_t row = 0; row < 3; ++row) m[row][column] = z[row];
    }
    for (size_t i = 0; i < 3; ++i)
      for (size_t j = 0; j < i; ++j) std::swap(m[i][j], m[j][i]);
  }
  return m;
}

TEST(Matern, TheStationaryProcessHasTheKernel) {
  const PriorOptions options{.kind = PriorKind::matern52, .lengthscale = 0.6};
  const double rate = std::sqrt(5.0) / 0.6;
  const Matrix stationary = full(matern_noise(kMaternForever));
  const Matrix expected{{{1, 0, -1.0 / 3}, {0, 1.0 / 3, 0}, {-1.0 / 3, 0, 1}}};
  for (size_t i = 0; i < 3; ++i)
    for (size_t j = 0; j < 3; ++j) EXPECT_NEAR(stationary[i][j], expected[i][j], 1e-15);
  for (const double r : {0.0, 1e-6, 0.01, 0.3, 1.0, 4.0}) {
    double z[3] = {stationary[0][0], stationary[1][0], stationary[2][0]};  // covariance of the state with f
    MaternDecay(rate * r).apply(z);
    EXPECT_NEAR(z[0], covariance(options, r), 1e-15);
  }
  double forgotten[3] = {1, 2, 3};
  MaternDecay(kMaternForever).apply(forgotten);
  for (const double value : forgotten) EXPECT_EQ(value, 0);
}

TEST(Matern, TheNoiseOfTwoStepsIsThatOfOne) {
  // Q(a + b) = A(b) Q(a) A(b)^T + Q(b) and, of the whole, P = A P A^T + Q, each relative to the diagonal:
  // also where entries are like tau^5.
  for (const double a : {1e-7, 1e-4, 0.03, 0.7, 1.2, 2.4999, 2.5001, 9.0})
    for (const double b : {1e-7, 2e-4, 0.5, 1.3, 3.0}) {
      const Matrix one = full(matern_noise(a + b)), first = carried(b, full(matern_noise(a))),
                   second = full(matern_noise(b));
      for (size_t i = 0; i < 3; ++i)
        for (size_t j = 0; j < 3; ++j)
          EXPECT_NEAR(first[i][j] + second[i][j], one[i][j], 1e-13 * std::sqrt(one[i][i] * one[j][j]))
              << a << " then " << b << ": " << i << ", " << j;
    }
  for (const double tau : {0.5, 2.0, 2.6, 10.0}) {
    const Matrix q = full(matern_noise(tau)), p = full(matern_noise(kMaternForever)), rest = carried(tau, p);
    for (size_t i = 0; i < 3; ++i)
      for (size_t j = 0; j < 3; ++j) EXPECT_NEAR(rest[i][j] + q[i][j], p[i][j], 1e-14);
  }
  const Matrix tiny = full(matern_noise(1e-5));  // leading terms 16/3 (tau^5 / 20, tau^3 / 3, tau)
  EXPECT_NEAR(tiny[0][0] / (16.0 / 3 * 1e-25 / 20), 1, 1e-4);
  EXPECT_NEAR(tiny[1][1] / (16.0 / 3 * 1e-15 / 3), 1, 1e-4);
  EXPECT_NEAR(tiny[2][2] / (16.0 / 3 * 1e-5), 1, 1e-4);
}

TEST(Matern, IncrementsHaveTheCovarianceOfTheNoise) {
  for (const double tau : {0.0, 1e-6, 1e-3, 0.4, 3.0, kMaternForever}) {
    Matrix l{};  // columns: increments of unit vectors
    for (size_t c = 0; c < 3; ++c) {
      double n[3] = {}, e[3];
      n[c] = 1;
      matern_increment(tau, n, e);
      for (size_t i = 0; i < 3; ++i) l[i][c] = e[i];
    }
    const Matrix q = full(matern_noise(tau));
    for (size_t i = 0; i < 3; ++i)
      for (size_t j = 0; j < 3; ++j) {
        double sum = 0;
        for (size_t c = 0; c < 3; ++c) sum += l[i][c] * l[j][c];
        EXPECT_NEAR(sum, q[i][j], 1e-14 * std::sqrt(q[i][i] * q[j][j])) << tau;
      }
  }
}

TEST(Matern, TheTransposeIsTheTranspose) {
  const MaternDecay decay(0.8);
  Matrix a{}, t{};
  for (size_t c = 0; c < 3; ++c) {
    double x[3] = {}, y[3] = {};
    x[c] = y[c] = 1;
    decay.apply(x), decay.apply_transposed(y);
    for (size_t i = 0; i < 3; ++i) a[i][c] = x[i], t[i][c] = y[i];
  }
  for (size_t i = 0; i < 3; ++i)
    for (size_t j = 0; j < 3; ++j) EXPECT_NEAR(a[i][j], t[j][i], 1e-16);
}

// ---- posterior ----

/// The posterior of the dense covariance matrix by a Cholesky factor (Rasmussen, Williams, equations 2.23 and
/// 2.24).
void dense_posterior(const PriorOptions& options, const std::vector<double>& xc, std::vector<double> y,
                     const std::vector<double>& xt, std::vector<double>& mean,
                     std::vector<double>& variance) {
  const size_t m = xc.size(), n = xt.size();
  std::vector<double> matrix(m * m), cross(m * n);
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < m; ++j) matrix[i * m + j] = covariance(options, xc[i] - xc[j]);
    for (size_t j = 0; j < n; ++j) cross[i * n + j] = covariance(options, xc[i] - xt[j]);
    matrix[i * m + i] += noise_variance(options);
  }
  ASSERT_TRUE(cholesky(matrix.data(), int64_t(m)));
  solve_lower(matrix.data(), int64_t(m), y.data(), 1);
  solve_lower(matrix.data(), int64_t(m), cross.data(), int64_t(n));
  mean.assign(n, 0), variance.assign(n, covariance(options, 0) + noise_variance(options));
  for (size_t i = 0; i < m; ++i)
    for (size_t j = 0; j < n; ++j)
      mean[j] += cross[i * n + j] * y[i], variance[j] -= cross[i * n + j] * cross[i * n + j];
}

TEST(Posterior, EqualsTheDenseOne) {
  // Both are wrong by up to 2^-53 times the condition number, M s^2 / noise: 1e4 at a noise of 0.1, 2e10
  // where only the 1e-8 s^2 is left that every covariance matrix has. Relative to the predicted deviation.
  struct Noise {
    double noise, tolerance;
  };
  for (const PriorKind kind : {PriorKind::rbf, PriorKind::matern52, PriorKind::periodic})
    for (const Noise& one : {Noise{0.3, 1e-10}, Noise{0.1, 1e-9}, Noise{0.0, 1e-4}})
      for (const int64_t context : {1, 30, 300}) {
        const PriorOptions options{.kind = kind,
                                   .batch = 2,
                                   .context = context,
                                   .targets = 40,
                                   .seed = 6,
                                   .lengthscale = 0.4,
                                   .scale = 1.2,
                                   .noise = one.noise,
                                   .period = 1.5};
        const RegressionBatch batch = Prior(options).batch(0);
        const Predictive got = predict(options, batch);
        for (int64_t task = 0; task < 2; ++task) {
          const auto row = [&](const Tensor& tensor) { return tensor.select(0, task).to_vector<double>(); };
          std::vector<double> mean, variance;
          dense_posterior(options, row(batch.xc), row(batch.yc), row(batch.xt), mean, variance);
          const auto got_mean = row(got.mean), got_variance = row(got.variance), y = row(batch.yt),
                     density = row(got.log_density);
          for (size_t j = 0; j < mean.size(); ++j) {
            const double deviation = std::sqrt(variance[j]);
            ASSERT_NEAR(got_mean[j], mean[j], one.tolerance * deviation)
                << name_of(kind) << ", noise " << one.noise << ", context " << context;
            ASSERT_NEAR(got_variance[j] / variance[j], 1, one.tolerance)
                << name_of(kind) << ", noise " << one.noise << ", context " << context;
            const double z = (y[j] - got_mean[j]) / std::sqrt(got_variance[j]);
            EXPECT_NEAR(density[j], -0.5 * (std::log(2 * std::numbers::pi * got_variance[j]) + z * z),
                        1e-12 * (1 + z * z));
          }
        }
      }
}

TEST(Posterior, TakesInputsAnywhereAndTwice) {
  // Targets outside of the interval of the sampler, on context points, on each other, and a context point
  // twice.
  for (const PriorKind kind : {PriorKind::rbf, PriorKind::matern52, PriorKind::periodic}) {
    const PriorOptions options{.kind = kind, .noise = 0.2};
    const std::vector<double> xc{0.25, -7, 0.25, 1.5, 6}, yc{1, -1, 0.5, 0.2, 2},
        xt{0.25, 9, -12, 0.3, 0.3, -7};
    const RegressionBatch batch{Tensor::from(xc, {1, 5, 1}), Tensor::from(yc, {1, 5, 1}),
                                Tensor::from(xt, {1, 6, 1}),
                                Tensor::zeros({1, 6, 1}, DType::f32, Device::cpu())};
    std::vector<double> mean, variance;
    dense_posterior(options, xc, yc, xt, mean, variance);
    const Predictive got = predict(options, batch);
    for (size_t j = 0; j < xt.size(); ++j) {
      EXPECT_NEAR(got.mean.to_vector<double>()[j], mean[j], 1e-12) << name_of(kind) << " at " << xt[j];
      EXPECT_NEAR(got.variance.to_vector<double>()[j], variance[j], 1e-12)
          << name_of(kind) << " at " << xt[j];
    }
    for (const double bad : {std::nan(""), double(INFINITY)}) {
      RegressionBatch broken = batch;
      broken.xt = Tensor::full({1, 6, 1}, bad, DType::f64, Device::cpu());
      expect_error([&] { predict(options, broken); }, {"predict", name_of(kind), "input"});
    }
  }
}

}  // namespace
}  // namespace tessera::datasets
