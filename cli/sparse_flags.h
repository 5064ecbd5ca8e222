#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "pretrained/sparse_model.h"

/// The flags of commands that run a language model with compressed weights or gates.

namespace tessera::cli {

/// A sparsity, by its own name or by that which SPDP's scripts have for it. Their description swaps the two
/// names, so the meaning of the alias is told where it is used.
class ShareFlag {
 public:
  void add_to(CLI::App& command, const char* name, const char* alias, const char* help);
  /// What was given, if anything was.
  std::optional<double> get() const;

 private:
  const char *name_ = "", *alias_ = "";
  std::optional<double> value_, alias_value_;
};
/// --activation-sparsity and --sp-ratio.
void add_activation_sparsity(CLI::App& command, ShareFlag& flag, const char* help);
/// --weight-sparsity and --dp-ratio.
void add_weight_sparsity(CLI::App& command, ShareFlag& flag, const char* help);

struct SparseFlags {
  std::string mode, gates, allocation;  // empty: not given
  std::optional<double> threshold, total, prefill;
  ShareFlag activation;

  void add_to(CLI::App& command);
  /// What they say of a model in that folder: nothing if it is to run dense. Reads the file of gates. Throws
  /// UsageError for flags that contradict each other.
  std::optional<pretrained::SparseOptions> options(const std::string& folder, int64_t tokens) const;

 private:
  void set_gates(pretrained::SparseOptions& options, const std::string& folder) const;
};

/// Names of the formats of compressed weights, for --format.
std::vector<std::string> sparse_format_names();

/// Tells, under --sparse auto, a line per linear layer: how it runs, and why.
void tell_sparse(const std::vector<pretrained::SparseModule>& modules,
                 const pretrained::SparseOptions& options);

/// Every linear layer with its format, variant, bytes, sparsity and gate, and what was counted at the gates.
nlohmann::json sparse_json(const std::vector<pretrained::SparseModule>& modules,
                           const std::map<std::string, pretrained::GateCounts>& counts);

}  // namespace tessera::cli
