#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "report/page.h"
#include "runtime/error.h"
#include "sparsity/patterns.h"
#include "sparsity/quality.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using report::cell_of;
using report::Table;
using report::TableCell;
using report::text_in;

constexpr const char* kQualityTables[] = {
    "CREATE TABLE study (title TEXT, baseline TEXT)",
    "CREATE TABLE models (model TEXT PRIMARY KEY)",
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE cells (model TEXT, task TEXT, arm TEXT, calibration_seed INTEGER, weights REAL, inputs "
    "REAL, "
    "counted REAL, nats REAL, accuracy REAL, PRIMARY KEY (model, task, arm, calibration_seed))",
    "CREATE TABLE arms (task TEXT, arm TEXT, models INTEGER, weights REAL, inputs REAL, counted REAL, nats "
    "REAL, "
    "nats_half_width_95 REAL, above_dense REAL, above_dense_half_width_95 REAL, accuracy REAL, "
    "accuracy_half_width_95 REAL, accuracy_above_dense REAL, accuracy_above_dense_half_width_95 REAL, "
    "PRIMARY KEY (task, arm))",
    "CREATE TABLE claims (claim TEXT, task TEXT, lower TEXT, than TEXT, alike INTEGER, models INTEGER, "
    "difference REAL, half_width_95 REAL, verdict TEXT)",
    "CREATE TABLE missing (model TEXT, what TEXT)",
};

TableCell half_of(const std::optional<eval::Interval>& interval) {
  return interval && has_interval(*interval) ? TableCell(interval->half) : TableCell();
}
TableCell mean_of(const std::optional<eval::Interval>& interval) {
  return interval ? TableCell(interval->mean) : TableCell();
}

std::vector<std::vector<TableCell>> arm_rows(const Quality& quality) {
  std::vector<std::vector<TableCell>> rows;
  for (const QualityArm& arm : quality.arms())
    rows.push_back({arm.task, arm.arm, arm.nats.n, arm.weights, arm.inputs, cell_of(arm.counted),
                    arm.nats.mean, half_of(arm.nats), mean_of(arm.nats_above_dense),
                    half_of(arm.nats_above_dense), mean_of(arm.accuracy), half_of(arm.accuracy),
                    mean_of(arm.accuracy_above_dense), half_of(arm.accuracy_above_dense)});
  return rows;
}

std::string bytes_of(const Quality& quality) {
  report::Database database = report::Database::in_memory();
  database.run("PRAGMA application_id = " + std::to_string(kQualityId));
  database.run("PRAGMA user_version = 1");
  database.run("BEGIN");
  for (const char* const table : kQualityTables) database.run(table);
  database.run("INSERT INTO study VALUES (?1, ?2)", {quality.title, quality.baseline});
  for (const std::string& model : quality.models) database.run("INSERT INTO models VALUES (?1)", {model});
  for (const auto& [name, value] : quality.settings)
    database.run("INSERT INTO settings VALUES (?1, ?2)", {name, value});
  std::vector<std::vector<TableCell>> cells, claims, missing;
  for (const QualityCell& cell : quality.cells)
    cells.push_back({cell.model, cell.task, cell.arm, cell.calibration_seed, cell.weights, cell.inputs,
                     cell_of(cell.counted), cell.nats, cell_of(cell.accuracy)});
  for (const ClaimResult& one : quality.results())
    claims.push_back({one.claim.text, one.claim.task, json(one.claim.lower).dump(),
                      json(one.claim.than).dump(), int64_t{one.claim.alike},
                      one.difference ? one.difference->n : int64_t{0}, mean_of(one.difference),
                      half_of(one.difference), one.verdict()});
  for (const auto& [model, what] : quality.missing) missing.push_back({model, what});
  database.insert("INSERT INTO cells VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)", cells);
  database.insert("INSERT INTO arms VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)",
                  arm_rows(quality));
  database.insert("INSERT INTO claims VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)", claims);
  database.insert("INSERT INTO missing VALUES (?1, ?2)", missing);
  database.run("COMMIT");
  return database.bytes();
}

// ---- texts ----

/// Perplexity: the geometric mean over the models, with its interval.
std::string perplexity_text(const eval::Interval& nats) {
  if (!has_interval(nats)) return fmt::format("{:.3f}", std::exp(nats.mean));
  return fmt::format("{:.3f} [{:.3f}, {:.3f}]", std::exp(nats.mean), std::exp(nats.low()),
                     std::exp(nats.high()));
}
std::string difference_text(const std::optional<eval::Interval>& difference) {
  if (!difference) return "";
  if (!has_interval(*difference)) return fmt::format("{:+.4f}", difference->mean);
  return fmt::format("{:+.4f} [{:+.4f}, {:+.4f}]", difference->mean, difference->low(), difference->high());
}
std::string percent_text(const std::optional<eval::Interval>& accuracy) {
  if (!accuracy) return "";
  if (!has_interval(*accuracy)) return fmt::format("{:.1f}", 100 * accuracy->mean);
  return fmt::format("{:.1f} [{:.1f}, {:.1f}]", 100 * accuracy->mean, 100 * accuracy->low(),
                     100 * accuracy->high());
}
std::string points_text(const std::optional<eval::Interval>& difference) {
  if (!difference) return "";
  if (!has_interval(*difference)) return fmt::format("{:+.1f}", 100 * difference->mean);
  return fmt::format("{:+.1f} [{:+.1f}, {:+.1f}]", 100 * difference->mean, 100 * difference->low(),
                     100 * difference->high());
}

/// "0.5 (0.481)": asked for, and counted on held-out text.
std::string inputs_text(const QualityArm& arm) {
  const std::string asked = fmt::format("{:.3g}", arm.inputs);
  return arm.counted ? fmt::format("{} ({:.3f})", asked, *arm.counted) : asked;
}

const std::vector<std::string> kArmHeader = {"task",       "arm",          "weights",   "inputs",
                                             "perplexity", "nats - dense", "choice, %", "choice - dense"};
const std::vector<std::string> kClaimHeader = {"claim", "task", "difference, nats", "models", "verdict"};

std::vector<std::vector<std::string>> arm_texts(const Quality& quality) {
  std::vector<std::vector<std::string>> rows;
  for (const QualityArm& arm : quality.arms())
    rows.push_back({arm.task, arm.arm, fmt::format("{:.3g}", arm.weights), inputs_text(arm),
                    perplexity_text(arm.nats), difference_text(arm.nats_above_dense),
                    percent_text(arm.accuracy), points_text(arm.accuracy_above_dense)});
  return rows;
}

std::vector<std::vector<std::string>> claim_texts(const Quality& quality) {
  std::vector<std::vector<std::string>> rows;
  for (const ClaimResult& one : quality.results())
    rows.push_back({one.claim.text, one.claim.task, difference_text(one.difference),
                    std::to_string(one.difference ? one.difference->n : 0), one.verdict()});
  return rows;
}

std::string models_text(const Quality& quality) {
  if (quality.models.size() == 1)
    return "One model (" + quality.models.front() +
           "): there are no intervals, and an order is an observation.";
  return fmt::format(
      "{} models. Perplexities are geometric means over the models; in brackets 95 % intervals over the "
      "models "
      "(Student's t), of differences paired by model; values that are equal in all models have none, since "
      "they do not tell the noise. Calibration seeds are averaged within a model.",
      quality.models.size());
}

std::string table_text(const std::vector<std::string>& header,
                       const std::vector<std::vector<std::string>>& rows) {
  Table table{.name = "", .columns = header, .rows = {}};
  for (const auto& row : rows) table.rows.emplace_back(row.begin(), row.end());
  return report::to_markdown(table);
}

/// Bars of one task's arms, the dense model among them.
void add_bars(report::Page& page, const Quality& quality, const std::vector<QualityArm>& arms,
              const std::string& task) {
  std::vector<std::string> names, answered;
  std::vector<double> losses, halves, accuracies, accuracy_halves;
  const auto bar = [](const eval::Interval& interval) {
    return has_interval(interval) ? interval.half : 0.0;
  };
  for (const QualityArm& arm : arms) {
    if (arm.task != task && arm.arm != quality.baseline) continue;
    names.push_back(arm.arm), losses.push_back(arm.nats.mean), halves.push_back(bar(arm.nats));
    if (!arm.accuracy) continue;
    answered.push_back(arm.arm), accuracies.push_back(100 * arm.accuracy->mean);
    accuracy_halves.push_back(100 * bar(*arm.accuracy));
  }
  page.bars(task + ": loss on held-out text", "nats per token", names, {{"mean over the models", losses}},
            {halves});
  if (!answered.empty())
    page.bars(task + ": multiple choice", "right, %", answered, {{"mean over the models", accuracies}},
              {accuracy_halves});
}

}  // namespace

std::string quality_markdown(const Quality& quality) {
  std::string text = models_text(quality) + "\n\n" + table_text(kArmHeader, arm_texts(quality));
  if (!quality.claims.empty()) text += "\n" + table_text(kClaimHeader, claim_texts(quality));
  if (!quality.missing.empty()) {
    text += "\nNot measured:\n\n";
    for (const auto& [model, what] : quality.missing) text += "- " + model + ": " + what + "\n";
  }
  return text;
}

std::string quality_html(const Quality& quality) {
  report::Page page(quality.title);
  page.paragraph(models_text(quality));
  page.paragraph(
      "Perplexity and loss are of held-out text. Weights and inputs are the shares that are left out. "
      "Choice: "
      "how often the true continuation of a held-out passage is the most likely of its choices.");
  const std::vector<QualityArm> arms = quality.arms();
  page.table(kArmHeader, arm_texts(quality));
  if (!quality.claims.empty()) {
    page.heading("Claims of papers");
    page.table(kClaimHeader, claim_texts(quality));
  }
  std::vector<std::string> tasks;
  for (const QualityArm& arm : arms)
    if (!arm.task.empty() && (tasks.empty() || tasks.back() != arm.task)) tasks.push_back(arm.task);
  for (const std::string& task : tasks) {
    page.heading(task);
    add_bars(page, quality, arms, task);
  }
  if (!quality.missing.empty()) {
    page.heading("Not measured");
    std::vector<std::vector<std::string>> rows;
    for (const auto& [model, what] : quality.missing) rows.push_back({model, what});
    page.table({"model", "what"}, rows);
  }
  page.heading("Settings of the first model");
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, value] : quality.settings) rows.push_back({name, value});
  page.table({"setting", "value"}, rows);
  return page.html();
}

void write_quality(const Quality& quality, const std::string& folder) {
  const fs::path database = fs::path(folder) / kPatternsFile;
  std::error_code ignored;
  if (fs::exists(database, ignored)) report::Database::read_only(database, kQualityId, kQualityWhat);
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge);
  const auto put = [&](const char* name, const std::string& bytes) {
    io::write_file((fs::path(files.path()) / name).string(), bytes);
  };
  put(kPatternsFile, bytes_of(quality));
  put(kQualityTable, quality_markdown(quality));
  put(kQualityPage, quality_html(quality));
  files.publish();
}

Quality quality_of(report::Database& database) {
  Quality quality;
  const Table study = database.run("SELECT title, baseline FROM study");
  check(study.rows.size() == 1,
        "quality: the database holds no study; make it again with tessera sparsity quality");
  quality.title = text_in(study.rows[0][0]), quality.baseline = text_in(study.rows[0][1]);
  for (const auto& row : database.run("SELECT model FROM models ORDER BY rowid").rows)
    quality.models.push_back(text_in(row[0]));
  for (const auto& row : database.run("SELECT name, value FROM settings ORDER BY rowid").rows)
    quality.settings.emplace_back(text_in(row[0]), text_in(row[1]));
  for (const auto& row :
       database
           .run("SELECT model, task, arm, calibration_seed, weights, inputs, counted, nats, accuracy FROM "
                "cells ORDER BY rowid")
           .rows) {
    const auto number = [&](size_t i) -> std::optional<double> {
      const auto* const value = std::get_if<double>(&row[i]);
      return value ? std::optional(*value) : std::nullopt;
    };
    QualityCell& cell = quality.cells.emplace_back(QualityCell{.model = text_in(row[0]),
                                                               .task = text_in(row[1]),
                                                               .arm = text_in(row[2]),
                                                               .counted = number(6),
                                                               .accuracy = number(8)});
    cell.calibration_seed = std::get<int64_t>(row[3]);
    cell.weights = std::get<double>(row[4]), cell.inputs = std::get<double>(row[5]);
    cell.nats = std::get<double>(row[7]);
  }
  for (const auto& row :
       database.run("SELECT claim, task, lower, than, alike FROM claims ORDER BY rowid").rows)
    quality.claims.push_back(
        {text_in(row[0]), text_in(row[1]), json::parse(text_in(row[2])).get<std::vector<std::string>>(),
         json::parse(text_in(row[3])).get<std::vector<std::string>>(), std::get<int64_t>(row[4]) != 0});
  for (const auto& row : database.run("SELECT model, what FROM missing ORDER BY rowid").rows)
    quality.missing.emplace_back(text_in(row[0]), text_in(row[1]));
  return quality;
}

}  // namespace tessera::sparsity
