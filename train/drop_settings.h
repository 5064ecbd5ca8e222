#pragma once

#include <functional>
#include <string>
#include <vector>

#include "nn/drop_bp.h"
#include "optim/optimizer.h"
#include "train/setting.h"

namespace tessera::train {

/// Which residual branches a run's backward passes drop (nn/drop_bp.h, docs/sparse_backward.md).
struct DropSettings {
  double share = 0;             // of the branches' FLOPs, at least, in every step; 0: none
  std::string rates = "fixed";  // of all branches alike; or sensitivity: by what dropping each changes

  /// Adds the settings to the group "Training". Default values are not written to run.json.
  void add_to(SettingList& list);
  bool drops() const { return share > 0; }
  bool calibrates() const { return drops() && rates == "sensitivity"; }
  /// Throws, naming the flag, for values that mean nothing or cannot be reached.
  void validate() const;
  /// Throws for flags that have no effect without --dropbp.
  void check_given(const Given& given) const;
  /// "0.5 of the FLOPs, rates by sensitivity after a tenth of the steps"; for a header.
  std::string description() const;
};

/// How much dropping each branch alone changes the gradient: S = sum over the parameters of
/// (|g| - |g without the branch|)^2 (the paper's equation for norms). `backward` runs a forward and a
/// backward pass of one batch, the same work each time; the optimizer's gradients are forgotten before and
/// after each, and nothing is dropped afterwards. One pass more than there are branches.
std::vector<double> drop_sensitivities(nn::DropBP& drops, const optim::Optimizer& optimizer,
                                       const std::function<void()>& backward);

}  // namespace tessera::train
