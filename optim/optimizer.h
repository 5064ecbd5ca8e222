#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nn/module.h"
#include "optim/rules.h"

namespace tessera::optim {

/// Settings of the parameters whose names contain `contains`; the first group that fits decides.
struct Group {
  std::string contains;
  double lr_scale = 1;  // times the learning rate
  std::optional<double> weight_decay =
      {};  // instead of the optimizer's; also where the no-decay rule says none
};

/// The no-decay rule: weight decay is for weights of two and more dimensions. Left out are tensors of rank 0
/// and 1, parameters named "bias", and those of a part whose name contains "norm".
bool decays(const nn::NamedParameter& parameter);

/// What all optimizers share. A step
///   1. takes gradients that did not arrive since zero_grad() as zero (moments still decay, weights still
///   do);
///   2. measures the norm of all gradients in f64, in a fixed order;
///   3. if the norm is not finite, counts a skip and changes nothing else: weights, moments and the step
///      count keep their bits;
///   4. else multiplies gradients by min(1, max_norm / (norm + 1e-6)) if max_norm > 0, and updates all
///      parameters in one launch.
/// Gradients lie in one arena: backward passes add to them until zero_grad(), so that accumulating over k
/// batches needs only the losses scaled by 1/k.
///
/// bf16 and f16 parameters have f32 masters: the update is computed on the master and rounded once to the
/// parameter. Gradients are f32 then (nn::make_parameter). Whoever writes weights by other means calls
/// sync_masters() afterwards.
///
/// Everything a step changes lives on the parameters' device: a step may be captured into a graph, and
/// set_lr() reaches the replays. Reading steps(), skipped() or grad_norm() waits for the device.
class Optimizer {
 public:
  Optimizer(Optimizer&&) = default;
  Optimizer& operator=(Optimizer&&) = default;

  /// Forgets all gradients; the next backward pass overwrites them.
  void zero_grad() const;
  void set_lr(double lr);
  double lr() const;
  /// Steps done, skipped ones not counted.
  int64_t steps() const;
  int64_t skipped() const;
  /// Of the last step, before clipping; NaN or infinity if that step was skipped.
  double grad_norm() const;
  /// The same on the device: f64, rank 0, the same memory after every step.
  Tensor grad_norm_tensor() const;
  /// The arena of all gradients, [elements with pads]; pads are zero.
  const Tensor& gradients() const;
  const std::vector<nn::NamedParameter>& parameters() const;
  /// The arena of the f32 masters, laid out by Packing; empty if no parameter is bf16 or f16.
  const Tensor& masters() const;
  /// Takes the weights as they are now as masters.
  void sync_masters() const;
  /// Bytes of the arenas.
  size_t bytes() const;

  /// Learning rate, counts, moments and masters, by the names of the parameters. Gradients are not state:
  /// save between a step and the next backward pass.
  void fields(auto&& visit) {
    State& state = *state_;
    visit("lr", state.lr);
    visit("counts", state.counts);
    for (NamedState& part : state.parts) visit(part.name, part.tensor);
  }

 protected:
  /// `states`: names of the rule's states.
  Optimizer(const char* name, std::vector<nn::NamedParameter> parameters, std::vector<const char*> states,
            double lr, double weight_decay, const std::vector<Group>& groups);
  void step(const Rule& rule, const PrepareOptions& prepare);

 private:
  struct NamedState {
    std::string name;
    Tensor tensor;  // a part of an arena
  };
  struct Buffers;
  struct State {
    double lr = 0;
    std::optional<double> uploaded_lr;
    Tensor status;  // f64 [kStatusSlots]
    Tensor counts;  // i64 [kCountSlots]
    std::vector<NamedState> parts;
    std::shared_ptr<Buffers> buffers;
    void upload_lr();
  };
  std::shared_ptr<State> state_;  // graphs that captured a step share it
};

}  // namespace tessera::optim
