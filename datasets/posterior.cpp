#include "datasets/posterior.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "datasets/cholesky.h"
#include "datasets/fourier.h"
#include "datasets/posterior_internal.h"
#include "runtime/parallel.h"

namespace tessera::datasets {
namespace {

constexpr int kNodes = 128;
constexpr double kNegligible = 40;    // nats below the peak
constexpr size_t kTargetChunk = 256;  // targets of one triangular solve
using Vector = std::vector<double>;

/// The linear model given log sigma, from the sums over the context that it needs.
class LinearGivenNoise {
 public:
  explicit LinearGivenNoise(const TaskView& task)
      : width_(task.features + 1),
        count_(double(task.context)),
        gram_(size_t(width_ * width_)),
        moment_(size_t(width_)),
        factor_(gram_),
        mean_(moment_),
        phi_(moment_) {
    for (int64_t i = 0; i < task.context; ++i) {
      load(task.xc + i * task.features);
      for (int64_t a = 0; a < width_; ++a) {
        for (int64_t b = 0; b < width_; ++b)
          gram_[size_t(a * width_ + b)] += phi_[size_t(a)] * phi_[size_t(b)];
        moment_[size_t(a)] += phi_[size_t(a)] * task.yc[i];
      }
      squares_ += task.yc[i] * task.yc[i];
    }
  }

  /// Fixes log sigma; returns log p(u) + log p(yc | u) but for a constant, or NaN if A cannot be factored.
  double fix(double u) {
    variance_ = std::exp(2 * u);
    for (size_t i = 0; i < gram_.size(); ++i) factor_[i] = gram_[i] / variance_;
    for (int64_t a = 0; a < width_; ++a) {
      factor_[size_t(a * width_ + a)] += 1;
      mean_[size_t(a)] = moment_[size_t(a)] / variance_;
    }
    if (!cholesky(factor_.data(), width_)) return std::nan("");
    solve_lower(factor_.data(), width_, mean_.data(), 1);
    const double fit = std::inner_product(mean_.begin(), mean_.end(), mean_.begin(), 0.0);
    const double z = (u - kLogNoiseMean) / kLogNoiseDeviation;
    return -0.5 * z * z - count_ * u - half_log_determinant(factor_.data(), width_) -
           0.5 * (squares_ / variance_ - fit);
  }

  /// Mean and variance of y at `count` inputs x [count, features].
  void at(const double* x, int64_t count, double* mean, double* variance) {
    at_.resize(size_t(width_ * count));  // (1, x) of all inputs as columns, then U^-T of it
    for (int64_t j = 0; j < count; ++j) {
      at_[size_t(j)] = 1;
      for (int64_t a = 1; a < width_; ++a) at_[size_t(a * count + j)] = x[j * (width_ - 1) + a - 1];
    }
    solve_lower(factor_.data(), width_, at_.data(), count);
    std::fill(mean, mean + count, 0.0), std::fill(variance, variance + count, variance_);
    for (int64_t a = 0; a < width_; ++a) {
      const double* const row = at_.data() + a * count;
      const double weight = mean_[size_t(a)];
      for (int64_t j = 0; j < count; ++j) mean[j] += weight * row[j], variance[j] += row[j] * row[j];
    }
  }

 private:
  void load(const double* x) {
    phi_[0] = 1;
    std::copy(x, x + width_ - 1, phi_.begin() + 1);
  }
  int64_t width_;
  double count_, squares_ = 0, variance_ = 1;
  Vector gram_, moment_;        // Phi^T Phi, Phi^T y
  Vector factor_, mean_, phi_;  // U of A = U^T U; U^-T Phi^T y / sigma^2; (1, x)
  Vector at_;
};

/// Equally spaced log sigma that cover the posterior, with normalised weights.
struct Quadrature {
  std::array<double, kNodes> u, weight;
};

bool make_quadrature(LinearGivenNoise& model, Quadrature& nodes) {
  double low = kLogNoiseMean - 8 * kLogNoiseDeviation, high = kLogNoiseMean + 8 * kLogNoiseDeviation;
  for (int round = 0;; ++round) {
    const double spacing = (high - low) / (kNodes - 1);
    for (int q = 0; q < kNodes; ++q) {
      nodes.u[size_t(q)] = low + spacing * q;
      nodes.weight[size_t(q)] = model.fix(nodes.u[size_t(q)]);
      if (std::isnan(nodes.weight[size_t(q)])) return false;
    }
    const double peak = *std::max_element(nodes.weight.begin(), nodes.weight.end());
    const auto matters = [&](double weight) { return weight > peak - kNegligible; };
    const auto first = std::find_if(nodes.weight.begin(), nodes.weight.end(), matters);
    const auto last = std::find_if(nodes.weight.rbegin(), nodes.weight.rend(), matters);
    // One node more on each side: the peak itself may lie between nodes.
    const double new_low = std::max(low, low + spacing * double(first - nodes.weight.begin() - 1));
    const double new_high = std::min(high, high - spacing * double(last - nodes.weight.rbegin() - 1));
    if (round == 8 || new_high - new_low > 0.5 * (high - low)) {
      double sum = 0;
      for (double& weight : nodes.weight) sum += weight = std::exp(weight - peak);
      for (double& weight : nodes.weight) weight /= sum;
      return true;
    }
    low = new_low, high = new_high;
  }
}

bool predict_linear(const TaskView& task) {
  LinearGivenNoise model(task);
  Quadrature nodes;
  if (!make_quadrature(model, nodes)) return false;
  const size_t n = size_t(task.targets);
  Vector terms(n * kNodes), square(n, 0.0), mean(kTargetChunk), variance(mean);
  std::fill(task.mean, task.mean + n, 0.0);
  for (size_t q = 0; q < kNodes; ++q) {
    if (std::isnan(model.fix(nodes.u[q]))) return false;
    for (size_t begin = 0; begin < n; begin += kTargetChunk) {
      const size_t count = std::min(kTargetChunk, n - begin);
      model.at(task.xt + int64_t(begin) * task.features, int64_t(count), mean.data(), variance.data());
      for (size_t i = 0; i < count; ++i) {
        const size_t j = begin + i;
        task.mean[j] += nodes.weight[q] * mean[i];
        square[j] += nodes.weight[q] * (variance[i] + mean[i] * mean[i]);
        terms[j * kNodes + q] = std::log(nodes.weight[q]) + log_normal(task.yt[j], mean[i], variance[i]);
      }
    }
  }
  for (size_t j = 0; j < n; ++j) {
    task.variance[j] = square[j] - task.mean[j] * task.mean[j];
    const double* const term = terms.data() + j * kNodes;
    const double peak = *std::max_element(term, term + kNodes);
    double sum = 0;
    for (int q = 0; q < kNodes; ++q) sum += std::exp(term[q] - peak);
    task.log_density[j] = peak + std::log(sum);
  }
  return true;
}

}  // namespace

namespace {

/// The largest distance between inputs of the batch. Throws unless all are finite.
double input_span(const PriorOptions& prior, const Tensor& xc, const Tensor& xt) {
  double low = 0, high = 0;
  for (const Tensor* tensor : {&xc, &xt}) {
    const double* const x = tensor->data<double>();
    for (int64_t i = 0; i < tensor->count(); ++i) {
      check(std::isfinite(x[i]), "predict: prior ", name_of(prior.kind), ": an input is ", x[i]);
      low = std::min(low, x[i]), high = std::max(high, x[i]);
    }
  }
  return high - low;
}

}  // namespace

Predictive predict(const PriorOptions& prior, const RegressionBatch& batch) {
  const auto& [xc, yc, xt, yt] = batch;
  check(xc.rank() == 3 && xt.rank() == 3, "predict: xc ", describe(xc), " and xt ", describe(xt),
        " must be [B, M, F] and [B, N, F]");
  const int64_t tasks = xc.size(0), m = xc.size(1), n = xt.size(1), features = xc.size(2);
  check(xt.shape() == Shape({tasks, n, features}) && yc.shape() == Shape({tasks, m, 1}) &&
            yt.shape() == Shape({tasks, n, 1}),
        "predict: xc ", describe(xc), ", yc ", describe(yc), ", xt ", describe(xt), " and yt ", describe(yt),
        " do not fit together; expected [B, M, F], [B, M, 1], [B, N, F], [B, N, 1]");
  check(prior.kind == PriorKind::linear || features == 1, "predict: prior ", name_of(prior.kind), " of ",
        features, " features; a Gaussian process here has one");
  const auto packed = [](const Tensor& tensor) {
    return tensor.detach().to(Device::cpu()).to(DType::f64).packed();
  };
  const Tensor xc64 = packed(xc), yc64 = packed(yc), xt64 = packed(xt), yt64 = packed(yt);
  const auto result = [&] { return Tensor::empty_packed({tasks, n}, DType::f64, Device::cpu()); };
  const Predictive predictive{result(), result(), result()};
  FourierSeries series;
  if (prior.kind != PriorKind::linear) {
    const double span = std::max(kInputSpan, input_span(prior, xc64, xt64));
    if (prior.kind != PriorKind::matern52) series = fourier_series(prior, span);
  }
  std::atomic<bool> failed = false;
  parallel_for(tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const TaskView view{xc64.data<double>() + task * m * features,
                          yc64.data<double>() + task * m,
                          xt64.data<double>() + task * n * features,
                          yt64.data<double>() + task * n,
                          m,
                          n,
                          features,
                          predictive.mean.data<double>() + task * n,
                          predictive.variance.data<double>() + task * n,
                          predictive.log_density.data<double>() + task * n};
      bool done = true;
      if (prior.kind == PriorKind::linear) {
        done = predict_linear(view);
      } else if (prior.kind == PriorKind::matern52) {
        predict_matern(prior, view);
      } else {
        done = predict_series(series, noise_variance(prior), view);
      }
      if (!done) failed = true;
    }
  });
  check(!failed.load(), "predict: prior ", name_of(prior.kind),
        ": a covariance matrix is not positive definite in f64; is an input not finite?");
  return predictive;
}

double optimal_nll(const PriorOptions& prior, const RegressionBatch& batch) {
  const std::vector<double> values = predict(prior, batch).log_density.to_vector<double>();
  check(!values.empty(), "optimal_nll: the batch has no targets");
  return -std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

}  // namespace tessera::datasets
