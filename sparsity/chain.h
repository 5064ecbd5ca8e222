#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eval/perplexity.h"
#include "pretrained/language_model.h"
#include "pretrained/sparse_file.h"
#include "sparsity/gate_calibration.h"
#include "sparsity/prune_options.h"

/// The chain from a dense language model to one that runs sparse: prune, calibrate, convert, run. Each step
/// leaves the fingerprint of its model behind, and the next one checks it.

namespace tessera::sparsity {

/// Throws, naming both fingerprints, if the folder has a report of pruning (kReportFile) of a model other
/// than the one with that fingerprint: its weights were changed, or its files do not belong together. `step`
/// begins the message.
void check_pruned(const char* step, const std::string& folder, const std::string& fingerprint);

struct ConvertOptions {
  std::optional<DType> dtype = {};  // else config.json's
  std::string calibration = "";     // of tessera calibrate, for the model in `from`; "": none
  pretrained::ConfigOptions config = {};
};

/// pretrained::convert_sparse, after check_pruned(). The calibration, whose fingerprint must be that of
/// `from`, goes along as `to`/calibration.json, with the fingerprint of the converted weights.
pretrained::SparseConversion convert(const std::string& from, const std::string& to, ops::SparseFormat format,
                                     const ConvertOptions& options = {});

struct LoadOptions {
  /// Share of the inputs that gates leave out, by the calibration in `calibration`, or, if that is empty, in
  /// the model's folder; for the prompt's tokens of sparse.prefill, else of the calibration's. Nothing: the
  /// gates of `sparse`, if any; an error together with them.
  std::optional<double> activation_sparsity = {};
  std::string calibration = "";  // an error without activation_sparsity
  bool greedy = true;            // the calibration's greedy distribution, if it has one
  pretrained::SparseOptions sparse = {};
  std::optional<DType> dtype = {};
};

/// pretrained::load_language with the gates of a calibration: ready to generate. A dense model without gates
/// runs dense.
pretrained::LoadedLanguageModel load(const std::string& folder, const Rng& rng, Device device,
                                     const LoadOptions& options = {});

/// The gates of a calibration as options of pretrained::make_sparse. Throws for `by_greedy` if the
/// calibration has no greedy steps.
pretrained::SparseOptions options_of(const Calibration& calibration, double activation_sparsity,
                                     bool by_greedy);

/// The same gates as those that a model is pruned for (PruneOptions::gates): `tessera prune --gates`.
PruneGates prune_gates_of(const Calibration& dense, double activation_sparsity, bool by_greedy);

/// Share of the inputs that gates left out on the windows, layers weighted by their number of weights: the
/// share of multiplications that a step of generation saves.
double counted_sparsity(models::LanguageRef model, std::span<const eval::PerplexityWindow> windows);

}  // namespace tessera::sparsity
