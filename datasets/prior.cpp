#include "datasets/prior.h"

#include <cmath>
#include <numbers>
#include <string>

#include "datasets/fourier.h"
#include "datasets/prior_kernels.h"
#include "runtime/has_cuda.h"
#include "runtime/text.h"

namespace tessera::datasets {
namespace {

constexpr const char* kNames[] = {"linear", "rbf", "matern52", "periodic"};

}  // namespace

const char* name_of(PriorKind kind) {
  return kNames[size_t(kind)];
}

PriorKind parse_prior(std::string_view name) {
  return parse_name<PriorKind>("prior: there is no", kNames, name);
}

Prior::Prior(const PriorOptions& options, Device device) : options_(options), device_(device) {
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
  if (options.kind == PriorKind::matern52) {
    if (device.is_cpu()) return;
    const int64_t points = options.batch * (options.context + options.targets);
    order_ = Tensor::empty_packed({points}, DType::i64, device);
    sorted_x_ = Tensor::empty_packed({points}, DType::f32, device);
    increments_ = Tensor::empty_packed({points, 4}, DType::f64, device);
    return;
  }
  const FourierSeries series = fourier_series(options, kInputSpan);
  frequency_ = series.frequency;
  amplitudes_ = Tensor::from(series.amplitude, {series.harmonics() + 1}).to(device).packed();
}

RegressionBatch Prior::batch(uint64_t index) const {
  const auto empty = [&](int64_t points, int64_t width) {
    return Tensor::empty_packed({options_.batch, points, width}, DType::f32, device_);
  };
  const RegressionBatch result{empty(options_.context, options_.features), empty(options_.context, 1),
                               empty(options_.targets, options_.features), empty(options_.targets, 1)};
  draw(index, result);
  return result;
}

void Prior::draw(uint64_t index, const RegressionBatch& out) const {
  const auto& [kind, batch, context, targets, features, seed, l, s, noise, p] = options_;
  const auto fits = [&, tasks = batch](const Tensor& tensor, int64_t points, int64_t width) {
    return tensor.defined() && tensor.shape() == Shape({tasks, points, width}) &&
           tensor.dtype() == DType::f32 && tensor.device() == device_ && tensor.layout().is_packed();
  };
  check(fits(out.xc, context, features) && fits(out.yc, context, 1) && fits(out.xt, targets, features) &&
            fits(out.yt, targets, 1),
        "prior ", name_of(kind), ": draw needs packed f32 tensors on ", device_.name(), " of xc [", batch,
        ", ", context, ", ", features, "], yc [", batch, ", ", context, ", 1], xt [", batch, ", ", targets,
        ", ", features, "] and yt [", batch, ", ", targets, ", 1]");
  check(!device_.capturing(), "prior ", name_of(kind),
        ": tasks drawn inside a captured graph would be the same at each replay; draw before the replay");
  for (const Tensor* tensor : {&out.xc, &out.yc, &out.xt, &out.yt}) tensor->bump_version();
  const PriorDraw draw{.stream = {seed ^ prior_math::kDomain, index},
                       .out = {out.xc.data<float>(), out.yc.data<float>(), out.xt.data<float>(),
                               out.yt.data<float>(), batch, context, targets, features},
                       .noise = std::sqrt(noise_variance(options_)),
                       .scale = s,
                       .rate = std::sqrt(5.0) / l,
                       .frequency = frequency_,
                       .harmonics = amplitudes_.defined() ? amplitudes_.count() - 1 : 0,
                       .amplitude = amplitudes_.defined() ? amplitudes_.data<double>() : nullptr,
                       .order = order_.defined() ? order_.data<int64_t>() : nullptr,
                       .sorted_x = sorted_x_.defined() ? sorted_x_.data<float>() : nullptr,
                       .increments = increments_.defined() ? increments_.data<double>() : nullptr};
  if (device_.is_cpu()) {
    draw_cpu(kind, draw);
  } else if constexpr (kCuda) {
    draw_cuda(device_, kind, draw);
  }
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
