#pragma once

#include <optional>
#include <string>
#include <vector>

#include "models/language_model.h"
#include "pretrained/load.h"
#include "sparsity/calibration.h"
#include "sparsity/masks.h"
#include "sparsity/prune_options.h"

/// Pruning a language model block by block: magnitude, Wanda (Sun et al., arXiv:2306.11695), RIA, SparseGPT
/// (Frantar, Alistarh, arXiv:2301.00774), in any pattern, with or without an update of the weights that stay.

namespace tessera::sparsity {

/// The result of pruning one matrix.
struct PrunedMatrix {
  std::string name;  // in transformers: "model.layers.3.self_attn.k_proj"
  int64_t rows = 0, columns = 0;
  int64_t zeros = 0;
  double asked = 0;             // sparsity
  int64_t dead = 0;             // inputs that were 0 for all samples
  double damping = 0;           // of its Hessian, as a share of the diagonal's mean; 0: it has none
  int64_t raised = 0;           // times that the damping was raised
  std::optional<double> error;  // ||(W - V) X||^2 / ||W X||^2, where X^T X was collected
  /// With options.gates `error` is ||V x~ - W x||^2 / ||W x||^2 (sparsity/gate_aware.h); here it is that of
  /// the dense weights, and of the dense weights that make up best for the gates.
  std::optional<double> gate_error = {}, corrected_error = {};
  Tensor input_norms = {};  // f32 [columns] on the CPU (sparsity/input_norms.h); undefined without samples

  double sparsity() const { return double(zeros) / double(rows * columns); }
};

struct Pruned {
  std::vector<PrunedMatrix> matrices;  // in the model's order
  Masks masks;                         // (W != 0) of each of them
  int64_t resumed = 0;                 // blocks that were taken from options.progress
  std::string fingerprint = {};        // of the pruned model (masks.info has that of the dense one)
  int64_t block_matrices = 0;          // in the model's blocks, pruned or not
  double block_sparsity = 0;           // zeros of all of those, as a share of their weights
  /// Zeros of all pruned matrices, as a share of their weights.
  double sparsity() const;
};

/// Prunes the matrices of the model's blocks in place. Block by block: statistics of the inputs that the
/// blocks before it make, pruned already, then the block's matrices, then its outputs. q, k, v, gate and up
/// are matrices of their own. `samples` may be empty where options.needs_samples() says so.
///
/// The result is a function of model, samples and options; on the CPU not of the number of threads. Throws
/// for options out of range, a pattern that does not divide a matrix's columns (before anything is changed),
/// weights or activations that are not finite. If it throws, blocks that were pruned stay so.
Pruned prune(models::LanguageRef model, const Samples& samples, const PruneOptions& options = {});
/// Throws, as prune() would, if options.progress has blocks that this call cannot go on after.
void check_progress(models::LanguageRef model, const Samples& samples, const PruneOptions& options);

inline constexpr const char* kMasksFile = "masks.safetensors";
inline constexpr const char* kReportFile = "pruning.json";

/// A Hugging Face model directory with kMasksFile, kInputNormsFile if there were samples, and `report` as
/// kReportFile in it, all of it or nothing.
/// Throws if the folder has weights already.
void save_pruned(models::LanguageRef model, const Pruned& pruned, const std::string& report,
                 const std::string& folder, const pretrained::SaveOptions& options = {});

/// What pruning will take, before it starts.
struct PrunePlan {
  int64_t matrices = 0, weights = 0;  // to be pruned
  double model_bytes = 0;             // parameters
  double sample_bytes = 0;            // what the samples are between two blocks
  double statistics_bytes = 0;        // of the block with the most
  double transient_bytes = 0;  // activations of a batch within a block, or copies of the largest matrix
  double flops = 0;            // of forward passes, statistics and updates
  double seconds = 0;          // estimated from two timed passes through the first block; 0: nothing to time
  double bytes() const { return model_bytes + sample_bytes + statistics_bytes + transient_bytes; }
};
PrunePlan plan_pruning(models::LanguageRef model, const Samples& samples, const PruneOptions& options);

}  // namespace tessera::sparsity
