#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  // where the no-decay rule allows it
  double max_grad_norm = 0;    // clips the norm of all gradients; 0: no clipping
  int64_t momentum_reset = 0;  // period of resets of the moments, in steps; 0: never
  std::vector<Group> groups = {};
  std::optional<LossScale> loss_scale = {};  // for f16; the tape needs loss_scale() then
  MissingGrad missing = MissingGrad::zero;   // OptimizerOptions::missing
  DType states = DType::f32;                 // OptimizerOptions::states
  uint64_t rounding_seed = 0;                // OptimizerOptions::rounding_seed
  Sharding sharding = {};                    // OptimizerOptions::sharding
};

/// Adam with decoupled weight decay (Loshchilov, Hutter, arXiv:1711.05101) and bias correction, with the same
/// results as torch.optim.AdamW:
///   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2;   w = w - lr weight_decay w
///   w = w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// Computed in f32 (f64 for f64 parameters). With momentum_reset (arXiv:2505.22922, section 4) m, v and t
/// are reset after every momentum_reset steps. See Optimizer for the rest of a step.
class AdamW : public Optimizer {
 public:
  static constexpr const char* kName = "adamw";
  AdamW(std::vector<nn::NamedParameter> parameters, const AdamWOptions& options = {});
  /// As commands make it (optim/bundled.h).
  static AdamW from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options);
};

/// The rule "adamw" with states m and v, for optimizers of several rules. Throws unless the betas are in
/// [0, 1), and eps and momentum_reset are not negative.
std::shared_ptr<Rule> adamw_rule(double beta1 = 0.9, double beta2 = 0.999, double eps = 1e-8,
                                 int64_t momentum_reset = 0);

}  // namespace tessera::optim
