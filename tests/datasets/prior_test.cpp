#include "datasets/prior.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "datasets/posterior.h"
#include "runtime/capture.h"
#include "runtime/parallel.h"
#include "tests/errors.h"

namespace tessera::datasets {
namespace {

constexpr PriorKind kKinds[] = {PriorKind::linear, PriorKind::rbf, PriorKind::matern52, PriorKind::periodic};

std::vector<std::vector<float>> values(const RegressionBatch& batch) {
  return {batch.xc.to_vector<float>(), batch.yc.to_vector<float>(), batch.xt.to_vector<float>(),
          batch.yt.to_vector<float>()};
}

/// Mean of `samples` and its standard error.
struct Estimate {
  double mean = 0, error = 0;
};
Estimate estimate(const std::vector<double>& samples) {
  Estimate result;
  for (const double sample : samples) result.mean += sample / double(samples.size());
  double square = 0;
  for (const double sample : samples) square += (sample - result.mean) * (sample - result.mean);
  result.error = std::sqrt(square / double(samples.size() - 1) / double(samples.size()));
  return result;
}
// Six standard errors: a correct estimate fails once in 10^9 seeds, and the seed is fixed.
void expect_close(const Estimate& got, double want) {
  EXPECT_NEAR(got.mean, want, 6 * got.error) << "standard error " << got.error;
}

TEST(Prior, ABatchIsAFunctionOfSeedAndIndexAlone) {
  for (const PriorKind kind : kKinds) {
    const PriorOptions options{.kind = kind, .batch = 5, .context = 7, .targets = 3, .seed = 3};
    const Prior prior(options);
    const auto expected = values(prior.batch(4));
    std::vector<std::vector<std::vector<float>>> got(4);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < got.size(); ++i)
      threads.emplace_back([&, i] { got[i] = values(Prior(options).batch(4)); });
    for (std::thread& thread : threads) thread.join();
    for (const auto& batch : got) EXPECT_EQ(batch, expected) << name_of(kind);
    EXPECT_NE(values(prior.batch(5)), expected);
    PriorOptions other = options;
    other.seed = 4;
    EXPECT_NE(values(Prior(other).batch(4)), expected);
  }
}

TEST(Prior, ShapesAreTheOnesOfTheTask) {
  const RegressionBatch batch = Prior({.batch = 2, .context = 5, .targets = 3, .features = 4}).batch(0);
  EXPECT_EQ(batch.xc.shape(), Shape({2, 5, 4}));
  EXPECT_EQ(batch.yc.shape(), Shape({2, 5, 1}));
  EXPECT_EQ(batch.xt.shape(), Shape({2, 3, 4}));
  EXPECT_EQ(batch.yt.shape(), Shape({2, 3, 1}));
}

TEST(Prior, LinearTasksHaveTheMomentsOfTheirFormula) {
  const int64_t features = 3;
  const Prior prior({.batch = 20000, .context = 1, .targets = 1, .features = features, .seed = 1});
  const RegressionBatch batch = prior.batch(0);
  const std::vector<double> yc = batch.yc.to_vector<double>(), yt = batch.yt.to_vector<double>();
  const std::vector<double> xc = batch.xc.to_vector<double>(), xt = batch.xt.to_vector<double>();
  std::vector<double> y, y2, cross, x2;
  for (size_t task = 0; task < yc.size(); ++task) {
    y.push_back(yc[task]);
    y2.push_back(yc[task] * yc[task]);
    // Given x and x', E[y y'] = 1 + x . x' : the deviation has mean 0.
    double product = 1;
    for (size_t f = 0; f < size_t(features); ++f)
      product += xc[task * size_t(features) + f] * xt[task * size_t(features) + f];
    cross.push_back(yc[task] * yt[task] - product);
    x2.push_back(xc[task * size_t(features)] * xc[task * size_t(features)]);
  }
  expect_close(estimate(y), 0);
  // Var y = 1 + F + E[sigma^2], E[exp(2 u)] = exp(2 mean + 2 deviation^2).
  expect_close(estimate(y2), 1 + double(features) +
                                 std::exp(2 * kLogNoiseMean + 2 * kLogNoiseDeviation * kLogNoiseDeviation));
  expect_close(estimate(cross), 0);
  expect_close(estimate(x2), 1);
}

TEST(Prior, ProcessesHaveTheirCovariance) {
  for (const PriorKind kind : {PriorKind::rbf, PriorKind::matern52, PriorKind::periodic}) {
    const PriorOptions options{
        .kind = kind, .batch = 20000, .context = 1, .targets = 1, .seed = 2, .scale = 1.5, .noise = 0.2};
    const RegressionBatch batch = Prior(options).batch(0);
    const auto v = values(batch);
    std::vector<double> square, cross, position;
    for (size_t task = 0; task < v[0].size(); ++task) {
      square.push_back(double(v[1][task]) * double(v[1][task]));
      cross.push_back(double(v[1][task]) * double(v[3][task]) -
                      covariance(options, double(v[0][task]) - double(v[2][task])));
      position.push_back(double(v[0][task]) * double(v[0][task]));
      EXPECT_GE(v[0][task], -2);
      EXPECT_LT(v[0][task], 2);
    }
    expect_close(estimate(square), 1.5 * 1.5 + noise_variance(options));
    expect_close(estimate(cross), 0);
    expect_close(estimate(position), 4.0 / 3);
  }
}

TEST(Prior, PointsOfATaskHaveTheCovarianceOfTheKernelAtEveryDistance) {
  for (const PriorKind kind : {PriorKind::rbf, PriorKind::matern52, PriorKind::periodic}) {
    const PriorOptions options{.kind = kind,
                               .batch = 8000,
                               .context = 5,
                               .targets = 3,
                               .seed = 21,
                               .lengthscale = 0.7,
                               .scale = 1.3};
    const auto v = values(Prior(options).batch(3));
    const auto at = [](const std::vector<float>& context, const std::vector<float>& targets, size_t task,
                       size_t i) {
      return double(i < 5 ? context[task * 5 + i] : targets[task * 3 + i - 5]);
    };
    constexpr size_t kBins = 8;  // of |x - x'| < 4
    std::vector<std::vector<double>> deviation(kBins), mean(8), square(8);
    for (size_t task = 0; task < 8000; ++task) {
      for (size_t i = 0; i < 8; ++i) {
        const double yi = at(v[1], v[3], task, i), xi = at(v[0], v[2], task, i);
        mean[i].push_back(yi), square[i].push_back(yi * yi);
        for (size_t j = 0; j < i; ++j) {
          const double r = xi - at(v[0], v[2], task, j);
          deviation[size_t(2 * std::abs(r))].push_back(yi * at(v[1], v[3], task, j) - covariance(options, r));
        }
      }
    }
    for (size_t i = 0; i < 8; ++i) {
      expect_close(estimate(mean[i]), 0);
      expect_close(estimate(square[i]), 1.69 + noise_variance(options));
    }
    // Pairs of a task are not independent: 28 pairs, so the true error is at most sqrt(28) times the
    // estimate's; in truth 1.5 times, and 6 standard errors leave room for that.
    for (const auto& bin : deviation) {
      EXPECT_GT(bin.size(), 500u);
      expect_close(estimate(bin), 0);
    }
  }
}

TEST(Prior, DrawsIntoTensorsWhatItReturns) {
  for (const PriorKind kind : kKinds) {
    const Prior prior({.kind = kind, .batch = 3, .context = 5, .targets = 2, .seed = 9});
    const RegressionBatch other = prior.batch(0);
    prior.draw(7, other);
    EXPECT_EQ(values(other), values(prior.batch(7)));
    RegressionBatch wrong = other;
    wrong.yc = Tensor::empty_packed({3, 4, 1}, DType::f32, Device::cpu());
    expect_error([&] { prior.draw(0, wrong); }, {name_of(kind), "yc [3, 5, 1]"});
    wrong.yc = Tensor::empty_packed({3, 5, 1}, DType::f64, Device::cpu());
    EXPECT_THROW(prior.draw(0, wrong), Error);
  }
}

TEST(Prior, ABatchDoesNotDependOnTheNumberOfThreads) {
  const int before = cpu_threads();
  for (const PriorKind kind : kKinds) {
    const Prior prior({.kind = kind, .batch = 7, .context = 500, .targets = 41, .seed = 2});
    const auto expected = values(prior.batch(5));
    for (const int threads : {1, 3, 8}) {
      set_cpu_threads(threads);
      EXPECT_EQ(values(prior.batch(5)), expected) << name_of(kind) << ", " << threads << " threads";
    }
  }
  set_cpu_threads(before);
}

/// The same random words: x of a process is equal; what passes through log, cos or exp may differ by the last
/// bits of f64, which moves a few values to the next f32.
TEST(Prior, TheGpuDrawsWhatTheCpuDraws) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  struct Size {
    int64_t batch, context, targets, features;
  };
  for (const PriorKind kind : kKinds)
    for (const Size& size : {Size{1, 0, 1, 1}, Size{3, 5, 2, 10}, Size{64, 64, 500, 13}, Size{2, 3000, 1, 3},
                             Size{1, 10000, 1000, 1}, Size{5, 63, 65, 5}}) {
      PriorOptions options{.kind = kind,
                           .batch = size.batch,
                           .context = size.context,
                           .targets = size.targets,
                           .seed = 77,
                           .lengthscale = 0.3,
                           .scale = 1.5,
                           .noise = 0.05,
                           .period = 1.7};
      if (kind == PriorKind::linear) options.features = size.features;
      const Prior cpu(options), gpu(options, Device::cuda());
      for (const uint64_t index : {uint64_t(0), uint64_t(1) << 40}) {
        const auto want = values(cpu.batch(index));
        const RegressionBatch drawn = gpu.batch(index);
        const auto got = values(drawn);
        for (size_t part = 0; part < want.size(); ++part) {
          ASSERT_EQ(got[part].size(), want[part].size());
          for (size_t i = 0; i < want[part].size(); ++i) {
            const bool position = part % 2 == 0;
            const double allowed =
                kind == PriorKind::linear || !position ? 2e-7 : 0;  // an ulp of f32, near 1
            ASSERT_NEAR(got[part][i], want[part][i], allowed * std::max(1.0f, std::abs(want[part][i])))
                << name_of(kind) << ", part " << part << ", element " << i;
          }
        }
        EXPECT_EQ(values(gpu.batch(index)), got);  // bit for bit, again and into memory used before
        for (const Tensor& tensor : {drawn.xc, drawn.yc, drawn.xt, drawn.yt}) tensor.fill(std::nan(""));
        gpu.draw(index, drawn);
        EXPECT_EQ(values(drawn), got);
      }
    }
}

TEST(Prior, RefusesToBeCaptured) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Prior prior({.batch = 2}, Device::cuda());
  const RegressionBatch batch = prior.batch(0);
  Captured step(Device::cuda(), [&] { prior.draw(0, batch); });
  step();
  expect_error([&] { step(); }, {"captured", "draw before the replay"});
  prior.draw(1, batch);
  EXPECT_EQ(values(batch), values(prior.batch(1)));
}

TEST(Prior, CovariancesAreThoseOfTheBook) {
  PriorOptions options{.lengthscale = 0.7, .scale = 1.3, .period = 0.9};
  options.kind = PriorKind::rbf;
  EXPECT_DOUBLE_EQ(covariance(options, 0.7), 1.69 * std::exp(-0.5));
  options.kind = PriorKind::matern52;  // r = l: a = sqrt(5), 1 + sqrt(5) + 5/3
  EXPECT_DOUBLE_EQ(covariance(options, -0.7),
                   1.69 * (1 + std::sqrt(5.0) + 5.0 / 3) * std::exp(-std::sqrt(5.0)));
  options.kind = PriorKind::periodic;  // half a period: sin = 1
  EXPECT_NEAR(covariance(options, 0.45), 1.69 * std::exp(-2 / 0.49), 1e-15);
  EXPECT_NEAR(covariance(options, 0.9), 1.69, 1e-15);
}

TEST(Prior, RefusesOptionsThatMakeNoTask) {
  EXPECT_THROW(Prior({.batch = 0}), Error);
  EXPECT_THROW(Prior({.context = -1}), Error);
  EXPECT_THROW(Prior({.targets = 0}), Error);
  EXPECT_THROW(Prior({.kind = PriorKind::rbf, .features = 2}), Error);
  EXPECT_THROW(Prior({.kind = PriorKind::rbf, .lengthscale = 0}), Error);
  EXPECT_THROW(Prior({.kind = PriorKind::rbf, .noise = -1}), Error);
  for (const PriorKind kind : {PriorKind::rbf, PriorKind::periodic})
    expect_error([&] { Prior({.kind = kind, .lengthscale = 1e-4}); },
                 {name_of(kind), "0.0001", "harmonics", "longer"});
  EXPECT_THROW(parse_prior("rfb"), Error);
  for (const PriorKind kind : kKinds) EXPECT_EQ(parse_prior(name_of(kind)), kind);
}

// ---- the posterior ----

TEST(Posterior, LinearEqualsImportanceSamplingFromThePrior) {
  const PriorOptions options{.batch = 3, .context = 3, .targets = 2, .features = 1, .seed = 11};
  const RegressionBatch batch = Prior(options).batch(0);
  const Predictive exact = predict(options, batch);
  const auto v = values(batch);
  constexpr int kSamples = 400000;
  for (size_t task = 0; task < 3; ++task) {
    // p(yt | context) = E[p(yc | w, u) p(yt | w, u)] / E[p(yc | w, u)] over the prior of (w, u).
    std::vector<double> weight(kSamples), joint0(kSamples), joint1(kSamples);
    for (size_t s = 0; s < kSamples; ++s) {
      uint64_t state = s * 6 + 1;  // a plain generator of its own: splitmix64, Box and Muller
      const auto uniform = [&] {
        state += 0x9E3779B97F4A7C15;
        uint64_t z = state * 0xD1342543DE82EF95;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return (double((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
      };
      const auto normal = [&] {
        const double radius = std::sqrt(-2 * std::log(uniform()));
        return radius * std::cos(2 * M_PI * uniform());
      };
      const double b0 = normal(), b1 = normal(),
                   sigma = std::exp(kLogNoiseMean + kLogNoiseDeviation * normal());
      const auto density = [&](float x, float y) {
        const double z = (double(y) - b0 - b1 * double(x)) / sigma;
        return std::exp(-0.5 * z * z) / (sigma * std::sqrt(2 * M_PI));
      };
      weight[s] = 1;
      for (size_t i = 0; i < 3; ++i) weight[s] *= density(v[0][task * 3 + i], v[1][task * 3 + i]);
      joint0[s] = weight[s] * density(v[2][task * 2], v[3][task * 2]);
      joint1[s] = weight[s] * density(v[2][task * 2 + 1], v[3][task * 2 + 1]);
    }
    const double evidence = estimate(weight).mean;
    for (size_t j = 0; j < 2; ++j) {
      const std::vector<double>& joint = j ? joint1 : joint0;
      const double density = estimate(joint).mean / evidence;
      // The delta method: the standard error of a ratio of means is that of (joint - density
      // weight)/evidence.
      std::vector<double> residual(kSamples);
      for (size_t s = 0; s < kSamples; ++s) residual[s] = (joint[s] - density * weight[s]) / evidence;
      const double error = estimate(residual).error / density;  // of the log density
      EXPECT_LT(error, 0.02);                                   // else the comparison says nothing
      EXPECT_NEAR(exact.log_density.at({int64_t(task), int64_t(j)}).item<double>(), std::log(density),
                  6 * error);
    }
  }
}

/// log N(y; 0, C) by plain Gaussian elimination; C has the elements element(a, b).
template <class Element>
double dense_log_density(const Element& element, std::vector<double> y) {
  const size_t n = y.size();
  std::vector<double> c(n * n);
  for (size_t a = 0; a < n; ++a)
    for (size_t b = 0; b < n; ++b) c[a * n + b] = element(a, b);
  double log_density = 0;
  for (size_t k = 0; k < n; ++k) {
    // The k-th value given those before it is normal: pivot and remainder are its variance and deviation.
    const double pivot = c[k * n + k];
    log_density -= 0.5 * (std::log(2 * M_PI * pivot) + y[k] * y[k] / pivot);
    for (size_t i = k + 1; i < n; ++i) {
      const double factor = c[i * n + k] / pivot;
      for (size_t j = k; j < n; ++j) c[i * n + j] -= factor * c[k * n + j];
      y[i] -= factor * y[k];
    }
  }
  return log_density;
}

/// Expects the density of each target to be the evidence of its task's context with the target over that of
/// the context alone. log_evidence(x, y) is of points with the features x[i] and the values y[i].
template <class LogEvidence>
void expect_ratios(const PriorOptions& options, const RegressionBatch& batch, double tolerance,
                   const LogEvidence& log_evidence) {
  const Predictive exact = predict(options, batch);
  const auto v = values(batch);
  const auto features = size_t(options.features), points = size_t(options.context),
             targets = size_t(options.targets);
  for (size_t task = 0; task < size_t(options.batch); ++task)
    for (size_t j = 0; j < targets; ++j) {
      std::vector<const float*> x;
      std::vector<double> y;
      for (size_t i = task * points; i < (task + 1) * points; ++i)
        x.push_back(v[0].data() + i * features), y.push_back(v[1][i]);
      const double context = log_evidence(x, y);
      x.push_back(v[2].data() + (task * targets + j) * features), y.push_back(v[3][task * targets + j]);
      EXPECT_NEAR(exact.log_density.at({int64_t(task), int64_t(j)}).item<double>(),
                  log_evidence(x, y) - context, tolerance);
    }
}

TEST(Posterior, ProcessEqualsTheRatioOfDenseDensities) {
  for (const PriorKind kind : {PriorKind::rbf, PriorKind::matern52, PriorKind::periodic}) {
    const PriorOptions options{.kind = kind, .batch = 2, .context = 9, .targets = 4, .seed = 5, .noise = 0.3};
    // The condition number is below 10 / 0.09: about 100 roundings of 2^-53, times 100.
    expect_ratios(options, Prior(options).batch(1), 1e-11, [&](const auto& x, const auto& y) {
      const auto element = [&](size_t a, size_t b) {
        return covariance(options, double(*x[a]) - double(*x[b])) + (a == b ? noise_variance(options) : 0);
      };
      return dense_log_density(element, y);
    });
  }
}

TEST(Posterior, LinearEqualsTheDenseFormulaOnAFineGrid) {
  // The ratio of evidences, each integrated over log sigma by Simpson's rule on 4,001 nodes.
  const PriorOptions options{.batch = 2, .context = 12, .targets = 2, .features = 3, .seed = 8};
  // Elimination loses up to |Phi|^2 / sigma^2, about 10^4, on 2^-53.
  expect_ratios(options, Prior(options).batch(0), 1e-9, [](const auto& x, const auto& y) {
    double sum = 0;
    constexpr int kGrid = 4001;
    for (int q = 0; q < kGrid; ++q) {
      const double z = -9 + 18.0 * q / (kGrid - 1), sigma = std::exp(kLogNoiseMean + kLogNoiseDeviation * z);
      const auto element = [&](size_t a, size_t b) {
        double dot = 1;
        for (size_t f = 0; f < 3; ++f) dot += double(x[a][f]) * double(x[b][f]);
        return dot + (a == b ? sigma * sigma : 0);
      };
      const double weight = q == 0 || q == kGrid - 1 ? 1 : q % 2 ? 4 : 2;
      sum += weight * std::exp(-0.5 * z * z + dense_log_density(element, y));
    }
    return std::log(sum);
  });
}

TEST(Posterior, LargeContextsNarrowTheQuadrature) {
  // With 20,000 points sigma is known to half a percent; the predictive is nearly normal with that sigma.
  const PriorOptions options{.batch = 1, .context = 20000, .targets = 2000, .features = 2, .seed = 9};
  const RegressionBatch batch = Prior(options).batch(0);
  const Predictive exact = predict(options, batch);
  const std::vector<double> density = exact.log_density.to_vector<double>(),
                            variance = exact.variance.to_vector<double>(),
                            mean = exact.mean.to_vector<double>(), y = batch.yt.to_vector<double>();
  for (size_t j = 0; j < density.size(); ++j) {
    const double z2 = (y[j] - mean[j]) * (y[j] - mean[j]) / variance[j];
    // The mixture over sigma moves the log density by about (z^2 - 1)^2 times the squared error of log sigma.
    EXPECT_NEAR(density[j], -0.5 * (std::log(2 * M_PI * variance[j]) + z2), 1e-4 * (1 + z2 * z2));
  }
}

/// (y - mean) / deviation of each target, and the squares.
struct Residuals {
  std::vector<double> plain, square;
  Residuals(const Predictive& exact, const RegressionBatch& batch) {
    const std::vector<double> mean = exact.mean.to_vector<double>(),
                              variance = exact.variance.to_vector<double>(), y = batch.yt.to_vector<double>();
    for (size_t i = 0; i < y.size(); ++i) {
      plain.push_back((y[i] - mean[i]) / std::sqrt(variance[i]));
      square.push_back(plain.back() * plain.back());
    }
  }
};

TEST(Posterior, TargetsAreNormalAroundThePrediction) {
  // Ties the sampler to the posterior: standardised residuals have mean 0 and, for processes, variance 1.
  for (const PriorKind kind : kKinds) {
    const PriorOptions options{.kind = kind, .batch = 2000, .context = 10, .targets = 1, .seed = 12};
    const RegressionBatch batch = Prior(options).batch(0);
    const Residuals residuals(predict(options, batch), batch);
    expect_close(estimate(residuals.plain), 0);
    expect_close(estimate(residuals.square), 1);  // of a mixture too: by definition of its variance
  }
}

TEST(Posterior, IsCalibratedWithTenThousandPoints) {
  // A dense factor would take 3e11 operations per task. So many points leave the noise alone: the residuals
  // of a task are all but independent.
  for (const PriorKind kind : {PriorKind::rbf, PriorKind::matern52, PriorKind::periodic}) {
    const PriorOptions options{.kind = kind, .batch = 2, .context = 10000, .targets = 1000, .seed = 4};
    const RegressionBatch batch = Prior(options).batch(0);
    const Predictive exact = predict(options, batch);
    for (const double variance : exact.variance.to_vector<double>()) {
      EXPECT_GE(variance, noise_variance(options));
      EXPECT_LT(variance, 1.2 * noise_variance(options));
    }
    const Residuals residuals(exact, batch);
    expect_close(estimate(residuals.plain), 0);
    expect_close(estimate(residuals.square), 1);
  }
}

TEST(Posterior, WithoutContextItIsThePrior) {
  const PriorOptions options{.kind = PriorKind::rbf, .batch = 1, .context = 0, .targets = 3, .scale = 2};
  const Predictive exact = predict(options, Prior(options).batch(0));
  for (const double mean : exact.mean.to_vector<double>()) EXPECT_EQ(mean, 0);
  for (const double variance : exact.variance.to_vector<double>())
    EXPECT_NEAR(variance, 4 + noise_variance(options), 1e-14);  // a sum of 47 squares
  const PriorOptions linear{.batch = 4, .context = 0, .targets = 3};
  for (const double density : predict(linear, Prior(linear).batch(0)).log_density.to_vector<double>())
    EXPECT_TRUE(std::isfinite(density));
}

TEST(Posterior, RefusesShapesThatDoNotFit) {
  const PriorOptions options{.batch = 2, .context = 4, .targets = 3};
  RegressionBatch batch = Prior(options).batch(0);
  batch.yc = batch.yc.slice(1, 0, 3);
  EXPECT_THROW(predict(options, batch), Error);
  PriorOptions process = options;
  process.kind = PriorKind::rbf;
  const PriorOptions wide{.batch = 2, .features = 2};
  EXPECT_THROW(predict(process, Prior(wide).batch(0)), Error);
}

}  // namespace
}  // namespace tessera::datasets
