#include "train/tnp_report.h"

#include <fmt/format.h>

#include "autograd/tape.h"
#include "eval/tnp_densities.h"
#include "train/run_report.h"

namespace tessera::train {

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
  eval::add_densities(page, job.model(), fresh_tasks(settings, 1), job.device());
  add_course(page, run, records);
  page.write(run.path() / "report.html");
}

}  // namespace tessera::train
