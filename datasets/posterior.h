#pragma once

#include "datasets/prior.h"

namespace tessera::datasets {

/// The exact predictive distribution of every target given the context of its task: f64 on the host, [B, N].
struct Predictive {
  Tensor mean, variance;  // of y, noise included
  Tensor log_density;     // log p(yt | xt, context), nats
};

/// Bayes-optimal prediction under the prior: no model has a lower expected negative log-likelihood on its
/// tasks. Of `prior`, only the kind and the hyperparameters count; sizes are the batch's.
///
///   rbf, periodic      Bayesian linear regression on the P functions of the kernel's Fourier series
///                      (datasets/fourier.h): with A = I + Phi^T Phi / noise the prediction is normal with
///                      mean phi^T A^-1 Phi^T yc / noise and variance phi^T A^-1 phi + noise. The entries of
///                      Phi^T Phi are sums over harmonics, so a task costs M P + P^3 + N P^2 operations.
///   matern52           Kalman filter and smoother of its stochastic differential equation
///                      (datasets/matern_math.h) over all points in order: linear in M + N.
///                      Both are the Gaussian posterior of Rasmussen, Williams, equations 2.23 and 2.24,
///                      whose dense matrix costs M^3. They agree with it to the rounding errors of the
///                      problem, 2^-53 times its condition number of M s^2 / noise.
///   linear             given sigma, coefficients w ~ N(0, I) and phi = (1, x), with
///                      A = I + Phi^T Phi / sigma^2:
///                        y ~ N(phi^T A^-1 Phi^T yc / sigma^2, sigma^2 + phi^T A^-1 phi)
///                      and the context has the marginal likelihood N(yc; 0, sigma^2 I + Phi Phi^T). These
///                      Gaussians are mixed over u = log sigma by the trapezoidal rule on 128 nodes, weighted
///                      by p(u) times that likelihood, over the interval outside which the weight is below
///                      e^-40 of its peak: for such a smooth bump the rule is exact to rounding.
///
/// Throws if shapes do not agree, and if an input of a Gaussian process is not finite.
Predictive predict(const PriorOptions& prior, const RegressionBatch& batch);

/// Mean of -log_density: the lowest that a model can reach on this batch, in expectation. Nats per point.
double optimal_nll(const PriorOptions& prior, const RegressionBatch& batch);

}  // namespace tessera::datasets
