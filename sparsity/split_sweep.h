#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "report/database.h"
#include "sparsity/gate_calibration.h"
#include "sparsity/measure.h"
#include "sparsity/prune_options.h"

/// A sweep over splits of a total sparsity between weights and activations: for each, the perplexity and the
/// time of a token, of one and the same model, which is pruned, calibrated and compressed on the spot and not
/// kept.

namespace tessera::sparsity {

inline constexpr const char* kSweepFile = "sparsity.sqlite";
inline constexpr const char* kSweepTable = "sweep.csv";
inline constexpr const char* kSweepPage = "sweep.html";
/// The database's application_id: "tsp2".
inline constexpr int32_t kSweepId = 0x74737032;
inline constexpr const char* kSweepWhat = "sparsity.sqlite of tessera sparsity sweep";

/// How the weights and the activations of one model are made sparse, and how they are run.
struct Split {
  double total = 0, weights = 0, activations = 0;
  ops::SparseFormat format = ops::SparseFormat::tiled_cbc;
  bool gate_aware = false;  // pruned for its gates: sparsity/split_pruning.h
};

struct SweepOptions {
  const char* what = "sweep";  // what errors begin with
  std::string model;           // Hugging Face model directory, dense
  std::vector<double> totals = {0.5};
  /// Weight sparsities to try with each total: those below it, 0 being gates alone, and the total itself,
  /// weights alone.
  std::vector<double> weights = {0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6};
  bool weights_alone = true;
  std::optional<ops::SparseFormat> format = {};  // only the splits in this format
  /// Splits with zeros and gates: pruned gate-aware or not, or both kinds next to each other. Each gate-aware
  /// one is pruned by itself, since its gates decide its weights.
  std::vector<bool> gate_aware = {false};
  PruneOptions prune = {};  // its sparsity is that of the split
  GateOptions gates = {};
  SampleOptions samples = {.count = 16};
  std::span<const int64_t> calibration, evaluation;     // tokens
  int64_t window = 2048, stride = 0, most_windows = 0;  // of the perplexity
  int64_t prompt = 32;                                  // tokens of the evaluation that generation continues
  TimingOptions timing = {};
  Device device = Device::cpu();
  std::optional<DType> dtype = {};
  /// A line of text for the user, at the beginning and after each split.
  std::function<void(const std::string&)> tell = {};
};

/// What was found of one split.
struct SplitResult {
  Split split;
  double uniform_perplexity = 0;
  std::optional<double> greedy_perplexity;  // nothing: not measured
  double ttft_ms = 0, tpot_ms = 0;          // medians
  double ttft_p90 = 0, tpot_p90 = 0;
  uint64_t bytes = 0;                                   // of the layers in the blocks
  double counted_weights = 0, counted_activations = 0;  // as they are, not as they were asked for

  double perplexity() const {
    return greedy_perplexity ? std::min(uniform_perplexity, *greedy_perplexity) : uniform_perplexity;
  }
  bool is_greedy() const { return greedy_perplexity && *greedy_perplexity <= uniform_perplexity; }
};

struct SweepResult {
  double dense_perplexity = 0;
  SplitResult dense;                // its times and bytes; its split is 0
  std::vector<SplitResult> splits;  // in the order of splits_of
  int64_t resumed = 0;              // splits that an earlier call measured
};

/// The splits that the options ask for, by weight sparsity, then gate-aware ones after the others, then
/// total. Throws for values out of range, if no split has the format, and if gate-aware pruning is asked for
/// and no split has both zeros and gates.
std::vector<Split> splits_of(const SweepOptions& options);

/// Measures all splits. If `folder` is not empty, each is put into `folder`/sparsity.sqlite as soon as it is
/// there, and a later call with the same options goes on after those, and after the dense model; the CSV and
/// the page are written at the end. Throws if the folder has a sweep with other options, or another database,
/// and while another process writes in it.
SweepResult sweep_splits(const SweepOptions& options, const std::string& folder);

/// Not dominated: no other is at most as slow and has at most the perplexity, with one of the two less. By
/// ascending time. Splits whose perplexity is not finite are left out.
std::vector<SplitResult> pareto_front(std::vector<SplitResult> splits);

/// A self-contained page of a sweep's database.
std::string sweep_page(report::Database& database);

}  // namespace tessera::sparsity
