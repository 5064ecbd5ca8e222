#include "train/language_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "train/run_report.h"

namespace tessera::train {
using namespace nlohmann::literals;

namespace {

/// A loss of single batches jumps; a mean over neighbours shows where it goes.
report::Series smoothed(const report::Series& series, size_t points) {
  report::Series out{series.name, {}, series.dashed};
  const size_t window = std::max<size_t>(1, series.points.size() / points);
  for (size_t begin = 0; begin < series.points.size(); begin += window) {
    const size_t end = std::min(begin + window, series.points.size());
    double x = 0, y = 0;
    for (size_t i = begin; i < end; ++i) x += series.points[i].first, y += series.points[i].second;
    out.points.emplace_back(x / double(end - begin), y / double(end - begin));
  }
  return out;
}

}  // namespace

void write_language_report(const RunFolder& run, const LanguageJob& job, const TrainResult& result) {
  report::Page page(fmt::format("{} on {}", job.settings().family(),
                                job.settings().data.empty() ? "text" : job.settings().data));
  add_outcome(page, run, job.device(), result);
  const std::vector<StepRecord> records = run.metrics();
  std::vector<report::Series> losses{smoothed(series_of(records, "loss", "training loss"), 200)};
  const auto& e = result.evaluation;
  if (!e.empty()) {
    losses.push_back(series_of(records, "eval_nll", "held-out loss"));
    std::vector<std::vector<std::string>> rows = {{"model", fmt::format("{:.4f}", e.at("eval_nll")),
                                                   fmt::format("{:.2f}", e.at("eval_perplexity")),
                                                   fmt::format("{:.4f}", e.at("eval_bits_per_byte"))}};
    if (const auto ngram = e.find("ngram_nll"); ngram != e.end()) {
      const int64_t order = run.settings().value("/baseline/order"_json_pointer, int64_t{5});
      const std::string name = fmt::format("{}-gram", order);
      losses.push_back({name, {{1.0, ngram->second}, {double(result.step), ngram->second}}, true});
      rows.push_back({name, fmt::format("{:.4f}", ngram->second),
                      fmt::format("{:.2f}", std::exp(ngram->second)),
                      fmt::format("{:.4f}", e.at("ngram_bits_per_byte"))});
    }
    page.heading("Held-out text");
    page.table({"", "nats per token", "perplexity", "bits per byte"}, rows);
  }
  page.chart("Loss", "step", "nats per token", losses);
  if (const std::vector<Sample> samples = run.samples(); !samples.empty()) {
    page.heading("What it writes");
    std::vector<std::vector<std::string>> rows;
    for (const Sample& sample : samples) rows.push_back({std::to_string(sample.step), sample.text});
    page.table({"step", "text"}, rows);
  }
  add_course(page, run, records);
  page.write(run.path() / "report.html");
}

}  // namespace tessera::train
