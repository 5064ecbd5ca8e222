#include "train/seeds_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "eval/statistics.h"
#include "report/page.h"
#include "runtime/error.h"
#include "train/run_report.h"

namespace tessera::train {
namespace {

using Settings = std::vector<std::pair<std::string, std::string>>;

bool is_loss(const std::string& metric) {
  return metric.ends_with("loss") || metric.ends_with("nll");
}

/// Of a metric for readers: "eval_accuracy" is "accuracy".
std::string plain(const std::string& metric) {
  return metric.starts_with("eval_") ? metric.substr(5) : "training " + metric;
}

std::string shown(const eval::Spread& spread, size_t count) {
  return count == 1 ? fmt::format("{:.4f}", spread.mean)
                    : fmt::format("{:.4f} +- {:.4f}", spread.mean, spread.deviation);
}

std::vector<std::vector<std::string>> table_of(const SeedResults& results) {
  std::vector<std::vector<std::string>> rows;
  for (const std::string& metric : results.metrics) {
    const std::vector<double>& values = results.values.at(metric);
    rows.push_back({plain(metric)});
    for (const double value : values) rows.back().push_back(fmt::format("{:.4f}", value));
    rows.back().push_back(shown(eval::spread_of(values), values.size()));
  }
  return rows;
}

std::vector<std::string> header_of(const SeedResults& results) {
  std::vector<std::string> header{"metric"};
  for (const RunFolder& run : results.runs) header.push_back(run.path().filename().string());
  header.emplace_back("mean +- deviation");
  return header;
}

/// What the values do not say: "seed-1, seed-3 diverged, and are in no mean", the like of those that were
/// resumed, and what nan means where there is one.
std::vector<std::string> notes_of(const SeedResults& results) {
  std::vector<std::string> lines;
  const auto add = [&](const std::vector<std::string>& names, const char* one, const char* several) {
    if (!names.empty())
      lines.push_back(fmt::format("{} {}", fmt::join(names, ", "), names.size() == 1 ? one : several));
  };
  add(results.diverged, "diverged, and is in no mean", "diverged, and are in no mean");
  add(results.resumed,
      "had diverged and went on from its last checkpoint when it was resumed; its values count in the means",
      "had diverged and went on from their last checkpoints when they were resumed; their values count in "
      "the means");
  const auto has_nan = [](const auto& entry) {
    return std::ranges::any_of(entry.second, [](double value) { return std::isnan(value); });
  };
  if (std::ranges::any_of(results.values, has_nan))
    lines.emplace_back(
        "nan: not defined, as a correlation is not where all predictions or all labels are equal, and no "
        "metric is where the model predicts NaN");
  return lines;
}

void add_settings(report::Page& page, const Settings& settings) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, value] : settings) rows.push_back({name, value});
  page.table({}, rows);
}

/// Mean and spread of a metric at every step that all runs have evaluated.
report::Series course(const SeedResults& results, const std::string& metric) {
  std::map<int64_t, std::vector<double>> at;
  for (const RunFolder& run : results.runs)
    for (const StepRecord& record : run.metrics())
      if (const auto found = record.values.find(metric); found != record.values.end())
        at[record.step].push_back(found->second);
  report::Series series{plain(metric), {}};
  for (const auto& [step, values] : at) {
    if (values.size() != results.runs.size()) continue;
    const eval::Spread spread = eval::spread_of(values);
    series.points.emplace_back(double(step), spread.mean);
    if (results.runs.size() > 1) series.spread.push_back(spread.deviation);
  }
  return series;
}

void add_courses(report::Page& page, const SeedResults& results) {
  const std::string bars =
      results.runs.size() > 1 ? ", mean and standard deviation over the seeds" : std::string();
  std::vector<report::Series> scores, losses;
  for (const std::string& metric : results.metrics) {
    if (metric == "loss") continue;
    (is_loss(metric) ? losses : scores).push_back(course(results, metric));
  }
  page.chart("Evaluation" + bars, "step", "metric", scores);
  page.chart("Loss of the evaluation" + bars, "step", "loss", losses);
}

}  // namespace

SeedResults collect_seeds(const std::vector<RunFolder>& runs) {
  SeedResults results{.runs = runs, .metrics = {}, .values = {}, .diverged = {}, .resumed = {}};
  for (const RunFolder& run : runs) {
    std::map<std::string, double> last;
    for (const StepRecord& record : run.metrics())
      for (const auto& [name, value] : record.values)
        if (name == "loss" || name.starts_with("eval_")) last[name] = value;
    check(last.contains("loss") && last.size() > 1, "report: ", run.path().string(),
          " has logged no evaluation");
    for (const auto& [name, value] : last) results.values[name].push_back(value);
  }
  std::erase_if(results.values, [&](const auto& entry) { return entry.second.size() != runs.size(); });
  for (const auto& entry : results.values) results.metrics.push_back(entry.first);
  return results;
}

nlohmann::json to_json(const SeedResults& results) {
  nlohmann::json out = nlohmann::json::object();
  for (const auto& [metric, values] : results.values) {
    const eval::Spread spread = eval::spread_of(values);
    out[metric] = {{"mean", spread.mean}, {"deviation", spread.deviation}, {"values", values}};
  }
  return out;
}

std::string format_seeds(const SeedResults& results) {
  std::string text;
  const auto line = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i)
      text += i == 0                  ? fmt::format("{:<20}", cells[i])
              : i + 1 == cells.size() ? fmt::format(" {:>20}", cells[i])
                                      : fmt::format(" {:>9}", cells[i]);
    text += "\n";
  };
  line(header_of(results));
  for (const auto& row : table_of(results)) line(row);
  for (const std::string& line : notes_of(results)) text += line + "\n";
  return text;
}

void write_seeds_report(const std::filesystem::path& path, const std::string& title,
                        const SeedResults& results, const Settings& settings) {
  report::Page page(title);
  page.paragraph(
      fmt::format("{} seeds; each number is the last evaluation of its run. Error bars and +- are "
                  "the standard deviation over the seeds.",
                  results.runs.size()));
  for (const std::string& line : notes_of(results)) page.paragraph(line + ".");
  page.table(header_of(results), table_of(results));
  std::vector<std::string> labels;
  std::vector<double> means, deviations;
  for (const std::string& metric : results.metrics) {
    if (is_loss(metric)) continue;
    const eval::Spread spread = eval::spread_of(results.values.at(metric));
    labels.push_back(plain(metric));
    means.push_back(spread.mean);
    deviations.push_back(spread.deviation);
  }
  page.bars("Metrics", "mean over the seeds", labels, {{"development part", means}}, {deviations});
  add_courses(page, results);
  std::vector<report::Series> curves;
  for (size_t i = 0; i < results.runs.size(); ++i)
    curves.push_back(loss_curve(results.runs[i], results.runs[i].path().filename().string(), int(i)));
  page.chart("Training loss", "step", "loss", curves);
  page.heading("Settings");
  add_settings(page, settings);
  page.write(path);
}

void write_run_report(const std::filesystem::path& path, const std::string& title, const RunFolder& run,
                      const Settings& settings) {
  report::Page page(title);
  add_settings(page, settings);
  if (const std::string line = skipped_line(run.metrics()); !line.empty()) page.paragraph(line);
  page.chart("Training loss", "step", "loss", {loss_curve(run, "loss", -1)});
  bool evaluated = false;
  for (const StepRecord& record : run.metrics())
    for (const auto& [name, value] : record.values) evaluated |= name.starts_with("eval_");
  if (evaluated) {
    const SeedResults results = collect_seeds({run});
    page.table(header_of(results), table_of(results));
    add_courses(page, results);
  }
  page.write(path);
}

}  // namespace tessera::train
