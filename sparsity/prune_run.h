#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "eval/perplexity.h"
#include "pretrained/language_model.h"
#include "sparsity/prune.h"

/// A whole run of pruning: measure, prune, measure again, save.

namespace tessera::sparsity {

struct PruneRun {
  std::string model;  // its name, for masks and report
  std::string out;    // directory to write; it must not contain weights yet
  PruneOptions options;
  std::optional<DType> dtype = {};                  // of the files; else that of the model
  std::span<const eval::PerplexityWindow> windows;  // of a text to measure on; may be empty
};

struct PruneRunResult {
  Pruned pruned;
  nlohmann::ordered_json report;  // the text of kReportFile
};

/// Where a run keeps its finished blocks until the model is written: next to `out`. There they are for the
/// next call after an error too: a full disk, or a GPU that others use, is no reason to prune them again.
std::string partial_folder(const std::string& out);

/// prune() with its progress in partial_folder(), which is locked, so that no other call writes to the same
/// `out` meanwhile; then save_pruned(). The report has the perplexity before and after, with gates also that
/// under gates. The model must be dense.
PruneRunResult run_pruning(pretrained::LoadedLanguageModel& language, const Samples& samples, PruneRun run);

}  // namespace tessera::sparsity
