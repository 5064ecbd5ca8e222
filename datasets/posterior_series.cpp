#include <algorithm>
#include <array>
#include <vector>

#include "datasets/cholesky.h"
#include "datasets/posterior_internal.h"
#include "datasets/prior_math.h"

namespace tessera::datasets {
namespace {

using Vector = std::vector<double>;

constexpr size_t kPoints = 8;            // advanced together: two vectors of four
constexpr int64_t kSeriesTargets = 256;  // columns of the triangular solve
using Lanes = std::array<double, kPoints>;

/// cos and sin of 2 pi q frequency x for q = 0, 1, 2, ... of kPoints points; those past the end are 0.
struct Harmonics {
  Lanes c{}, s{}, cosine{}, sine{};
  Harmonics(const double* x, int64_t count, double frequency) {
    for (size_t l = 0; l < size_t(std::min<int64_t>(count, kPoints)); ++l) {
      prior_math::sin_cos_turns(frequency * x[l], sine[l], cosine[l]);
      c[l] = 1;
    }
  }
  void advance() {
    for (size_t l = 0; l < kPoints; ++l) {
      const double next = c[l] * cosine[l] - s[l] * sine[l];
      s[l] = s[l] * cosine[l] + c[l] * sine[l];
      c[l] = next;
    }
  }
};

double total(const Lanes& lanes) {
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/// Sums over the context of cos and sin of harmonic q, and of those times y.
struct ContextSums {
  Vector c, s;    // q = 0 ... 2 K
  Vector yc, ys;  // q = 0 ... K
};

ContextSums sum_context(const FourierSeries& series, const TaskView& task) {
  const auto most = size_t(series.harmonics());
  std::vector<Lanes> c(2 * most + 1), s(c), yc(most + 1), ys(yc);
  for (int64_t i = 0; i < task.context; i += int64_t(kPoints)) {
    Harmonics at(task.xc + i, task.context - i, series.frequency);
    Lanes y{};
    std::copy(task.yc + i, task.yc + std::min(i + int64_t(kPoints), task.context), y.begin());
    for (size_t q = 0; q <= 2 * most; ++q) {
      for (size_t l = 0; l < kPoints; ++l) c[q][l] += at.c[l], s[q][l] += at.s[l];
      if (q <= most)
        for (size_t l = 0; l < kPoints; ++l) yc[q][l] += y[l] * at.c[l], ys[q][l] += y[l] * at.s[l];
      at.advance();
    }
  }
  const auto totals = [](const std::vector<Lanes>& lanes) {
    Vector sums;
    for (const Lanes& one : lanes) sums.push_back(total(one));
    return sums;
  };
  return {totals(c), totals(s), totals(yc), totals(ys)};
}

/// Sum over the context of function i times function j, by the product formulas of cos and sin: a matrix of
/// P^2 sums from 2 P of them. Function 0 is 1, 2 k - 1 is cos, 2 k is sin of harmonic k.
double gram(const ContextSums& sums, int64_t i, int64_t j) {
  const bool sine_i = i > 0 && i % 2 == 0, sine_j = j > 0 && j % 2 == 0;
  const int64_t ki = (i + 1) / 2, kj = (j + 1) / 2;
  const auto plus = size_t(ki + kj), minus = size_t(std::abs(ki - kj));
  if (!sine_i && !sine_j) return 0.5 * (sums.c[minus] + sums.c[plus]);
  if (sine_i && sine_j) return 0.5 * (sums.c[minus] - sums.c[plus]);
  const int64_t sine_minus_cosine = sine_j ? kj - ki : ki - kj;
  return 0.5 * (sums.s[plus] + (sine_minus_cosine < 0 ? -sums.s[minus] : sums.s[minus]));
}

}  // namespace

bool predict_series(const FourierSeries& series, double noise_variance, const TaskView& task) {
  const int64_t p = series.functions();
  const auto amplitude = [&](int64_t i) { return series.amplitude[size_t((i + 1) / 2)]; };
  const ContextSums sums = sum_context(series, task);
  Vector factor(size_t(p * p)),
      weight(static_cast<size_t>(p));  // of A = I + Phi^T Phi / noise; U^-T Phi^T y / noise
  for (int64_t i = 0; i < p; ++i) {
    for (int64_t j = i; j < p; ++j)
      factor[size_t(i * p + j)] =
          double(i == j) + amplitude(i) * amplitude(j) / noise_variance * gram(sums, i, j);
    const auto k = size_t((i + 1) / 2);
    weight[size_t(i)] = amplitude(i) / noise_variance * (i > 0 && i % 2 == 0 ? sums.ys[k] : sums.yc[k]);
  }
  if (!cholesky(factor.data(), p)) return false;
  solve_lower(factor.data(), p, weight.data(), 1);
  for (int64_t begin = 0; begin < task.targets; begin += kSeriesTargets) {
    const int64_t count = std::min(kSeriesTargets, task.targets - begin);
    Vector phi(size_t(p * count));  // [p, targets of the chunk], then U^-T of it
    for (int64_t j = 0; j < count; j += int64_t(kPoints)) {
      Harmonics at(task.xt + begin + j, count - j, series.frequency);
      for (int64_t k = 0; k <= series.harmonics(); ++k) {
        for (int64_t l = 0; l < std::min(int64_t(kPoints), count - j); ++l) {
          const double scale = series.amplitude[size_t(k)];
          if (k > 0) phi[size_t(2 * k * count + j + l)] = scale * at.s[size_t(l)];
          phi[size_t(std::max<int64_t>(2 * k - 1, 0) * count + j + l)] = scale * at.c[size_t(l)];
        }
        at.advance();
      }
    }
    solve_lower(factor.data(), p, phi.data(), count);
    double *const mean = task.mean + begin, *const variance = task.variance + begin;
    std::fill(mean, mean + count, 0.0), std::fill(variance, variance + count, noise_variance);
    for (int64_t i = 0; i < p; ++i) {
      for (int64_t j = 0; j < count; ++j) {
        const double value = phi[size_t(i * count + j)];
        mean[j] += value * weight[size_t(i)], variance[j] += value * value;
      }
    }
    for (int64_t j = 0; j < count; ++j)
      task.log_density[begin + j] = log_normal(task.yt[begin + j], mean[j], variance[j]);
  }
  return true;
}

}  // namespace tessera::datasets
