#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "comm/recorded.h"
#include "datasets/posterior.h"
#include "report/image.h"
#include "runtime/interrupt.h"
#include "train/run_report.h"
#include "train/tnp_job.h"

namespace tessera::train {

// ---- evaluation ----

namespace {

/// All ranks of the group are interrupted between the same batches, or none: they make calls together.
void check_interrupt_of(const TnpGroup& group) {
  if (const int64_t signal = group.host.largest(InterruptGuard::signal_received()))
    throw Interrupted(int(signal), __FILE__, __LINE__);
}

/// Of each target, [B, N] in row-major order.
std::vector<double> point_losses(const models::Tnp& model, const models::TnpBatch& whole,
                                 const TnpGroup* group) {
  if (!group) return model.point_losses(whole).to_vector<double>();
  const Tensor own = model.point_losses(models::part_of(whole, group->split)).to(Device::cpu());
  return comm::gather_rows(group->host, own.transpose(0, 1), group->split->targets.queries)
      .transpose(0, 1)
      .to_vector<double>();
}

}  // namespace

TnpEvaluation evaluate_tnp(const models::Tnp& model, const TnpSettings& settings, Device device,
                           int64_t tasks, int64_t batch, const TnpGroup* group) {
  const NoTape off;
  const F32MathScope math(settings.f32_math);
  TnpEvaluation result;
  TnpSettings drawn = settings;
  drawn.batch = batch;
  const datasets::Prior prior = make_prior(drawn, true, device);
  std::vector<double> gaps;  // of each task
  double model_sum = 0, optimal_sum = 0;
  for (uint64_t index = 0; int64_t(gaps.size()) < tasks; ++index) {
    if (group)
      check_interrupt_of(*group);
    else
      check_interrupt();
    const datasets::RegressionBatch fresh = prior.batch(index);
    const std::vector<double> losses = point_losses(model, {fresh.xc, fresh.yc, fresh.xt, fresh.yt}, group);
    const auto log_density = datasets::predict(prior.options(), fresh).log_density.to_vector<double>();
    for (int64_t b = 0; b < batch && int64_t(gaps.size()) < tasks; ++b) {
      double gap = 0;
      for (int64_t n = 0; n < settings.targets; ++n) {
        const size_t at = size_t(b * settings.targets + n);
        model_sum += losses[at];
        optimal_sum -= log_density[at];
        gap += losses[at] + log_density[at];
      }
      gaps.push_back(gap / double(settings.targets));
    }
  }
  result.tasks = int64_t(gaps.size());
  result.points = result.tasks * settings.targets;
  result.nll = model_sum / double(result.points);
  result.optimal_nll = optimal_sum / double(result.points);
  result.gap = result.nll - result.optimal_nll;
  double squares = 0;
  for (const double gap : gaps) squares += (gap - result.gap) * (gap - result.gap);
  if (gaps.size() > 1) result.gap_error = std::sqrt(squares / double(gaps.size() - 1) / double(gaps.size()));
  return result;
}

// ---- pictures of the predictive density ----

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

void add_densities(report::Page& page, TnpJob& job) {
  const TnpSettings& settings = job.settings();
  page.heading("Predictive density");
  if (settings.model.features != 1) return page.paragraph("Drawn for one-dimensional inputs only.");
  page.paragraph(fmt::format(
      "Three tasks that training never met. Left: the model's mixture; right: the exact posterior "
      "predictive of the prior. x from {} to {}, y from {} to {}; crosses are the context.",
      kLeft, kRight, kBottom, kTop));
  TnpSettings drawn = settings;
  drawn.batch = 1;
  const datasets::Prior prior = make_prior(drawn, true);
  for (uint64_t index = 0; index < 3; ++index) {
    const datasets::RegressionBatch task = prior.batch(index);
    const std::vector<double> ours = model_density(job.model(), job.device(), task.xc, task.yc);
    const std::vector<double> exact = exact_density(prior.options(), task.xc, task.yc);
    // One scale for both; the exact density's peak, so that an over-confident model saturates instead of
    // hiding.
    const double largest = std::max(*std::max_element(exact.begin(), exact.end()), 1e-12);
    page.images({{draw(ours, largest, task.xc, task.yc), fmt::format("task {}: model", index)},
                 {draw(exact, largest, task.xc, task.yc), fmt::format("task {}: exact posterior", index)}});
  }
}

}  // namespace

void write_tnp_report(const RunFolder& run, TnpJob& job, const TrainResult& result) {
  const NoTape off;
  const TnpSettings& settings = job.settings();
  const F32MathScope math(settings.f32_math);
  report::Page page(fmt::format("tnp on the {} prior", settings.prior));
  add_outcome(page, run, job.device(), result);
  const std::vector<StepRecord> records = run.metrics();
  std::vector<report::Series> losses{series_of(records, "loss", "training loss")};
  if (!result.evaluation.empty()) {
    losses.push_back(series_of(records, "eval_nll", "evaluation"));
    const double optimal = result.evaluation.at("eval_optimal_nll");
    losses.push_back({"Bayes-optimal", {{1.0, optimal}, {double(result.step), optimal}}, true});
    page.heading("Evaluation on fresh tasks");
    page.table({"", "nats per point"},
               {{"model", fmt::format("{:.4f}", result.evaluation.at("eval_nll"))},
                {"Bayes-optimal", fmt::format("{:.4f}", optimal)},
                {"gap", fmt::format("{:.4f} +- {:.4f}", result.evaluation.at("eval_gap"),
                                    result.evaluation.at("eval_gap_error"))}});
  }
  page.chart("Negative log-likelihood", "step", "nats per point", losses);
  add_densities(page, job);
  add_course(page, run, records);
  page.write(run.path() / "report.html");
}

}  // namespace tessera::train
