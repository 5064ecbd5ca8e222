#pragma once

#include <functional>
#include <map>
#include <string>

#include "nn/form.h"
#include "runtime/capture.h"
#include "runtime/override.h"

namespace tessera::nn {

/// One call of a linear layer, as its observers see it. Tensors are off the tape; on a GPU the work that
/// makes them may still be running, and later operators may overwrite them: copy what you keep.
struct LinearCall {
  const std::string& name;  // of the layer in fields(): "blocks.3.mlp.up"
  const Tensor& input;      // what its weight is multiplied with
  const Tensor& output;     // its result, bias and residual included
};

/// The callbacks of an observer. Either may be empty. Operators that they call are not recorded, and
/// layers that they call are not observed. An exception ends the pass, as that of an operator does.
struct Observer {
  std::function<void(const LinearCall&)> forward = {};
  /// In the backward pass, once the output's gradient is complete: in the output's dtype, multiplied by the
  /// loss scale if there is one. Not called where no gradient arrives.
  std::function<void(const LinearCall&, const Tensor& output_gradient)> backward = {};
};

/// While it lives, the observer sees every call that this thread makes of a linear layer of `model` (a whole
/// model or a part of one, such as a block), by its name in fields():
///
/// ```cpp
/// std::map<std::string, Tensor> sums;  // X^T X of every layer's input
/// const nn::Observe scope(model, {.forward = [&](const nn::LinearCall& call) {
///                           const Tensor x = call.input.reshape_with({-1, call.input.size(-1)});
///                           const Tensor sum = ops::matmul(x, x, true);
///                           Tensor& all = sums[call.name];
///                           all = all.defined() ? ops::add(all, sum) : sum;
///                         }});
/// ```
///
/// Scopes nest; each sees its own layers. The model must not be moved, and layers must not be added, while
/// one lives. Without a scope a layer reads one pointer.
///
/// - Fused operators: an observed layer of an Mlp, GroupedMlp or LmHead is called by itself, so that its
///   input and output exist (for an LM head all logits at once). The results are those of the separate
///   operators, which on a GPU may differ from the fused one's by rounding. DecoderLayers are not used.
/// - Checkpointed parts: `forward` sees the first run; the second, in the backward pass, only serves
///   `backward`, whose call has the recomputed tensors.
/// - Captured steps: replays do not run host code, so while a scope lives Captured runs its body eagerly
///   (EagerScope). A scope cannot begin inside a body that is being captured: that throws. In a graph that
///   another program captures, the observer is called once, and the device work that it issues is captured.
/// - Gradients that arrive after the scope's end are not seen.
/// - Memory: with `backward`, inputs and outputs of the observed layers are kept until it has seen them. It
///   throws if one was written in place before.
class Observe {
 public:
  template <class Model>
  Observe(const Model& model, Observer observer, std::string prefix = "")
      : Observe(names_of(model, std::move(prefix)), std::move(observer)) {}
  ~Observe() { state_->alive = false; }

  /// Whether a scope on this thread observes that layer.
  static bool sees(const void* layer) { return current_ != nullptr && find(layer); }
  /// For linear layers: tells the observers that `layer` made y of x. Returns y, which a layer must return in
  /// its place: the gradient that arrives at it is observed.
  static Tensor report(const void* layer, const Tensor& x, Tensor y) {
    if (current_ == nullptr) [[likely]]
      return y;
    return report_to_all(layer, x, y);
  }

 private:
  using Names = std::map<const void*, std::string>;
  struct State {
    Names names;
    Observer observer;
    bool alive = true;
  };
  /// While an observer runs: no scope sees what it calls, and no tape records it.
  struct Pause {
    NoTape no_tape;
    Override<Observe*> scope{current_, nullptr};
  };

  template <class Model>
  static Names names_of(const Model& model, std::string prefix) {
    Names names;
    for_each_linear(
        model, [&](const std::string& name, const auto& layer) { names.emplace(&layer, name); },
        std::move(prefix));
    return names;
  }
  Observe(Names names, Observer observer);
  static bool find(const void* layer);
  static Tensor report_to_all(const void* layer, const Tensor& x, const Tensor& y);
  static Tensor watch_gradient(const std::shared_ptr<State>& state, const std::string& name, const Tensor& x,
                               const Tensor& y);

  static inline constinit thread_local Observe* current_ = nullptr;
  std::shared_ptr<State> state_;  // shared with the entries of tapes, which may outlive the scope
  EagerScope eager_;
  Override<Observe*> scope_;
};

/// Whether these linear layers must be called one after the other, because one of them is not dense or is
/// observed: layers that have one operator for several of them ask this first.
template <LinearLayer... Layers>
bool run_separately(const Layers&... layers) {
  (note_form(layers.form), ...);
  return ((!is_dense(layers.form) || Observe::sees(&layers)) || ...);
}

}  // namespace tessera::nn
