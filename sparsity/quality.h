#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "eval/statistics.h"
#include "report/database.h"

/// What pruning and gates cost in quality, over several trained models: means with 95 % intervals, paired
/// differences to the dense model, and whether what papers claim was measured. tools/sparsity_study measures
/// the models, one file each.

namespace tessera::sparsity {

/// The database's application_id: "tsp3".
inline constexpr int32_t kQualityId = 0x74737033;
inline constexpr const char* kQualityWhat = "sparsity.sqlite of tessera sparsity quality";
inline constexpr const char* kQualityPage = "quality.html";
inline constexpr const char* kQualityTable = "quality.md";
/// The field "format" of a file of results.
inline constexpr const char* kQualityFormat = "tessera-quality-1";

/// One way to make one model sparse, measured on held-out text.
struct QualityCell {
  std::string model;
  std::string task;  // what makes arms comparable, such as "2:4"; "": the dense model, in all tasks
  std::string arm;   // "wanda"
  int64_t calibration_seed = 0;    // cells that differ in it alone are averaged before models are compared
  double weights = 0, inputs = 0;  // shares that are left out
  std::optional<double>
      counted;      // share of the inputs that gates left out on held-out text; nothing: not counted
  double nats = 0;  // per token of held-out text
  std::optional<double> accuracy;  // of multiple choice; nothing: not measured
};

/// A claim to be tested: in `task` the least loss of the arms `lower` is below that of the arms `than`, or,
/// `alike`, they do not differ.
struct QualityClaim {
  std::string text, task;
  std::vector<std::string> lower, than;
  bool alike = false;
};

/// The results of an arm in a task over the models.
struct QualityArm {
  std::string task, arm;
  double weights = 0, inputs = 0;  // means over the models
  std::optional<double> counted;   // the same; nothing: a cell lacks it
  eval::Interval nats;
  std::optional<eval::Interval> nats_above_dense;  // paired by model; nothing: no model has both
  std::optional<eval::Interval> accuracy, accuracy_above_dense;
};

/// Whether the values tell how large the noise is: those of one model do not, nor do equal ones.
bool has_interval(const eval::Interval& interval);

struct ClaimResult {
  QualityClaim claim;
  /// Loss of `lower` minus that of `than`, paired by model; nothing: no model has all arms.
  std::optional<eval::Interval> difference;
  /// "held", "refuted" or "not told apart" by the 95 % interval ("differ" for alike ones that do); "noise
  /// unknown" if the difference is the same in all models and not 0; of one model, which has no interval,
  /// "held in one model" or "not held in one model", of alike arms "one model cannot tell".
  std::string verdict() const;
};

struct Quality {
  std::string title, baseline;  // the arm that is the dense model
  std::vector<std::string> models;
  std::vector<std::pair<std::string, std::string>> settings;  // of the first model, "program" of all
  std::vector<QualityCell> cells;
  std::vector<QualityClaim> claims;
  std::vector<std::pair<std::string, std::string>> missing;  // model, and what was not measured

  std::vector<QualityArm> arms() const;  // by task, in the order of the cells
  std::vector<ClaimResult> results() const;
};

/// Reads files of results, {"format", "title", "model", "baseline", "settings": {}, "cells": [], "claims":
/// [], "missing": []}. Throws, naming file and field, for anything else, a model given twice, models of
/// different studies (title, baseline, claims or settings other than "seed" and "program" differ), and a cell
/// given twice.
Quality read_quality(const std::vector<std::string>& paths);

/// Writes sparsity.sqlite, the page and the Markdown table into `folder`, which is made. The same results
/// give the same bytes. Throws if the folder has another database of that name.
void write_quality(const Quality& quality, const std::string& folder);
/// What a database of write_quality holds.
Quality quality_of(report::Database& database);

/// Tables of Markdown: arms by task, claims with verdicts, what was not measured.
std::string quality_markdown(const Quality& quality);
/// A self-contained page.
std::string quality_html(const Quality& quality);

}  // namespace tessera::sparsity
