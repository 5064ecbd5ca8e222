#pragma once

#include <optional>
#include <string>
#include <vector>

#include "sparsity/split_sweep.h"

/// The whole chain in one call: prune, calibrate, convert, and run what came out.

namespace tessera::sparsity {

struct SparsifyOptions {
  /// The model, its texts, and how it is pruned, calibrated and timed; `totals` and `weights` are what is
  /// searched with most_perplexity, and are not read without it. `gate_aware` has both kinds only with it.
  SweepOptions how = {};
  std::optional<double> total = {};    // needed without most_perplexity; with it, the only total to search
  std::optional<double> weights = {};  // weight sparsity; default: usual_weights(total)
  std::optional<ops::SparseFormat> format = {};  // default: the split's
  /// Search the fastest split whose perplexity is at most so many times that of the dense model, on the first
  /// half of the evaluation text, and confirm it on the second half; splits that are not confirmed give way
  /// to the next fastest.
  std::optional<double> most_perplexity = {};
  std::optional<DType> file_dtype = {};  // of the weights in `out`; default: that of the model's
  int64_t sample_tokens = 48;            // of the text that the result generates
};

/// What came out, measured on text that neither calibration nor search has seen.
struct Sparsified {
  Split split;
  std::string pruning;  // pruning_of(split)
  bool greedy = false;  // the gates' allocation
  pretrained::SparseConversion conversion;
  std::vector<pretrained::SparseModule> layers;
  double dense_perplexity = 0, perplexity = 0;
  SplitResult dense, sparse;          // times, bytes and counted sparsities
  std::vector<SplitResult> searched;  // with most_perplexity: all that was measured
  int64_t refused = 0;                // splits that held-out text did not confirm
  std::vector<int64_t> prompt, text;  // tokens, given and generated
};

/// The weight sparsity of SPDP's operating points (eval_speedup.sh), interpolated: 0.2 at a total of 0.5.
/// Below their range the share of the total that the nearest one has.
double usual_weights(double total);

/// The sweep that finds the split with most_perplexity: splits_of() it are what is searched.
SweepOptions searched_by(const SparsifyOptions& options);

/// Writes folder `out`, a compressed model with its calibration: `tessera generate --model OUT
/// --activation-sparsity S2` runs it. The pruned model and its calibration are in a temporary folder next to
/// `out` meanwhile. Throws, with nothing written, if no split keeps the bound.
Sparsified sparsify(const SparsifyOptions& options, const std::string& out);

}  // namespace tessera::sparsity
