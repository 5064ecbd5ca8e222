#pragma once

#include <vector>

#include "bench/record.h"
#include "train/language_job.h"
#include "train/tnp_job.h"

namespace tessera::bench {

/// The matrix of a training step: graph on or off, activation checkpointing on or off, precision.
struct StepBenchOptions {
  train::TnpSettings settings;
  Device device = Device::best();
  std::vector<bool> graph = {true, false};  // on a CPU there is no graph: measured once
  std::vector<bool> checkpoint = {false};
  std::vector<Precision> precisions;  // empty: default_precision(device)
  TimerOptions timer = {.seconds = 2, .least = 3, .most = 100, .warmups = 3, .cold = false};
  /// The ranks that make the step together, each group of settings.split.ranks of them on a task of its own;
  /// null: this process alone.
  const dist::World* world = nullptr;
};

/// Times forward + backward + AdamW on random data that stays on the device, as the peers do. A configuration
/// that does not fit into memory throws OutOfMemory. On several ranks the times are those of the slowest, and
/// FLOPs and tokens those of all of them together.
std::vector<Record> bench_tnp_step(const StepBenchOptions& options);

/// The same of a language model, on random tokens, all windows of one length.
struct LanguageStepOptions {
  train::LanguageSettings settings;
  Device device = Device::best();
  std::vector<bool> graph = {true, false};
  std::vector<Precision> precisions;
  TimerOptions timer = {.seconds = 2, .least = 3, .most = 100, .warmups = 3, .cold = false};
};
std::vector<Record> bench_language_step(const LanguageStepOptions& options);

}  // namespace tessera::bench
