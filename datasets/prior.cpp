#include "datasets/prior.h"

#include <array>
#include <atomic>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "datasets/cholesky.h"
#include "runtime/gaussian.h"
#include "runtime/parallel.h"

namespace tessera::datasets {
namespace {

constexpr std::array<const char*, 4> kNames{"linear", "rbf", "matern52", "periodic"};

/// A model initialised from the same seed must not meet the same numbers.
constexpr uint64_t kDomain = 0x7072696F72000001;  // "prior"

/// The random streams of one batch.
enum Stream : uint64_t { kCoefficients, kPositions, kNoise, kStreams };

/// Where value (task, i) of the context or, from M on, of the targets goes.
struct Split {
  float* context;
  float* targets;
  int64_t context_count, target_count, width;
  float& at(int64_t task, int64_t i, int64_t feature = 0) const {
    return i < context_count ? context[(task * context_count + i) * width + feature]
                             : targets[(task * target_count + i - context_count) * width + feature];
  }
};

Split split(const Tensor& context, const Tensor& targets) {
  return {context.data<float>(), targets.data<float>(), context.size(1), targets.size(1), context.size(2)};
}

}  // namespace

const char* name_of(PriorKind kind) {
  return kNames[size_t(kind)];
}

PriorKind parse_prior(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i)
    if (name == kNames[i]) return PriorKind(i);
  const std::string near = nearest(std::string(name), NameList(kNames));
  fail_at(Site::here(), "prior: there is no \"", name, "\"; expected linear, rbf, matern52 or periodic",
          near.empty() ? "" : "; did you mean " + near + "?");
}

Prior::Prior(const PriorOptions& options) : options_(options) {
  check(options.batch >= 1 && options.context >= 0 && options.targets >= 1 && options.features >= 1,
        "prior: batch ", options.batch, ", context ", options.context, ", targets ", options.targets,
        " and features ", options.features, " must be at least 1 (the context at least 0)");
  if (options.kind == PriorKind::linear) return;
  check(options.features == 1, "prior ", name_of(options.kind), ": features ", options.features,
        " is not supported; Gaussian processes here have one");
  const auto positive = [&](const char* what, double value) {
    check(std::isfinite(value) && value > 0, "prior ", name_of(options.kind), ": ", what, " ", value,
          " must be finite and above 0");
  };
  positive("lengthscale", options.lengthscale), positive("scale", options.scale);
  positive("period", options.period);
  check(std::isfinite(options.noise) && options.noise >= 0, "prior ", name_of(options.kind), ": noise ",
        options.noise, " must be finite and not negative");
}

RegressionBatch Prior::batch(uint64_t index) const {
  const auto& [kind, batch, context, targets, features, seed, l, s, noise, p] = options_;
  const auto empty = [tasks = batch](int64_t points, int64_t width) {
    return Tensor::empty_packed({tasks, points, width}, DType::f32, Device::cpu());
  };
  const RegressionBatch result{empty(context, features), empty(context, 1), empty(targets, features),
                               empty(targets, 1)};
  kind == PriorKind::linear ? draw_linear(index, result) : draw_process(index, result);
  return result;
}

void Prior::draw_linear(uint64_t index, const RegressionBatch& batch) const {
  const int64_t points = options_.context + options_.targets, features = options_.features;
  const Split x = split(batch.xc, batch.xt), y = split(batch.yc, batch.yt);
  const auto draw = [&](Stream stream, int64_t i) {
    return gaussian(options_.seed ^ kDomain, index * kStreams + stream, uint64_t(i));
  };
  // Pieces of all tasks' points; each element is addressed, so the partition does not matter.
  parallel_for(options_.batch * points, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t task = i / points, point = i % points, coefficients = task * (features + 2);
      double value = draw(kCoefficients, coefficients);
      for (int64_t f = 0; f < features; ++f) {
        const double position = draw(kPositions, i * features + f);
        x.at(task, point, f) = float(position);
        value += position * draw(kCoefficients, coefficients + 1 + f);
      }
      const double log_sigma =
          kLogNoiseMean + kLogNoiseDeviation * draw(kCoefficients, coefficients + 1 + features);
      y.at(task, point) = float(value + std::exp(log_sigma) * draw(kNoise, i));
    }
  });
}

void Prior::draw_process(uint64_t index, const RegressionBatch& batch) const {
  const int64_t points = options_.context + options_.targets;
  const Split xs = split(batch.xc, batch.xt), ys = split(batch.yc, batch.yt);
  const uint64_t seed = options_.seed ^ kDomain;
  std::atomic<bool> failed = false;  // an exception may not leave a parallel region
  parallel_for(options_.batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> matrix(size_t(points * points)), x(static_cast<size_t>(points)), z(x), y(x);
    for (int64_t task = begin; task < end; ++task) {
      for (int64_t i = 0; i < points; ++i) {
        const uint64_t at = uint64_t(task * points + i);
        const Uint4 random = philox(seed, index * kStreams + kPositions, at);
        xs.at(task, i) = float(4 * double(uniform_half_open(random.word[0])) - 2);
        x[size_t(i)] = double(xs.at(task, i));
        z[size_t(i)] = gaussian(seed, index * kStreams + kNoise, at);
      }
      for (int64_t i = 0; i < points; ++i) {
        for (int64_t j = i; j < points; ++j)
          matrix[size_t(i * points + j)] = covariance(options_, x[size_t(i)] - x[size_t(j)]);
        matrix[size_t(i * points + i)] += noise_variance(options_);
      }
      if (!cholesky(matrix.data(), points)) {
        failed = true;
        continue;
      }
      multiply_lower(matrix.data(), points, z.data(), y.data());
      for (int64_t i = 0; i < points; ++i) ys.at(task, i) = float(y[size_t(i)]);
    }
  });
  check(!failed.load(), "prior ", name_of(options_.kind), ": the covariance matrix of ", points,
        " points is not positive definite in f64; raise the noise of ", options_.noise);
}

double covariance(const PriorOptions& options, double difference) {
  const double l = options.lengthscale, variance = options.scale * options.scale;
  switch (options.kind) {
    case PriorKind::rbf:
      return variance * std::exp(-difference * difference / (2 * l * l));
    case PriorKind::matern52: {
      const double a = std::sqrt(5.0) * std::abs(difference) / l;
      return variance * (1 + a + a * a / 3) * std::exp(-a);
    }
    case PriorKind::periodic: {
      const double wave = std::sin(std::numbers::pi * difference / options.period) / l;
      return variance * std::exp(-2 * wave * wave);
    }
    default:
      fail_at(Site::here(), "prior linear: it is no Gaussian process with a known covariance");
  }
}

double noise_variance(const PriorOptions& options) {
  return options.noise * options.noise + 1e-8 * options.scale * options.scale;
}

}  // namespace tessera::datasets
