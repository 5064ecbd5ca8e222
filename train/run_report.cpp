#include "train/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace tessera::train {

report::Series series_of(const std::vector<StepRecord>& records, const char* value, const char* name,
                         bool dashed) {
  report::Series series{name, {}, dashed};
  for (const StepRecord& record : records)
    if (const auto found = record.values.find(value); found != record.values.end())
      series.points.emplace_back(double(record.step), found->second);
  return series;
}

void thin(report::Series& series) {
  const size_t window = std::max<size_t>(1, series.points.size() / 200);
  std::vector<std::pair<double, double>> points;
  for (size_t begin = 0; begin < series.points.size(); begin += window) {
    const size_t end = std::min(begin + window, series.points.size());
    double step = 0, value = 0;
    for (size_t i = begin; i < end; ++i) step += series.points[i].first, value += series.points[i].second;
    points.emplace_back(step / double(end - begin), value / double(end - begin));
  }
  series.points = std::move(points);
  series.spread.clear();
}

report::Series loss_curve(const RunFolder& run, const std::string& name, int colour) {
  report::Series series = series_of(run.metrics(), "loss", name.c_str());
  series.colour = colour;
  thin(series);
  return series;
}

std::string skipped_line(const std::vector<StepRecord>& records) {
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    const auto skipped = record->values.find("skipped_steps"), scale = record->values.find("loss_scale");
    if (skipped == record->values.end()) continue;
    std::string line = fmt::format("{:.0f} of {} steps skipped: their gradient norm was not finite",
                                   skipped->second, record->step);
    if (scale != record->values.end()) line += fmt::format("; loss scale {:g} at the end", scale->second);
    return line + ".";
  }
  return {};
}

void add_outcome(report::Page& page, const RunFolder& run, Device device, const TrainResult& result) {
  page.paragraph(fmt::format("{}, {}. {} steps, {:.1f} s of training, {:.0f} tokens/s, {:.2f} ms/step.",
                             run.path().filename().string(), device.info().name, result.step, result.seconds,
                             result.tokens_per_s, result.ms_per_step));
  if (const std::string line = skipped_line(run.metrics()); !line.empty()) page.paragraph(line);
}

void add_course(report::Page& page, const RunFolder& run, const std::vector<StepRecord>& records) {
  page.chart("Learning rate", "step", "learning rate", {series_of(records, "lr", "learning rate")});
  page.chart("Gradient norm", "step", "norm before clipping",
             {series_of(records, "grad_norm", "gradient norm")});
  if (const report::Series scale = series_of(records, "loss_scale", "loss scale"); !scale.points.empty())
    page.chart("Loss scale", "step", "loss scale", {scale});
  page.chart("Throughput", "step", "tokens/s", {series_of(records, "tokens_per_s", "tokens/s")});
  page.heading("Settings");
  std::vector<std::vector<std::string>> rows;
  const nlohmann::json flat = run.settings().flatten();
  for (const auto& [key, value] : flat.items())
    rows.push_back({key.substr(1), value.is_string() ? value.get<std::string>() : value.dump()});
  page.table({"setting", "value"}, rows);
}

}  // namespace tessera::train
