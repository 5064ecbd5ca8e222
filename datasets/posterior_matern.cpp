#include <algorithm>
#include <vector>

#include "datasets/matern_math.h"
#include "datasets/posterior_internal.h"

namespace tessera::datasets {
namespace {

/// A point in the order of x, with what the forward pass knew before it saw its value: the state given all
/// earlier context points, in units of s.
struct Step {
  int64_t point;  // of the context, or from there on of the targets
  double tau;     // since the step before
  double mean[3], p[3][3];
  double innovation, innovation_variance;  // of a context point
};

/// m = A m and p = A p A^T + Q.
void advance(double tau, double* m, double (*p)[3]) {
  const MaternDecay decay(tau);
  decay.apply(m);
  double columns[3][3];
  for (int i = 0; i < 3; ++i) {
    for (int c = 0; c < 3; ++c) columns[i][c] = p[c][i];
    decay.apply(columns[i]);  // column i of A p
  }
  for (int c = 0; c < 3; ++c) {
    double row[3] = {columns[0][c], columns[1][c], columns[2][c]};
    decay.apply(row);
    for (int i = c; i < 3; ++i) p[c][i] = row[i];
  }
  const Matern3 q = matern_noise(tau);
  p[0][0] += q.q00, p[0][1] += q.q01, p[0][2] += q.q02, p[1][1] += q.q11, p[1][2] += q.q12, p[2][2] += q.q22;
  p[1][0] = p[0][1], p[2][0] = p[0][2], p[2][1] = p[1][2];
}

}  // namespace

void predict_matern(const PriorOptions& prior, const TaskView& task) {
  const double rate = std::sqrt(5.0) / prior.lengthscale, s = prior.scale;
  const double noise = noise_variance(prior), relative_noise = noise / (s * s);
  const auto x_of = [&](int64_t point) {
    return point < task.context ? task.xc[point] : task.xt[point - task.context];
  };
  std::vector<Step> steps(size_t(task.context + task.targets));
  for (size_t k = 0; k < steps.size(); ++k) steps[k].point = int64_t(k);
  std::sort(steps.begin(), steps.end(), [&](const Step& a, const Step& b) {
    const double xa = x_of(a.point), xb = x_of(b.point);
    return xa != xb ? xa < xb : a.point < b.point;
  });

  // Kalman filter.
  double m[3] = {}, p[3][3] = {};
  for (size_t k = 0; k < steps.size(); ++k) {
    Step& step = steps[k];
    step.tau = k == 0 ? kMaternForever : rate * (x_of(step.point) - x_of(steps[k - 1].point));
    advance(step.tau, m, p);
    std::copy(m, m + 3, step.mean);
    for (int c = 0; c < 3; ++c) std::copy(p[c], p[c] + 3, step.p[c]);
    if (step.point >= task.context) continue;
    step.innovation = task.yc[step.point] / s - m[0];
    step.innovation_variance = p[0][0] + relative_noise;
    const double kept = relative_noise / step.innovation_variance;  // of the variance of f: no cancellation
    for (int c = 0; c < 3; ++c) m[c] += p[0][c] * step.innovation / step.innovation_variance;
    for (int c = 1; c < 3; ++c)
      for (int i = 1; i < 3; ++i) p[c][i] -= step.p[0][c] * step.p[0][i] / step.innovation_variance;
    for (int c = 0; c < 3; ++c) p[0][c] *= kept, p[c][0] = p[0][c];
  }

  // Smoother of Bryson and Frazier (Bierman, "Fixed interval smoothing with discrete measurements", Int. J.
  // Control 18, 1973): carries what later points say as (-l, L) instead of inverting p, which is all but
  // singular where points are close. Smoothed state: mean - p l, covariance p - p L p.
  double l[3] = {}, big[3][3] = {};
  for (size_t k = steps.size(); k-- > 0;) {
    const Step& step = steps[k];
    const double* const q = step.p[0];  // covariance of f with the state
    if (step.point >= task.context) {
      double mean = step.mean[0], variance = q[0];
      for (int c = 0; c < 3; ++c) {
        mean -= q[c] * l[c];
        for (int i = 0; i < 3; ++i) variance -= q[c] * big[c][i] * q[i];
      }
      const int64_t j = step.point - task.context;
      task.mean[j] = s * mean;
      // Rounding may take the difference of nearly equal numbers below 0, which it cannot be.
      task.variance[j] = std::max(s * s * variance, 0.0) + noise;
      task.log_density[j] = log_normal(task.yt[j], task.mean[j], task.variance[j]);
    } else {
      double gain[3], w[3] = {};
      for (int c = 0; c < 3; ++c) gain[c] = q[c] / step.innovation_variance;
      for (int c = 0; c < 3; ++c)
        for (int i = 0; i < 3; ++i) w[c] += big[c][i] * gain[i];
      l[0] -= gain[0] * l[0] + gain[1] * l[1] + gain[2] * l[2] + step.innovation / step.innovation_variance;
      big[0][0] += gain[0] * w[0] + gain[1] * w[1] + gain[2] * w[2] - 2 * w[0] + 1 / step.innovation_variance;
      for (int c = 1; c < 3; ++c) big[0][c] -= w[c], big[c][0] = big[0][c];
    }
    // Back over the gap: l = A^T l, L = A^T L A.
    const MaternDecay decay(step.tau);
    decay.apply_transposed(l);
    for (auto& row : big) decay.apply_transposed(row);
    for (int c = 0; c < 3; ++c) {
      double column[3] = {big[0][c], big[1][c], big[2][c]};
      decay.apply_transposed(column);
      for (int i = 0; i < 3; ++i) big[i][c] = column[i];
    }
    for (int c = 0; c < 3; ++c)
      for (int i = 0; i < c; ++i) big[c][i] = big[i][c] = 0.5 * (big[c][i] + big[i][c]);
  }
}

}  // namespace tessera::datasets
