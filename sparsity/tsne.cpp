#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/parallel.h"
#include "sparsity/clusters.h"

namespace tessera::sparsity {
namespace {

using Vector = std::vector<double>;

/// p_j|i of one point: the width of the Gaussian is found by bisection, so that the entropy is
/// log(perplexity).
void fill_neighbours(double* p, const double* distances, int64_t n, int64_t i, double entropy) {
  double beta = 1, low = 0, high = std::numeric_limits<double>::infinity(), least = high;
  for (int64_t j = 0; j < n; ++j)
    if (j != i) least = std::min(least, distances[j]);
  for (int round = 0; round < 200; ++round) {
    double sum = 0, weighted = 0;
    for (int64_t j = 0; j < n; ++j) {
      p[j] = j == i ? 0 : std::exp(-(distances[j] - least) * beta);
      sum += p[j], weighted += p[j] * (distances[j] - least);
    }
    const double difference = std::log(sum) + beta * weighted / sum - entropy;
    for (int64_t j = 0; j < n; ++j) p[j] /= sum;
    if (std::abs(difference) < 1e-10) return;
    (difference > 0 ? low : high) = beta;
    beta = std::isinf(high) ? beta * 2 : (low + high) / 2;
  }
}

Vector joint_probabilities(std::span<const double> distances, int64_t n, double perplexity) {
  Vector conditional(static_cast<size_t>(n * n)), joint(static_cast<size_t>(n * n));
  // The unit of the distances is their mean: bisection begins at a width of that order.
  double mean = 0;
  for (const double distance : distances) mean += distance / double(n * n);
  Vector scaled(distances.begin(), distances.end());
  for (double& distance : scaled) distance /= mean > 0 ? mean : 1;
  for (int64_t i = 0; i < n; ++i)
    fill_neighbours(conditional.data() + i * n, scaled.data() + i * n, n, i, std::log(perplexity));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j)
      joint[size_t(i * n + j)] =
          std::max((conditional[size_t(i * n + j)] + conditional[size_t(j * n + i)]) / double(2 * n), 1e-12);
  return joint;
}

/// The first two principal coordinates, by power iteration on the doubly centred squared distances; the first
/// has standard deviation 1e-4.
void begin_at_principal(std::span<const double> distances, int64_t n, Vector (&map)[2]) {
  Vector centred(distances.begin(), distances.end()), means(static_cast<size_t>(n));
  double all = 0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) means[size_t(i)] += distances[size_t(i * n + j)] / double(n);
    all += means[size_t(i)] / double(n);
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j)
      centred[size_t(i * n + j)] =
          -0.5 * (distances[size_t(i * n + j)] - means[size_t(i)] - means[size_t(j)] + all);
  double unit = 0;
  for (int dimension = 0; dimension < 2; ++dimension) {
    Vector& v = map[dimension];
    v.resize(size_t(n));
    for (int64_t i = 0; i < n; ++i) v[size_t(i)] = std::sin(1.0 + double(i) * (1 + dimension));
    double value = 0;
    for (int round = 0; round < 300; ++round) {
      Vector next(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j) next[size_t(i)] += centred[size_t(i * n + j)] * v[size_t(j)];
      double norm = 0;
      for (const double x : next) norm += x * x;
      norm = std::sqrt(norm);
      if (norm < 1e-300) break;  // equal points: any direction
      for (double& x : next) x /= norm;
      v = std::move(next), value = norm;
    }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j) centred[size_t(i * n + j)] -= value * v[size_t(i)] * v[size_t(j)];
    // A coordinate is the eigenvector times the root of its eigenvalue; of both the first one's deviation is
    // 1e-4.
    if (dimension == 0) unit = value > 0 ? 1e-4 * std::sqrt(double(n)) / std::sqrt(value) : 1e-4;
    const double scale = unit * std::sqrt(std::max(value, 0.0));
    for (double& x : v) x *= scale > 0 ? scale : 1e-4;
  }
}

/// Gradient descent from a map, and its divergence.
Tsne descend(const Vector& p, int64_t n, Vector (&map)[2], int64_t iterations) {
  Vector step[2], gain[2], gradient[2], kernel(static_cast<size_t>(n * n));
  const double rate = std::max(double(n) / 12 / 4, 50.0);
  const int64_t early = iterations / 4;
  double normaliser = 1;
  const auto fill_kernel = [&] {
    normaliser = 0;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j) {
        const double dx = map[0][size_t(i)] - map[0][size_t(j)], dy = map[1][size_t(i)] - map[1][size_t(j)];
        const double value = i == j ? 0 : 1 / (1 + dx * dx + dy * dy);
        kernel[size_t(i * n + j)] = value;
        normaliser += value;
      }
  };
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    if (iteration == 0 || iteration == early)  // the exaggerated phase leaves no momentum
      for (int d = 0; d < 2; ++d)
        step[d].assign(size_t(n), 0), gain[d].assign(size_t(n), 1), gradient[d].assign(size_t(n), 0);
    const double exaggeration = iteration < early ? 12 : 1, momentum = iteration < early ? 0.5 : 0.8;
    fill_kernel();
    for (int64_t i = 0; i < n; ++i) {
      double sums[2] = {};
      for (int64_t j = 0; j < n; ++j) {
        const auto at = size_t(i * n + j);
        const double pull = (exaggeration * p[at] - kernel[at] / normaliser) * kernel[at];
        for (int d = 0; d < 2; ++d) sums[d] += pull * (map[d][size_t(i)] - map[d][size_t(j)]);
      }
      for (int d = 0; d < 2; ++d) gradient[d][size_t(i)] = 4 * sums[d];
    }
    for (int d = 0; d < 2; ++d)
      for (size_t i = 0; i < size_t(n); ++i) {
        gain[d][i] = std::max(step[d][i] * gradient[d][i] < 0 ? gain[d][i] + 0.2 : gain[d][i] * 0.8, 0.01);
        step[d][i] = momentum * step[d][i] - rate * gain[d][i] * gradient[d][i];
        map[d][i] += step[d][i];
      }
  }
  fill_kernel();
  Tsne found{.x = map[0], .y = map[1]};
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j) {
      const auto at = size_t(i * n + j);
      if (i != j) found.divergence += p[at] * std::log(p[at] / std::max(kernel[at] / normaliser, 1e-12));
    }
  return found;
}

}  // namespace

Tsne tsne(std::span<const double> squared_distances, int64_t n, const TsneOptions& options) {
  check(int64_t(squared_distances.size()) == n * n, "t-SNE: ", squared_distances.size(), " distances of ", n,
        " points; expected all pairs");
  check(n >= 4, "t-SNE: ", n, " points; expected 4 or more");
  check(options.perplexity >= 1, "t-SNE: perplexity ", options.perplexity, "; expected 1 or more");
  check(options.starts >= 1, "t-SNE: ", options.starts, " starts; expected 1 or more");
  const Vector p = joint_probabilities(squared_distances, n, std::min(options.perplexity, double(n - 1) / 3));
  std::vector<Tsne> maps(static_cast<size_t>(options.starts));
  parallel_for(options.starts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; ++start) {
      check_interrupt();
      Vector map[2];
      if (start == 0) {
        begin_at_principal(squared_distances, n, map);
      } else {
        Draws draws(options.seed, DrawFor::map, uint64_t(start));
        for (Vector& coordinate : map)
          for (int64_t i = 0; i < n; ++i) coordinate.push_back(1e-4 * (2 * draws.uniform() - 1));
      }
      maps[size_t(start)] = descend(p, n, map, options.iterations);
    }
  });
  return *std::min_element(maps.begin(), maps.end(),
                           [](const Tsne& a, const Tsne& b) { return a.divergence < b.divergence; });
}

}  // namespace tessera::sparsity
