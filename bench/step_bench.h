#pragma once

#include <vector>

#include "bench/record.h"
#include "bench/step_ranks.h"
#include "train/language_job.h"
#include "train/tnp_job.h"

namespace tessera::bench {

/// The matrix of a training step: graph on or off, activation checkpointing on or off, precision.
struct StepBenchOptions {
  train::TnpSettings settings = {};
  Device device = Device::cpu();
  std::vector<bool> graph = {true, false};  // on a CPU there is no graph: measured once
  std::vector<bool> checkpoint = {false};
  StepRanks ranks = {};
  std::vector<Precision> precisions = {};  // empty: default_precision(device)
  TimerOptions timer = {.seconds = 2, .least = 3, .most = 100, .warmups = 3, .cold = false};
  Listener listener = {};
};

/// Times forward + backward + AdamW on random data that stays on the device, as the peers do. A configuration
/// that does not fit into memory throws OutOfMemory. On several ranks each has a batch of that size; the
/// records, which all get, say how one does alone (RankTimes).
std::vector<Record> bench_tnp_step(const StepBenchOptions& options);

/// The same of a language model, on random tokens, all windows of one length.
struct LanguageStepOptions {
  train::LanguageSettings settings = {};
  Device device = Device::cpu();
  std::vector<bool> graph = {true, false};
  StepRanks ranks = {};
  std::vector<Precision> precisions = {};
  TimerOptions timer = {.seconds = 2, .least = 3, .most = 100, .warmups = 3, .cold = false};
  Listener listener = {};
};
std::vector<Record> bench_language_step(const LanguageStepOptions& options);
/// Texts of so many tokens, and a model with as many positions.
void set_length(train::LanguageSettings& settings, int64_t tokens);

}  // namespace tessera::bench
