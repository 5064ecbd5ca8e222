#pragma once

#include "runtime/override.h"
#include "tensor/tensor.h"

namespace tessera::nn {

/// While it lives, feed-forward networks (Mlp) that this thread's tape records also give the mean magnitude
/// of their hidden activations: the L1 penalty that makes activations sparse. Their activation must be relu
/// or relu_squared, their layers dense or Sparse24, and there is no gate: others throw.
///
/// ```cpp
/// const nn::HiddenL1 hidden;
/// Tensor loss = loss_of(model(batch));
/// if (hidden.sum().defined()) loss = ops::add(loss, ops::scale(hidden.sum(), 1e-4));
/// ```
///
/// A network is then one ops::mlp_sparse24, with all its GEMMs dense unless its form says otherwise; the
/// gradient of the penalty is part of that operator's backward pass. Scopes nest; the innermost counts. A
/// network inside a function that is given to checkpoint() cannot add to a scope outside it: that throws.
class HiddenL1 {
 public:
  HiddenL1();

  /// The sum over the networks that were called: f32 (f64 for f64), of rank 0, recorded. Undefined if none
  /// was.
  const Tensor& sum() const { return sum_; }

  /// For layers: whether a recorded network has to give it, and how it does. Throws inside a checkpointed
  /// function if the scope began outside.
  static bool wanted();
  static void add(const Tensor& mean);

 private:
  static inline constinit thread_local HiddenL1* current_ = nullptr;
  Override<HiddenL1*> scope_{current_, this};
  int checkpoint_depth_;  // where the scope began
  Tensor sum_;
};

}  // namespace tessera::nn
