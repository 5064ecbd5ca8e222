#pragma once

#include <cstdint>
#include <string_view>

#include "tensor/tensor.h"

/// Synthetic regression tasks drawn from a prior whose Bayes-optimal prediction is known exactly
/// (datasets/posterior.h): a model trained on them can be compared with the best that any model could do.

namespace tessera::datasets {

enum class PriorKind : uint8_t {
  linear,  // y = b0 + x . beta + eps;  b0, beta, x ~ N(0, 1),  eps ~ N(0, sigma^2),  log sigma ~ N(-1, 0.3^2)
  rbf,     // Gaussian process, k(r) = s^2 exp(-r^2 / (2 l^2))
  matern52,  // k(r) = s^2 (1 + a + a^2 / 3) exp(-a),  a = sqrt(5) |r| / l
  periodic   // k(r) = s^2 exp(-2 sin^2(pi r / p) / l^2)
};
const char* name_of(PriorKind kind);  // "matern52"
/// Throws, naming the nearest.
PriorKind parse_prior(std::string_view name);

/// Mean and standard deviation of log sigma of the linear prior.
inline constexpr double kLogNoiseMean = -1, kLogNoiseDeviation = 0.3;

/// The Gaussian processes (Rasmussen, Williams: "Gaussian processes for machine learning", chapter 4) are
/// one-dimensional with x ~ U[-2, 2); their hyperparameters are fixed and known.
struct PriorOptions {
  PriorKind kind = PriorKind::linear;
  int64_t batch = 16;    // B: tasks
  int64_t context = 64;  // M
  int64_t targets = 64;  // N
  int64_t features = 1;  // F; 1 for Gaussian processes
  uint64_t seed = 0;
  double lengthscale = 0.5;  // l
  double scale = 1;          // s
  double noise = 0.1;        // standard deviation of the noise on context and targets alike
  double period = 1;         // p
};

/// f32. Targets carry noise, as the context does.
struct RegressionBatch {
  Tensor xc, yc;  // [B, M, F], [B, M, 1]
  Tensor xt, yt;  // [B, N, F], [B, N, 1]
  void fields(auto&& visit) { visit("xc", xc), visit("yc", yc), visit("xt", xt), visit("yt", yt); }
};

/// Version of the function (seed, index) -> tasks. Runs note it: a checkpoint of another version goes on with
/// other tasks, so it is refused (train/tnp_job.h). 1 was drawn on the host through Cholesky factors.
inline constexpr int64_t kTaskStream = 2;

/// The source of tasks, on the CPU or on a GPU's compute stream. Both draw from the same Philox blocks,
/// addressed by (seed, index): the same tasks but for the last bit of f32.
///
///   linear         directly.
///   rbf, periodic  by the Fourier series of the kernel (datasets/fourier.h): some 50 multiply-adds per
///                  point.
///   matern52       by its stochastic differential equation (datasets/matern_math.h), exact at the
///                  points: they are sorted, and each state follows from the one before.
class Prior {
 public:
  /// Throws, naming the option, for sizes below 1 (below 0 for the context), hyperparameters that are not
  /// positive (below 0 for the noise), and a lengthscale that the Fourier series cannot follow.
  explicit Prior(const PriorOptions& options, Device device = Device::cpu());
  const PriorOptions& options() const { return options_; }
  Device device() const { return device_; }

  /// A batch on the prior's device, f32: a pure function of the options and the index. Resuming is only an
  /// index, and neither threads nor order matter. On a GPU the host does not wait.
  RegressionBatch batch(uint64_t index) const;
  /// The same into existing packed f32 tensors of the prior's device and shapes, without allocating. May be
  /// called by several threads at once on the CPU, by one at a time on a GPU. Throws while a graph is being
  /// captured: its replays would repeat this batch. Draw before each replay instead.
  void draw(uint64_t index, const RegressionBatch& out) const;

 private:
  PriorOptions options_;
  Device device_;
  double frequency_ = 0;     // of the Fourier series
  Tensor amplitudes_;        // of the Fourier series: f64 [K + 1], on the device
  Tensor order_, sorted_x_;  // of a state-space prior on a GPU: [B (M + N)], scratch
  Tensor increments_;        // likewise, [B (M + N), 4]
};

/// k(x - x') of a Gaussian process; s^2 at 0.
double covariance(const PriorOptions& options, double difference);
/// What the diagonal of a covariance matrix of observations has in addition to k(0): noise^2, and 1e-8 s^2 so
/// that a matrix without noise can be factored. Part of the prior: the posterior has it too.
double noise_variance(const PriorOptions& options);

}  // namespace tessera::datasets
