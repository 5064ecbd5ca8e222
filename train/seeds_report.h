#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "train/run_folder.h"

/// Runs of one job that differ in their seeds: their results, with error bars.

namespace tessera::train {

/// What was evaluated last in each run, and the loss of its last logged step.
struct SeedResults {
  std::vector<RunFolder> runs;
  std::vector<std::string> metrics;                   // "eval_accuracy", ..., "loss"; in all runs
  std::map<std::string, std::vector<double>> values;  // of each metric, in the order of the runs
  std::vector<std::string> diverged;                  // names of runs that have no results
  /// Names of those runs that had diverged and were resumed: their values count, but are of a run that
  /// skipped steps and was continued, which the tables say.
  std::vector<std::string> resumed = {};
};
/// Throws, naming the run, if one has logged no evaluation.
SeedResults collect_seeds(const std::vector<RunFolder>& runs);

/// {"eval_accuracy": {"mean", "deviation", "values"}, ...}; the deviation is the sample's, with n - 1.
nlohmann::json to_json(const SeedResults& results);
/// A line per metric: each seed's value, then mean +- standard deviation; and lines that name the seeds that
/// diverged, and those that went on after that.
std::string format_seeds(const SeedResults& results);

/// Settings, the table, metrics with error bars, the course of the evaluations with error bars, and the loss
/// of every run.
void write_seeds_report(const std::filesystem::path& path, const std::string& title,
                        const SeedResults& results,
                        const std::vector<std::pair<std::string, std::string>>& settings);

/// The page of one run: its settings, its loss and its evaluations.
void write_run_report(const std::filesystem::path& path, const std::string& title, const RunFolder& run,
                      const std::vector<std::pair<std::string, std::string>>& settings);

}  // namespace tessera::train
