#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

/// Whether these options have those that only optimizers of elementwise rules take.
template <class O>
concept ElementwiseOptions = requires(O o) {
  o.sharding = Sharding();
};

/// Copies the options that both have of those that optimizers share: of BundledOptions to those of a bundled
/// optimizer, and of these to OptimizerOptions. Each of the structs repeats them, because {.lr = 1e-3} cannot
/// be written for one with a base.
template <class To, class From>
void copy_shared_options(To& to, const From& from) {
  to.lr = from.lr, to.weight_decay = from.weight_decay, to.max_grad_norm = from.max_grad_norm;
  to.groups = from.groups, to.loss_scale = from.loss_scale;
  if constexpr (ElementwiseOptions<To> && ElementwiseOptions<From>)
    to.missing = from.missing, to.states = from.states, to.rounding_seed = from.rounding_seed,
    to.sharding = from.sharding;
  if constexpr (requires { to.beta1 = from.beta1; }) to.beta1 = from.beta1, to.beta2 = from.beta2;
  if constexpr (requires { to.momentum = from.momentum; }) to.momentum = from.momentum;
  if constexpr (requires { to.momentum_reset = from.momentum_reset; })
    to.momentum_reset = from.momentum_reset;
}

/// The options of a bundled optimizer that Optimizer reads.
template <class From>
OptimizerOptions shared_options(const From& from) {
  OptimizerOptions shared;
  copy_shared_options(shared, from);
  return shared;
}

}  // namespace tessera::optim
