#include "eval/tnp_densities.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "datasets/posterior.h"
#include "report/image.h"

namespace tessera::eval {

namespace {

constexpr int kWidth = 240, kHeight = 180;
constexpr double kLeft = -2, kRight = 2, kBottom = -3.5, kTop = 3.5;

double x_of(int column) {
  return kLeft + (kRight - kLeft) * (column + 0.5) / kWidth;
}
double y_of(int row) {
  return kTop - (kTop - kBottom) * (row + 0.5) / kHeight;
}

/// x of every column, [1, columns, 1].
Tensor columns() {
  std::vector<float> x;
  for (int column = 0; column < kWidth; ++column) x.push_back(float(x_of(column)));
  return Tensor::from(x, {1, kWidth, 1});
}

/// Density of the model's mixture at every pixel.
std::vector<double> model_density(const models::Tnp& model, Device device, const Tensor& xc,
                                  const Tensor& yc) {
  const std::vector<double> mixture =
      model(xc.to(device), yc.to(device), columns().to(device)).to_vector<double>();  // [columns, 1, K, 3]
  const int64_t components = model.config.components;
  std::vector<double> density(size_t(kWidth) * kHeight);
  for (int column = 0; column < kWidth; ++column) {
    const double* const k0 = &mixture[size_t(column * components * 3)];
    double largest = -INFINITY, total = 0;
    for (int64_t k = 0; k < components; ++k) largest = std::max(largest, k0[k * 3]);
    for (int64_t k = 0; k < components; ++k) total += std::exp(k0[k * 3] - largest);
    for (int row = 0; row < kHeight; ++row) {
      double sum = 0;
      for (int64_t k = 0; k < components; ++k) {
        const double sigma = std::exp(k0[k * 3 + 2]), z = (y_of(row) - k0[k * 3 + 1]) / sigma;
        sum += std::exp(k0[k * 3] - largest) / total * std::exp(-0.5 * z * z) / (sigma * 2.5066282746310002);
      }
      density[size_t(row) * kWidth + size_t(column)] = sum;
    }
  }
  return density;
}

/// The same of the exact posterior: every pixel is a target.
std::vector<double> exact_density(const datasets::PriorOptions& prior, const Tensor& xc, const Tensor& yc) {
  std::vector<float> x, y;
  for (int row = 0; row < kHeight; ++row)
    for (int column = 0; column < kWidth; ++column)
      x.push_back(float(x_of(column))), y.push_back(float(y_of(row)));
  const Shape shape{1, int64_t(kWidth) * kHeight, 1};
  std::vector<double> density =
      datasets::predict(prior, {xc, yc, Tensor::from(x, shape), Tensor::from(y, shape)})
          .log_density.to_vector<double>();
  for (double& value : density) value = std::exp(value);
  return density;
}

/// The density as colours, context points as crosses. The square root keeps thin tails visible.
std::string draw(const std::vector<double>& density, double largest, const Tensor& xc, const Tensor& yc) {
  report::Image image(kWidth, kHeight);
  for (int row = 0; row < kHeight; ++row) {
    for (int column = 0; column < kWidth; ++column) {
      uint8_t rgb[3];
      report::heat_colour(std::sqrt(density[size_t(row) * kWidth + size_t(column)] / largest), rgb);
      image.set(column, row, rgb[0], rgb[1], rgb[2]);
    }
  }
  const auto xs = xc.to_vector<double>(), ys = yc.to_vector<double>();
  for (size_t i = 0; i < xs.size(); ++i) {
    const int column = int((xs[i] - kLeft) / (kRight - kLeft) * kWidth),
              row = int((kTop - ys[i]) / (kTop - kBottom) * kHeight);
    for (int d = -2; d <= 2; ++d) {
      image.set(column + d, row, 217, 72, 1);
      image.set(column, row + d, 217, 72, 1);
    }
  }
  return report::encode_png(image);
}

}  // namespace

void add_densities(report::Page& page, const models::Tnp& model, const datasets::Prior& prior,
                   Device device) {
  page.heading("Predictive density");
  if (prior.options().features != 1) return page.paragraph("Drawn for one-dimensional inputs only.");
  page.paragraph(fmt::format(
      "Three tasks that training never met. Left: the model's mixture; right: the exact posterior "
      "predictive of the prior. x from {} to {}, y from {} to {}; crosses are the context.",
      kLeft, kRight, kBottom, kTop));
  for (uint64_t index = 0; index < 3; ++index) {
    const datasets::RegressionBatch task = prior.batch(index);
    const std::vector<double> ours = model_density(model, device, task.xc, task.yc);
    const std::vector<double> exact = exact_density(prior.options(), task.xc, task.yc);
    // One scale for both; the exact density's peak, so that an over-confident model saturates instead of
    // hiding.
    const double largest = std::max(*std::max_element(exact.begin(), exact.end()), 1e-12);
    page.images({{draw(ours, largest, task.xc, task.yc), fmt::format("task {}: model", index)},
                 {draw(exact, largest, task.xc, task.yc), fmt::format("task {}: exact posterior", index)}});
  }
}

}  // namespace tessera::eval
