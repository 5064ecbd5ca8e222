#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "nn/observe.h"
#include "pretrained/layers.h"

/// How sparse the gradients dY of the outputs of linear layers are: the matrices of which sliced backward
/// passes (ops/linear/sliced_backward.h) multiply some rows.

namespace tessera::sparsity {

/// Number of rows whose share of the energy is measured: a number, or a share of the rows that are read.
struct TopRows {
  int64_t count = 0;
  double share = 0;  // 0: `count` rows
  /// "50" or "10%". Throws for anything else, for less than one row and for more than 100 %.
  static TopRows parse(const std::string& text);
  std::string text() const;
  int64_t of(int64_t rows) const;
};

/// A figure over batches.
struct OverBatches {
  int64_t batches = 0;
  double sum = 0, least = std::numeric_limits<double>::infinity(),
         largest = -std::numeric_limits<double>::infinity();
  void add(double value);
  void add(const OverBatches& others);
  /// NaN if there is no batch.
  double mean() const;
};

/// Counts of magnitudes by binades: gradients span many powers of two, and what matters is how many.
class Binades {
 public:
  static constexpr int kLowest = -64, kHighest = 16;
  Binades() : counts_(size_t(kHighest - kLowest), 0) {}
  /// Magnitudes below 2^kLowest count in the first binade, those of 2^kHighest and more in the last one.
  void add(double magnitude);
  void add(const Binades& others);
  int64_t zeros() const { return zeros_; }  // exact ones; in no binade
  /// Of [2^exponent, 2^(exponent + 1)), kLowest <= exponent < kHighest.
  int64_t count(int exponent) const { return counts_.at(size_t(exponent - kLowest)); }
  int64_t all() const;

 private:
  int64_t zeros_ = 0;
  std::vector<int64_t> counts_;
};

struct GradientOptions {
  double tolerance = 0;           // elements of at most this magnitude count as zeros
  std::vector<TopRows> top = {};  // rows that shares of energy are asked of
  /// Throws, naming the flag, for a tolerance that is negative or not finite.
  void validate() const;
};

/// The figures of one gradient dY. *Read* rows are those of tokens that a later layer reads. *All* rows are
/// those of a padded batch: padding rows, and rows that nothing reads, are exact zeros among them, whether
/// they are computed or not. Shares of zeros are elements, or rows of nothing but zeros.
struct GradientFigures {
  int64_t all_rows = 0, read_rows = 0, columns = 0;
  double zero_elements = 0, zero_elements_read = 0;
  double zero_rows = 0, zero_rows_read = 0;
  /// Share of the energy, the sum of squares, in the rows of largest norm, for each of GradientOptions::top;
  /// empty if there is none: all elements are zero.
  std::vector<double> energy = {};
  std::vector<double> squares = {};  // of each read row
  Binades magnitudes = {};           // of the elements of read rows
};
/// dy: [rows, ...] of `columns` columns, f32, of which those of one module are first ... first + count - 1.
/// `read`: ascending rows that are read; null: all. `all_rows`: rows of the padded batch, at least those of
/// dy. Throws, beginning with `name`, for an element that is not finite.
GradientFigures gradient_figures(const std::string& name, const std::vector<float>& dy, int64_t columns,
                                 int64_t first, int64_t count, const std::vector<int64_t>* read,
                                 int64_t all_rows, const GradientOptions& options);

/// The figures of one module over batches.
struct ModuleGradient {
  std::string name;  // in transformers: "bert.encoder.layer.3.output.dense"
  int64_t columns = 0;
  OverBatches all_rows = {}, read_rows = {};
  OverBatches zero_elements = {}, zero_elements_read = {}, zero_rows = {}, zero_rows_read = {};
  std::vector<OverBatches> energy = {};  // by GradientOptions::top
  Binades magnitudes = {};
  std::vector<double> first_norms = {};  // of the rows of the first batch's tokens; NaN: not read
  void add(const GradientFigures& figures);
  /// Adds the figures of another task; the norms of the first batch stay as they are.
  void add(const ModuleGradient& others);
};

/// What the meter has to know of a batch.
struct GradientBatch {
  int64_t tokens = 0;       // without padding
  int64_t padded_rows = 0;  // of the batch with padding
  std::vector<int64_t> last_block =
      {};  // ascending rows of tokens of which the last block's results are read
};

/// While it lives, measures the gradients that arrive at the outputs of linear layers of a BERT in backward
/// passes of packed batches. Layers are observed, so they run one by one (nn::Observe).
class GradientMeter {
 public:
  /// `patterns`: modules by their names in transformers, separated by commas, or "all". The model must
  /// outlive the meter. Throws if a pattern fits none.
  GradientMeter(models::Bert& model, const std::string& patterns, GradientOptions options);
  GradientMeter(const GradientMeter&) = delete;
  /// Before each forward pass.
  void begin(GradientBatch batch);
  /// In the order of the model. A module that no gradient reached has no batches.
  const std::vector<ModuleGradient>& modules() const { return figures_; }

 private:
  void see(const nn::LinearCall& call, const Tensor& dy);
  GradientOptions options_;
  int64_t layers_;
  std::vector<pretrained::LinearModule> modules_;
  std::vector<ModuleGradient> figures_;
  GradientBatch batch_;
  nn::Observe observe_;
};

}  // namespace tessera::sparsity
