#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "models/language_model.h"
#include "pretrained/sparse_model.h"
#include "sparsity/calibration.h"

/// Calibration of gates: which threshold leaves out which share of a layer's inputs, on a text, and how a
/// share is best distributed over the projections of a block (TEAL, arXiv:2408.14690).

namespace tessera::sparsity {

/// How a threshold follows from the inputs' distribution.
enum class ThresholdRule : uint8_t {
  symmetric,  // the quantile 0.5 + s / 2 of x, as TEAL's program has it: exact if x is symmetric around 0
  magnitude   // the quantile s of |x|
};
const char* name_of(ThresholdRule rule);                      // "symmetric"
ThresholdRule parse_threshold_rule(const std::string& text);  // throws, naming the choices

struct GateOptions {
  ThresholdRule rule = ThresholdRule::symmetric;
  bool column_norms = false;  // |x_j| times the norm of column j of the weight (WINA, arXiv:2505.19427)
  bool top_k = false;         // gates keep the k largest of each token (La RoSA, arXiv:2507.01299)
  bool greedy = true;         // distribute by measured errors, else all projections have the same share
  /// A greedy step, as the sparsity that it adds to a matrix of d_model x d_model; a larger one gets less,
  /// so that every step leaves out as many weights.
  double step = 0.05;
  double most = 0.9;           // the greedy distribution ends at this share of a block's weights
  int64_t greedy_samples = 1;  // the first ones; errors are measured on the last quarter of each
  double prefill = 0.5;        // nn::Compressed::prefill
  int64_t batch = 1;           // samples passed through a block at a time
  std::function<void(int64_t block, int64_t blocks)> on_block = {};  // after each

  /// Throws, naming the option, unless all are in range and fit each other.
  void validate() const;
};

/// A linear module of a block, by its name in transformers.
struct CalibratedLayer {
  std::string name;
  int64_t block = 0, rows = 0, columns = 0;
  std::vector<double> thresholds;  // at Calibration::shares; none for top_k
};

/// The greedy allocation within one block: which share of its inputs each projection leaves out, step by
/// step.
struct GreedyBlock {
  struct Step {
    double sparsity = 0;         // of the block's weights
    double error = 0;            // L2, of the block's output
    double baseline = 0;         // that of the same share everywhere
    std::vector<double> shares;  // of each layer's inputs
  };
  std::vector<std::string> layers;
  std::vector<Step> steps;
};

/// The distribution of the inputs of a layer, as bars from -limit to limit.
struct InputBars {
  std::string name;  // "blocks.3.attention.qkv"; with column norms that of the module
  double limit = 0;
  std::vector<double> shares;
};

/// What was found, as calibration.json keeps it.
struct Calibration {
  std::string model, fingerprint;  // of the model that gates are for
  ThresholdRule rule = ThresholdRule::symmetric;
  bool column_norms = false, top_k = false;
  double prefill = 0.5;
  int64_t samples = 0, length = 0;
  uint64_t seed = 0;
  std::vector<double> shares;  // 0, 0.005, ..., 1
  std::vector<CalibratedLayer> layers;
  std::vector<GreedyBlock> greedy;  // one per block, or none
  std::vector<InputBars> inputs;

  /// The share that each layer leaves out when `sparsity` of all weights is to be: the same everywhere, or,
  /// with `by_greedy`, that of the step of its block which comes nearest. Throws if there are no steps or for
  /// a sparsity outside [0, 1).
  std::map<std::string, double> shares_at(double sparsity, bool by_greedy) const;
  /// The gates of that distribution.
  pretrained::Gates gates(double sparsity, bool by_greedy) const;
  ops::Gate gate(const CalibratedLayer& layer, double share) const;
};

inline constexpr const char* kCalibrationFile = "calibration.json";

/// Histograms of the inputs of all linear layers in the model's blocks, thresholds, and the greedy
/// distribution, block by block; of a dense model, which is as before afterwards (also if this throws). The
/// result is a function of model, samples and options. Throws for activations that are not finite.
Calibration calibrate(models::LanguageRef model, const Samples& samples, const GateOptions& options = {});

/// Writes folder `folder`: kCalibrationFile and, per block, `layer-<i>/results.csv` with the greedy steps.
/// All of it or nothing; throws if there is a calibration already.
void save_calibration(const Calibration& calibration, const std::string& folder);
/// Of such a folder or file. Throws, naming the file and what is wrong with it.
Calibration read_calibration(const std::string& path);
/// Whether the path is such a folder or file, by its first fields.
bool is_calibration(const std::string& path);

}  // namespace tessera::sparsity
