#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "sparsity/gate_calibration.h"

/// The flags of commands that calibrate gates.

namespace tessera::cli {

struct GateFlags {
  std::string rule, scale = "one", gate = "threshold", allocation = "greedy";
  sparsity::GateOptions options;
  static const std::vector<const char*> kNames;

  void add_to(CLI::App& command);
  /// Throws UsageError for values that are out of range or do not fit each other, and for flags that have no
  /// effect next to the others.
  sparsity::GateOptions get() const;

 private:
  const CLI::App* command_ = nullptr;  // that add_to() was called with
};

/// Prints a line per block, with the remaining time.
std::function<void(int64_t block, int64_t blocks)> block_progress(const char* what);

}  // namespace tessera::cli
