#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

struct SgdOptions {
  double lr = 1e-2;
  double momentum = 0;
  bool nesterov = false;     // needs a momentum
  double weight_decay = 0;   // added to the gradient, where the no-decay rule allows it
  double max_grad_norm = 0;  // clips the norm of all gradients; 0: no clipping
  std::vector<Group> groups = {};
  std::optional<LossScale> loss_scale = {};  // for f16; the tape needs loss_scale() then
  MissingGrad missing = MissingGrad::zero;   // OptimizerOptions::missing
  DType states = DType::f32;                 // OptimizerOptions::states
  uint64_t rounding_seed = 0;                // OptimizerOptions::rounding_seed
  Sharding sharding = {};                    // OptimizerOptions::sharding
};

/// Stochastic gradient descent with the same results as torch.optim.SGD (without dampening); the formulas are
/// those of SgdRule and MomentumRule. Without momentum it has no state but the masters.
class Sgd : public Optimizer {
 public:
  static constexpr const char* kName = "sgd";
  Sgd(std::vector<nn::NamedParameter> parameters, const SgdOptions& options = {});
  /// As commands make it (optim/bundled.h).
  static Sgd from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options);
};

/// The rule "sgd", with the state v if there is momentum, for optimizers of several rules. Throws unless
/// momentum is in [0, 1), and for Nesterov's form without momentum.
std::shared_ptr<Rule> sgd_rule(double momentum = 0, bool nesterov = false);

}  // namespace tessera::optim
