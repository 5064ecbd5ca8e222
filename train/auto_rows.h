#pragma once

#include <functional>
#include <string>
#include <vector>

#include "models/bert.h"
#include "optim/optimizer.h"
#include "pretrained/layers.h"
#include "train/row_shares.h"
#include "train/slice_settings.h"

namespace tessera::train {

/// The result of an estimate; all variances are of the gradient of all parameters together.
struct RowEstimate {
  double batch_variance = 0;  // of the dense gradient from batch to batch
  double added_variance = 0;  // by the choice of rows at the new shares, as a share of batch_variance
  int passes = 0;             // forward and backward passes that it took
  bool held = true;           // false: no shares below 1 kept to the bound, so all rows are multiplied
  double seconds_dense = 0, seconds_sliced = 0;  // modelled, of the sliced layers' backward passes
};

/// `--rows auto`: shares of the rows, one per group of layers that choose their rows together, such that the
/// choice of rows adds at most SliceSettings::variance of the variance that the gradient has from batch to
/// batch anyway (Liu et al., VCAS, arXiv:2402.17227, section 4, whose bound and whose Monte Carlo estimates
/// these are). Differences from VCAS:
///
/// - One selection per group serves dx and dW, with the rows of `importance`.
/// - Shares of all layers are chosen at once, where VCAS moves one threshold by small steps: variance
///   that a group adds to its own weights' gradients follows from the norms of its rows (sampling_variance),
///   and what it does to the layers below it from one factor for all groups, which is measured. Of the shares
///   that keep to the bound those are taken whose backward passes take least time (choose_options); a choice
///   of rows that costs more than it saves is not made.
/// - The sum is then measured, over draws of the rows of two batches; shares that do not keep to the bound
/// are
///   lowered, and if that fails kRounds times, all rows are multiplied until the next estimate.
///
/// Until the first estimate all rows are multiplied. The choice is a function of the seed and the step.
class AutoRows {
 public:
  static constexpr int kBatches = 2;  // the least that have a variance
  static constexpr int kDraws = 2;    // of the rows of each
  static constexpr int kRounds = 4;
  /// Shares are chosen for this part of the bound, since a measurement of four draws may be too low.
  static constexpr double kAim = 0.7;

  /// `sliced`: layers of the model that carry a slice of rows "auto", which draws from `rows`. The model must
  /// outlive this.
  AutoRows(models::Bert& model, const std::vector<pretrained::LayerParts>& sliced,
           const SliceSettings& settings, const Rng& rows);

  /// "blocks.3.mlp": both layers of a feed-forward network, or a layer by itself.
  std::vector<std::string> groups() const;
  /// f64 [groups], on the CPU: state, kept in checkpoints.
  Tensor shares, factor;  // factor: f64 [1], measured / predicted variance; 0: not known yet
  /// Sets the layers' slices to the current shares.
  void apply() const;

  struct BatchRows {
    int64_t rows = 0, valid = 0;  // the first `valid` ones are of tokens, the others are padding rows
  };
  struct Passes {
    /// Loads batch `i` of kBatches.
    std::function<BatchRows(int i)> load;
    /// A forward and a backward pass of the batch that is loaded, each time with the dropout masks of that
    /// batch and new rows.
    std::function<void()> backward;
  };
  /// Sets shares and factor, and applies the shares. Gradients are forgotten. Memory: three copies of all
  /// gradients. If a gradient is not finite, all rows are multiplied.
  RowEstimate estimate(const optim::Optimizer& optimizer, const Passes& passes);

 private:
  struct Group {
    std::string name;
    std::vector<pretrained::LayerParts> layers;  // the last one chooses the rows
  };
  /// The measurements of one batch for each group.
  struct Batch {
    std::vector<RowNorms> norms;
    std::vector<Tensor> gradients;  // dense ones
  };
  Batch observe(const optim::Optimizer& optimizer, const Passes& passes, int i) const;
  std::vector<std::vector<ShareOption>> options_of(const std::vector<Batch>& batches) const;
  /// Mean of |g' - g|^2 over draws of the rows of all batches, at the shares as they are.
  double measure(const optim::Optimizer& optimizer, const Passes& passes,
                 const std::vector<Batch>& batches) const;
  void set_shares(const std::vector<std::vector<ShareOption>>& options, const std::vector<size_t>& chosen);

  models::Bert& model_;
  const SliceSettings settings_;
  const Rng& rows_;
  std::vector<Group> groups_;
  bool gpu_;
};

}  // namespace tessera::train
