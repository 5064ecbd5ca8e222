#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench/pass_timer.h"
#include "bench/record.h"
#include "models/bert.h"
#include "report/table.h"
#include "tensor/precision.h"
#include "train/slice_settings.h"

/// Where a training pass of BERT or RoBERTa spends its time: per layer and per kind of layer, forward and
/// backward, of the original model next to one with sliced layers (`tessera bench layers`).

namespace tessera::bench {

/// The published base model.
models::BertConfig base_model(models::BertFamily family);

struct LayersBenchOptions {
  models::BertConfig model = {};         // of a synthetic batch; its head and dtype are set
  std::string folder = {};               // Hugging Face model directory, in place of `model`
  std::vector<std::string> tasks = {};   // of GLUE: the first batch of each; empty: a synthetic batch
  std::string data = {};                 // folder of their files
  int64_t batch = 16, max_length = 128;  // texts, and tokens per text; synthetic texts all have max_length
  train::SliceSettings slice = {};       // of the modified model; none: the original alone
  /// Layers are observed, so that those of a feed-forward network are called one by one.
  bool unfused = false;
  uint64_t seed = 0;
  Device device = Device::cpu();
  Precision precision = {};
  /// `seconds` and repeats are of each task and model.
  TimerOptions timer = {.seconds = 2, .least = 3, .most = 50, .warmups = 2, .cold = false};
  /// Throws, naming the flag.
  void validate() const;
};

/// The `max_length` of a command that is given none: train::default_max_length() of the model. Throws as
/// bench_layers does.
int64_t default_max_length(const LayersBenchOptions& options);

/// A part of the model: a layer ("embeddings", "0", "1", ..., "head"), a kind of layer, or both; "all".
struct Part {
  std::string layer, kind;
  bool operator==(const Part&) const = default;
  auto operator<=>(const Part&) const = default;
};
inline constexpr const char* kAllParts = "all";

/// The parts that an operator counts for, from "all, all" to its own: `op` is its name, `layer` the layer
/// that called it, `entered` whether a block has been called before (then what no layer is named for is the
/// head). Everything in a feed-forward network also counts as "feed-forward".
std::vector<Part> parts_of(const std::string& op, const std::string& layer, bool entered);

struct PartTimes {
  Timing forward, backward;
};
/// Sums over each part's operators per repeat; percentiles over the repeats. Throws without repeats.
std::map<Part, PartTimes> part_times(const std::vector<PassTimes>& repeats);
/// The parts in the order of the model: all, layers, kinds, kinds of each layer.
std::vector<Part> in_order(const std::map<Part, PartTimes>& parts);

/// One model on one task.
struct LayersRun {
  std::string task;   // "sst2"; "synthetic"
  std::string slice;  // SliceSettings::description(); "": the original
  std::vector<PassTimes> repeats;
  int64_t tokens = 0, batch = 0;
  models::BertConfig config = {};
};
struct LayersComparison {
  LayersRun original;
  std::optional<LayersRun> modified;
};

/// For each task both models, whose repeats alternate: the same weights, batch and dropout masks in each, and
/// in each repeat the same random numbers for the choice of rows. Throws as the model's and the task's files
/// are read, and where the layers cannot be sliced.
std::vector<LayersComparison> bench_layers(const LayersBenchOptions& options);

/// One row per task and part: medians in milliseconds, speedup = original / modified. The parts "all, all"
/// are the rows of published comparisons.
report::Table layers_table(const std::vector<LayersComparison>& all);
/// One record per task, model, part and direction: op "layers bert" or "layers roberta".
std::vector<Record> layers_records(const LayersBenchOptions& options,
                                   const std::vector<LayersComparison>& all);
/// For a terminal: per layer, per kind, and the `top` operators that take longest, forward and backward.
std::string layers_text(const LayersComparison& one, size_t top);

/// The repeat of median length of each task and model, in the format of Chrome's tracing: a process per task
/// and model, an event per operator, and around those of a layer one for the layer. Times are microseconds.
nlohmann::json layers_trace(const std::vector<LayersComparison>& all);

}  // namespace tessera::bench
