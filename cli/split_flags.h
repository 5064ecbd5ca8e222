#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "cli/calibration_flags.h"
#include "cli/gate_flags.h"
#include "sparsity/split_sweep.h"

/// What the commands that split a total sparsity have in common.

namespace tessera::cli {

struct SplitFlags {
  std::string model, method = "wanda", gate_aware = "off", device, dtype;
  CalibrationFlags texts;
  GateFlags gates;
  int64_t prompt = 32;
  std::optional<int64_t> stride;
  sparsity::TimingOptions timing;

  void add_to(CLI::App& command);
  /// The texts' tokens, which the options refer to.
  struct Prepared {
    std::string folder;
    CalibrationFlags::Texts texts;
    sparsity::SweepOptions options;
    std::unique_ptr<io::Tokenizer> tokenizer;
  };
  std::unique_ptr<Prepared> prepare(const char* command);
};

}  // namespace tessera::cli
