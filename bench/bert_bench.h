#pragma once

#include <string>
#include <vector>

#include "bench/default_sizes.h"
#include "bench/record.h"
#include "bench/step_ranks.h"
#include "datasets/glue_batches.h"
#include "models/bert.h"
#include "tensor/precision.h"
#include "train/drop_settings.h"
#include "train/slice_settings.h"

namespace tessera::bench {

/// A step of fine-tuning: BERT-base with a classifier of two classes on texts of equal length.
struct BertBenchOptions {
  std::vector<BatchSize> shapes = {};  // empty: default_bert_batches
  models::BertConfig model = {};       // its head is set; its dtype and dropout come from below
  Device device = Device::cpu();
  std::vector<bool> graph = {true, false};  // on a CPU there is no graph: measured once
  std::string optimizer_states = "f32";     // as train::TrainingSettings has it
  std::vector<double> dropout = {0.1};      // everywhere, as the published config.json has it; 0: none
  train::SliceSettings slice = {};          // of all of these
  train::DropSettings drop = {};            // likewise; with it no step is captured
  StepRanks ranks = {};                     // each with texts of its own
  std::vector<Precision> precisions = {};   // empty: default_precision(device)
  TimerOptions timer = {.seconds = 2, .least = 3, .most = 100, .warmups = 3, .cold = false};
  Listener listener = {};
};

/// Tokens of a fixed pattern, `length` in each of `count` texts, on the host: a step's work depends on them
/// only by how often rows of the embedding table repeat, so they are spread over all of it. The second half
/// of a text is of the second type.
datasets::GlueBatch fixed_batch(const models::BertConfig& config, int64_t count, int64_t length);

/// Times forward + backward + AdamW on random tokens that stay on the device, as the peers do: f32 masters
/// unless the states are bf16, no clipping. Records count the FLOPs of the dense step. A configuration that
/// does not fit into memory throws OutOfMemory.
std::vector<Record> bench_bert_step(const BertBenchOptions& options);

}  // namespace tessera::bench
