#pragma once

#include <cmath>
#include <numbers>

#include "datasets/fourier.h"

/// The parts of datasets/posterior.h.

namespace tessera::datasets {

/// One task: views into packed f64 copies of the batch.
struct TaskView {
  const double *xc, *yc, *xt, *yt;
  int64_t context, targets, features;
  double *mean, *variance, *log_density;  // results, [targets]
};

inline double log_normal(double y, double mean, double variance) {
  const double off = y - mean;
  return -0.5 * (std::log(2 * std::numbers::pi * variance) + off * off / variance);
}

/// A process with this Fourier series, as Bayesian linear regression on its functions. False if a matrix is
/// not positive definite in f64.
[[nodiscard]] bool predict_series(const FourierSeries& series, double noise_variance, const TaskView& task);
/// The Matern process of smoothness 5/2, by filtering and smoothing.
void predict_matern(const PriorOptions& prior, const TaskView& task);

}  // namespace tessera::datasets
