#include "study/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "io/file.h"
#include "io/utf8.h"
#include "report/page.h"
#include "report/run_table.h"
#include "report/table.h"
#include "runtime/text.h"
#include "train/run_report.h"

namespace tessera::study {

namespace fs = std::filesystem;
using nlohmann::json;
using report::Table;
using report::TableCell;

namespace {

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

/// What a run logs that differs from run to run.
const std::set<std::string> kOfTheMachine = {"ms_per_step", "tokens_per_s", "data_wait",
                                             "memory_gib",  "peak_gib",     "exposed_communication_ms"};

// ---- the tables ----

Table cells_table(const Results& results) {
  Table table{
      "cells", {"task", "arm", "learning_rate", "seed", "status", "steps", "score", "loss", "reason"}, {}};
  for (const CellResult& cell : results.cells)
    table.rows.push_back({cell.cell.task, cell.cell.arm, cell.cell.rate, int64_t(cell.cell.seed),
                          name_of(cell.record.status), cell.steps, cell.score, cell.loss,
                          cell.record.reason});
  return table;
}

Table curves_table(const Results& results) {
  Table table{"curves", {"task", "arm", "learning_rate", "seed", "step", "name", "value"}, {}};
  for (const CellResult& cell : results.cells)
    for (const train::StepRecord& record : cell.records)
      for (const auto& [name, value] : record.values)
        if (!kOfTheMachine.contains(name))
          table.rows.push_back({cell.cell.task, cell.cell.arm, cell.cell.rate, int64_t(cell.cell.seed),
                                record.step, name, value});
  return table;
}

Table comparisons_table(const Results& results) {
  Table table{"comparisons",
              {"task", "learning_rate", "rate_is_best", "arm", "seeds", "mean", "deviation", "half_width_95",
               "difference", "difference_low", "difference_high", "p", "p_holm", "verdict", "target",
               "reached", "steps_to_target", "steps_to_target_half_width_95"},
              {}};
  for (const auto& family : results.families)
    for (const Comparison& c : family) {
      const eval::Interval none{.mean = kAbsent, .half = kAbsent, .p = kAbsent};
      eval::Interval d = c.difference.value_or(none);
      if (std::isnan(d.p)) d.half = kAbsent;
      const eval::Interval t = c.steps_to_target.value_or(none);
      table.rows.push_back({c.over_tasks ? "mean of all" : c.task, c.rate, int64_t(c.best_rate), c.arm,
                            int64_t(c.seeds.size()), c.score.mean, c.score.deviation, c.score.half, d.mean,
                            d.low(), d.high(), d.p, c.p_holm, c.verdict(results.plan.higher), c.target,
                            c.reached, t.mean, t.half});
    }
  return table;
}

Table times_table(const Results& results) {
  Table table{"times", {"task", "arm", "ms_per_step", "intervals", "measured_in"}, {}};
  for (const StepTime& time : results.times)
    table.rows.push_back({time.task, time.arm, time.ms, time.intervals,
                          std::isnan(time.ms) ? ""
                          : time.own_run      ? "a run of its own"
                                              : "cells that ran alone"});
  return table;
}

Table runs_table(const Results& results) {
  Table table{"runs", {"cell", "attempts", "alone", "gpu", "revision"}, {}};
  for (const CellResult& cell : results.cells)
    table.rows.push_back(
        {cell.cell.name, cell.record.attempts, int64_t(cell.record.alone), cell.gpu, cell.revision});
  return table;
}

// ---- texts ----

std::string signed_text(double value) {
  return fmt::format("{:+.4f}", value);
}

std::string mean_text(const eval::Interval& interval) {
  return interval.n == 1 ? fmt::format("{:.4f}", interval.mean)
                         : fmt::format("{:.4f} +- {:.4f}", interval.mean, interval.half);
}

std::string difference_text(const Comparison& c) {
  if (!c.difference) return "";
  if (std::isnan(c.difference->p)) return signed_text(c.difference->mean);  // the seeds tell no noise
  return fmt::format("{} [{}, {}]", signed_text(c.difference->mean), signed_text(c.difference->low()),
                     signed_text(c.difference->high()));
}

std::string p_text(double p) {
  return std::isnan(p) ? "" : p < 1e-4 ? "< 0.0001" : fmt::format("{:.4f}", p);
}

std::string ms_text(double ms) {
  return std::isnan(ms) ? "" : fmt::format("{:.4g}", ms);
}

/// "12.3 s +- 1.0 (3 of 3 seeds)", by the step time; without one in steps.
std::string target_text(const Comparison& c, double ms) {
  if (std::isnan(c.target)) return "";
  if (c.reached == 0) return "never";
  const double unit = std::isnan(ms) ? 1 : ms / 1e3;
  const eval::Interval& steps = *c.steps_to_target;
  return fmt::format("{:.4g}{} {} ({} of {} seeds)", steps.mean * unit,
                     steps.n > 1 ? fmt::format(" +- {:.2g}", steps.half * unit) : "",
                     std::isnan(ms) ? "steps" : "s", c.reached, c.seeds.size());
}

std::string arm_text(const Comparison& c) {
  return c.rate.empty() ? c.arm : fmt::format("{} (lr {})", c.arm, c.rate);
}

std::string family_title(const Comparison& first) {
  std::string title = first.over_tasks ? "Mean of all tasks" : first.task.empty() ? "Scores" : first.task;
  if (first.best_rate) return title + ", each arm at its best learning rate";
  return first.rate.empty() ? title : title + ", learning rate " + first.rate;
}

const std::vector<std::string> kHeader = {"arm",     "seeds",   "score",       "difference [95 % interval]",
                                          "p, Holm", "verdict", "ms per step", "to 95 % of the baseline"};

std::vector<std::vector<std::string>> rows_of(const Results& results, const std::vector<Comparison>& family) {
  std::vector<std::vector<std::string>> rows;
  for (const Comparison& c : family) {
    const double ms = c.over_tasks ? kAbsent : results.time_of(c.arm, c.task).ms;
    rows.push_back({arm_text(c), std::to_string(c.seeds.size()), mean_text(c.score), difference_text(c),
                    p_text(c.p_holm), c.verdict(results.plan.higher), ms_text(ms), target_text(c, ms)});
  }
  return rows;
}

/// A line per arm whose scores say nothing next to the baseline's.
std::vector<std::string> not_compared(const Results& results, const std::vector<Comparison>& family) {
  std::vector<std::string> lines;
  for (const Comparison& c : family)
    if (!c.incomparable.empty())
      lines.push_back(c.is_baseline
                          ? fmt::format("{}: its own runs differ in {}, so nothing is compared with it",
                                        arm_text(c), c.incomparable)
                          : fmt::format("{} is not compared with {}: they differ in {}", arm_text(c),
                                        results.plan.baseline, c.incomparable));
  return lines;
}

// ---- the page ----

/// The place of the arm in the plan, so that it has the same colour and dashes in every chart.
int place_of(const Plan& plan, const std::string& arm) {
  for (size_t i = 0; i < plan.arms.size(); ++i)
    if (plan.arms[i].name == arm) return int(i);
  return 0;
}

/// The mean of a value over the seeds at each step that all of them have, with the 95 % interval.
report::Series course_of(const Results& results, const Comparison& c, const std::string& name) {
  std::map<int64_t, std::vector<double>> at;
  const auto cells = results.cells_of_arm(c);
  for (const CellResult* const cell : cells)
    for (const train::StepRecord& record : cell->records)
      if (const auto found = record.values.find(name); found != record.values.end())
        at[record.step].push_back(found->second);
  report::Series series{arm_text(c), {}};
  for (const auto& [step, values] : at) {
    if (values.size() != cells.size()) continue;
    const eval::Interval interval = eval::interval_of(values);
    series.points.emplace_back(double(step), interval.mean);
    if (cells.size() > 1) series.spread.push_back(interval.half);
  }
  series.colour = place_of(results.plan, c.arm);
  return series;
}

void add_scores(report::Page& page, const Results& results, const std::vector<Comparison>& family) {
  std::vector<std::string> arms, others;
  std::vector<double> means, halves, differences, difference_halves;
  const auto bar = [](double half) { return std::isfinite(half) ? half : 0; };
  for (const Comparison& c : family) {
    arms.push_back(arm_text(c)), means.push_back(c.score.mean), halves.push_back(bar(c.score.half));
    if (!c.difference) continue;
    others.push_back(arm_text(c)), differences.push_back(c.difference->mean);
    difference_halves.push_back(bar(c.difference->half));
  }
  page.bars(family_title(family.front()) + ": " + results.plan.metric, results.plan.metric, arms,
            {{"mean over the seeds", means}}, {halves});
  if (others.empty()) return;
  page.bars(family_title(family.front()) + ": difference to " + results.plan.baseline,
            results.plan.metric + ", paired by seed", others,
            {{"arm - " + results.plan.baseline, differences}}, {difference_halves});
}

void add_courses(report::Page& page, const Results& results, const std::vector<Comparison>& family) {
  const std::string& metric = results.plan.metric;
  std::vector<report::Series> scores, timed, losses;
  for (const Comparison& c : family) {
    scores.push_back(course_of(results, c, metric));
    losses.push_back(course_of(results, c, "loss"));
    train::thin(losses.back());
    const double ms = results.time_of(c.arm, c.task).ms;
    if (std::isnan(ms)) continue;
    timed.push_back(scores.back());
    for (auto& [step, score] : timed.back().points) step *= ms / 1e3;
  }
  const std::string title = family_title(family.front());
  page.chart(title + ": " + metric + " over steps", "step", metric, scores);
  if (!timed.empty())
    page.chart(title + ": " + metric + " over training time", "seconds of training steps", metric, timed);
  page.chart(title + ": training loss, mean over the seeds", "step", "loss", losses);
}

void add_cells(report::Page& page, const Results& results) {
  std::vector<std::vector<std::string>> rows;
  for (const CellResult& cell : results.cells)
    if (cell.record.status != CellStatus::finished || !cell.counts())
      rows.push_back({cell.cell.name, name_of(cell.record.status),
                      cell.record.status == CellStatus::finished ? "without a finite " + results.plan.metric
                                                                 : cell.record.reason});
  if (rows.empty()) return;
  page.heading("Cells without a result");
  page.table({"cell", "status", "reason"}, rows);
}

/// "--rows 10% --slice first".
std::string flags_text(const Flags& flags) {
  std::string text;
  for (const auto& [name, values] : flags) {
    text += (text.empty() ? "" : " ") + name;
    for (const std::string& value : values) text += " " + value;
  }
  return text.empty() ? "(no flags of its own)" : text;
}

void add_plan(report::Page& page, const Plan& plan) {
  page.heading("Flags of the runs");
  std::vector<std::vector<std::string>> rows = {{"all", flags_text(plan.flags)}};
  for (const Part& arm : plan.arms)
    rows.push_back(
        {"arm " + arm.name + (arm.name == plan.baseline ? " (baseline)" : ""), flags_text(arm.flags)});
  for (const Part& task : plan.tasks) rows.push_back({"task " + task.name, flags_text(task.flags)});
  std::string seeds;
  for (const uint64_t seed : plan.seeds) seeds += (seeds.empty() ? "" : ", ") + std::to_string(seed);
  if (!plan.rates.empty()) rows.push_back({"learning rates", joined(plan.rates)});
  rows.push_back({"seeds", seeds});
  page.table({"tessera train " + plan.command, "flags"}, rows);
}

/// All different values of a field of the cells that ran.
std::string listed(const Results& results, std::string CellResult::*field) {
  std::set<std::string> values;
  for (const CellResult& cell : results.cells)
    if (!(cell.*field).empty()) values.insert(cell.*field);
  return values.empty() ? "-" : joined(values);
}

void write_page(const fs::path& path, const Results& results) {
  report::Page page(results.plan.title);
  page.paragraph(fmt::format("{} of {} cells finished, {} failed. On {}; revision {}.",
                             results.count(CellStatus::finished), results.cells.size(),
                             results.count(CellStatus::failed), listed(results, &CellResult::gpu),
                             listed(results, &CellResult::revision)));
  page.paragraph(
      fmt::format("The score is {} at the last evaluation of a run; {} is better. Bars and +- are 95 % "
                  "intervals of the mean over the seeds (Student's t). Differences are paired by seed with "
                  "the arm {}, with 95 % intervals; p-values are of paired t-tests, after Holm's correction "
                  "over the arms of a table. One seed tells nothing about the noise, nor do differences "
                  "that are all equal.",
                  results.plan.metric, results.plan.higher ? "higher" : "lower", results.plan.baseline));
  page.paragraph(
      "Step times are medians of steps during which no other cell ran; training time is steps times step "
      "time, "
      "without evaluations. \"To 95 %\": the first evaluation at most 5 % short of the baseline's mean "
      "score.");
  if (!report::has_database())
    page.paragraph("This build has no SQLite (package libsqlite3-dev): there is no study.sqlite.");
  for (const auto& family : results.families) {
    page.heading(family_title(family.front()));
    page.table(kHeader, rows_of(results, family));
    for (const std::string& line : not_compared(results, family)) page.paragraph(line);
    const bool shown_at_best = results.plan.rates.size() > 1 && !family.front().best_rate;
    if (shown_at_best) continue;
    add_scores(page, results, family);
    if (!family.front().over_tasks) add_courses(page, results, family);
  }
  add_cells(page, results);
  add_plan(page, results.plan);
  page.write(path);
}

}  // namespace

fs::path write_report(const fs::path& folder, const Results& results) {
  const Table cells = cells_table(results), curves = curves_table(results),
              comparisons = comparisons_table(results), times = times_table(results),
              runs = runs_table(results);
  for (const Table* const table : {&cells, &curves, &comparisons, &times})
    io::write_file((folder / (table->name + ".csv")).string(), report::csv_text(*table));
  const auto write_json = [&](const char* name, const json& value) {
    io::write_file((folder / name).string(), io::json_text(value, 1) + "\n");
  };
  write_json("results.json", {{"plan", to_json(results.plan)},
                              {"cells", report::to_json(cells)},
                              {"comparisons", report::to_json(comparisons)}});
  write_json("times.json", {{"times", report::to_json(times)}, {"runs", report::to_json(runs)}});
  if (report::has_database())
    report::write_database(folder / "study.sqlite", {cells, curves, comparisons, times, runs});
  const fs::path page = folder / "report.html";
  write_page(page, results);
  return page;
}

std::string format_comparisons(const Results& results) {
  std::string text;
  for (const auto& family : results.families) {
    const auto rows = rows_of(results, family);
    std::vector<size_t> widths;
    for (const std::string& name : kHeader) widths.push_back(name.size());
    for (const auto& row : rows)
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    const auto line = [&](const std::vector<std::string>& cells) {
      std::string row;
      for (size_t i = 0; i < cells.size(); ++i) row += fmt::format("{:<{}}  ", cells[i], widths[i]);
      text += row.substr(0, row.find_last_not_of(' ') + 1) + "\n";
    };
    text += fmt::format("\n{} ({})\n", family_title(family.front()), results.plan.metric);
    line(kHeader);
    for (const auto& row : rows) line(row);
    for (const std::string& why : not_compared(results, family)) text += why + "\n";
  }
  return text;
}

}  // namespace tessera::study
