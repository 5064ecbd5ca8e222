#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "pretrained/sparse_model.h"

/// The flags of commands that run a language model with compressed weights or gates.

namespace tessera::cli {

struct SparseFlags {
  std::string mode, gates;  // empty: not given
  std::optional<double> threshold;

  void add_to(CLI::App& command);
  /// What they say of a model in that folder: nothing if it is to run dense. Reads the file of gates. Throws
  /// UsageError for flags that contradict each other.
  std::optional<pretrained::SparseOptions> options(const std::string& folder, int64_t tokens) const;
};

/// Tells, under --sparse auto, a line per linear layer: how it runs, and why.
void tell_sparse(const std::vector<pretrained::SparseModule>& modules,
                 const pretrained::SparseOptions& options);

/// Every linear layer with its format, variant, bytes, sparsity and gate, and what was counted at the gates.
nlohmann::json sparse_json(const std::vector<pretrained::SparseModule>& modules,
                           const std::map<std::string, pretrained::GateCounts>& counts);

}  // namespace tessera::cli
