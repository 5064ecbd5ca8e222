#pragma once

#include <functional>
#include <type_traits>

#include "optim/optimizer.h"

namespace tessera::train {

/// An optimizer as the training step drives it: any type with step() and zero_grad(), and set_lr(double) if a
/// schedule is to reach it. One that is an optim::Optimizer also scales the loss in f16, skips steps whose
/// gradient norm is not finite, and has its norm logged. Refers to the optimizer, which must outlive it.
class OptimizerRef {
 public:
  template <class O>
  explicit OptimizerRef(O& optimizer)
      : step_([&optimizer] { optimizer.step(); }), zero_grad_([&optimizer] { optimizer.zero_grad(); }) {
    if constexpr (requires { optimizer.set_lr(1e-3); })
      set_lr_ = [&optimizer](double lr) { optimizer.set_lr(lr); };
    if constexpr (std::is_base_of_v<optim::Optimizer, O>) counted_ = &optimizer;
  }

  void step() const { step_(); }
  void zero_grad() const { zero_grad_(); }
  /// Throws if the optimizer has no set_lr(double).
  void set_lr(double lr) const {
    check(set_lr_ != nullptr,
          "train: the schedule cannot reach this optimizer, which has no set_lr(double); "
          "give it one, or leave out the schedule");
    set_lr_(lr);
  }
  /// Makes the gradients zeros that backward passes add to, where the optimizer has them in one arena; else
  /// zero_grad(). Unlike after zero_grad(), the first micro-batch of a step adds as the others do, and one
  /// captured graph serves them all.
  void clear_gradients() const {
    if (counted_)
      counted_->gradients().fill(0);
    else
      zero_grad();
  }
  /// Whether the next step cannot be captured (optim::Optimizer::waits_for_host).
  bool waits_for_host() const { return counted_ && counted_->waits_for_host(); }
  /// The optimizer with its norm, its counts of skipped steps and its loss scale; null for a foreign one.
  optim::Optimizer* counted() const { return counted_; }
  /// For TapeOptions::loss_scale; undefined without loss scaling.
  Tensor loss_scale() const { return counted_ ? counted_->loss_scale() : Tensor(); }

 private:
  std::function<void()> step_, zero_grad_;
  std::function<void(double)> set_lr_;
  optim::Optimizer* counted_ = nullptr;
};

}  // namespace tessera::train
