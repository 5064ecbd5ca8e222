#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

/// A study: arms x tasks x learning rates x seeds over a `tessera train` command. Each cell is an ordinary
/// run folder.

namespace tessera::study {

/// Flags of `tessera train` with their values, as the command line takes them: {"--text", {"a", "b"}}. A
/// switch has no value.
using Flags = std::map<std::string, std::vector<std::string>>;

/// An arm or a task: a name, and the flags that make it differ.
struct Part {
  std::string name;
  Flags flags;
};

struct Plan {
  std::string title;
  std::string command;   // of `tessera train`: "bert"
  std::string metric;    // of the evaluation: "eval_score"
  bool higher = true;    // whether a higher metric is the better one
  std::string baseline;  // the arm that the others are compared with
  Flags flags;           // of every cell; those of a task win over them, those of an arm over both
  std::vector<Part> arms;
  std::vector<Part> tasks;         // empty: one that has no name
  std::vector<std::string> rates;  // learning rates, as they were written; empty: that of the flags
  std::vector<uint64_t> seeds;
  bool one_seed_per_run = false;  // the command takes --seeds, which is then 1

  /// Throws, saying what is wrong and what to do: no arms or seeds, names that are no part of a file's name
  /// or are given twice, a baseline that no arm is called, a learning rate that is not a positive number or
  /// given in two ways, a flag that the study sets itself.
  void validate() const;
};

/// The tasks and learning rates of a plan; without any, one that is empty.
std::vector<Part> tasks_of(const Plan& plan);
std::vector<std::string> rates_of(const Plan& plan);

nlohmann::json to_json(const Plan& plan);
/// Throws, naming `file`, if it is no plan.
Plan plan_from_json(const nlohmann::json& json, const std::string& file);

/// One run of a study.
struct Cell {
  std::string name;  // of its folder: "dense,sst2,lr-3e-4,seed-1", without the parts that the study lacks
  std::string arm, task, rate;
  uint64_t seed = 0;
  Flags flags;  // all but those that say where it goes
};
/// Seed by seed, and the arms of a seed one after the other: what is compared runs close in time.
std::vector<Cell> cells_of(const Plan& plan);
/// A run of `steps` steps of the arm on the task, for its step time: the first cell of them without
/// evaluations and saved checkpoints along the way, and without what counts the steps of the whole run, such
/// as --dense-first.
Cell timing_cell(const Plan& plan, const std::string& arm, const std::string& task, int64_t steps);
/// The arguments of `tessera` that begin a cell's run in `runs`, or continue the one there.
std::vector<std::string> arguments_of(const Plan& plan, const Cell& cell, const std::filesystem::path& runs,
                                      bool resumed);

}  // namespace tessera::study
