#include "autograd/checkpoint.h"

#include <utility>

#include "autograd/gradient_internal.h"
#include "runtime/rng.h"

namespace tessera {

/// A tape that keeps no entries, but collects the leaves that the function uses: they become inputs of the
/// checkpoint's single entry.
class LeafCollector {
 public:
  LeafCollector() { tape_.collects_only_ = true; }
  Tensor stand_in(const Tensor& input) const {
    return requires_grad(input) ? stand_in(tape_, input, input.grad_state()->grad_dtype) : input.detach();
  }
  /// Replaces an input of the checkpointed function by an alias that is a result of that tape, whose gradient
  /// has that dtype: a leaf's gradient would have to be copied, a result's is moved.
  static Tensor stand_in(const Tape& tape, const Tensor& input, DType grad_dtype) {
    Tensor inside = input.detach();
    inside.set_grad_state(gradients::new_state(input, grad_dtype, tape.id_), true);
    return inside;
  }
  /// Appends the leaves that were used, and their values at their first use.
  void leaves(std::vector<Tensor>& tensors, std::vector<Saved>& values) const {
    for (const Tape::Leaf& leaf : tape_.leaves_) tensors.push_back(leaf.tensor), values.push_back(leaf.value);
  }
  /// Backward starts at the results of the recomputation: rejects outputs that were not computed inside.
  void check_outputs(const std::vector<Tensor>& outputs) const {
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto& state = outputs[i].grad_state();
      check(!state || state->tape != 0, "checkpoint: output ", i, " of the function is ",
            describe(outputs[i]), ", a parameter as it is; use it outside of the checkpointed function");
      check(!state || state->tape == tape_.id_, "checkpoint: output ", i, " of the function is ",
            describe(outputs[i]),
            ", which belongs to another tape; pass it as an input of the checkpointed function, or detach() "
            "it");
    }
  }

 private:
  Tape tape_;
};

namespace {

constexpr const char* kSameEachTime = "; a checkpointed function must do the same each time";

/// Of the state that layers read, in the two runs of a checkpointed function.
using StateReplay = Replay<Tensor>;

/// Calls f for the call that is running, or, where the user called checkpoint(), as code of the user: the
/// lines that errors name are those in f, and clone() of a result is refused there as elsewhere.
std::vector<Tensor> call(const CheckpointFunction& f, const std::vector<Tensor>& inputs, bool by_user) {
  const CallScope scope(CallSite{by_user ? Site() : CallScope::current().site, CallScope::current().module});
  return f(inputs);
}

}  // namespace

bool recomputing() {
  return StateReplay::replaying() != nullptr;
}

Tensor state_of_first_run(const Tensor& state) {
  return StateReplay::next(
      "checkpoint: the recomputation reads more state of layers than the forward pass did; a checkpointed "
      "function must do the same each time",
      [&] { return StateReplay::depth() > 0 && state.defined() ? state.detach().clone() : state; });
}

int checkpoint_depth() {
  return StateReplay::depth();
}

std::vector<Tensor> checkpoint(CheckpointFunction f, const std::vector<Tensor>& inputs, Site site) {
  const bool by_user = !CallScope::current().site.file;
  const CallScope scope(site);
  if (!Tape::innermost()) return call(f, inputs, by_user);
  std::vector<RandomStream> streams;
  std::vector<Tensor> states;  // state of layers, such as counts
  std::vector<Tensor> outputs;
  std::vector<Tensor> leaves;
  std::vector<Saved> leaf_values;
  {
    LeafCollector collector;
    const RandomReplay record(RandomReplay::Mode::record, streams);
    const StateReplay record_states(StateReplay::Mode::record, states);
    std::vector<Tensor> inside;
    for (const Tensor& input : inputs) inside.push_back(collector.stand_in(input));
    outputs = call(f, inside, by_user);
    collector.check_outputs(outputs);
    collector.leaves(leaves, leaf_values);
  }
  std::vector<bool> on_tape;
  for (Tensor& output : outputs) {
    on_tape.push_back(requires_grad(output));
    output = output.detach();
  }
  std::vector<const Tensor*> entry_inputs;
  for (const Tensor& input : inputs) entry_inputs.push_back(&input);
  for (const Tensor& leaf : leaves) entry_inputs.push_back(&leaf);
  std::vector<Tensor*> entry_outputs;
  for (size_t i = 0; i < outputs.size(); ++i)
    if (on_tape[i]) entry_outputs.push_back(&outputs[i]);
  if (entry_outputs.empty()) return outputs;

  std::vector<Saved> saved;
  for (const Tensor& input : inputs) saved.emplace_back(input);
  Tape::innermost()->record(
      "checkpoint", entry_inputs, entry_outputs,
      [f = std::move(f), saved = std::move(saved), leaf_values = std::move(leaf_values),
       streams = std::move(streams), states = std::move(states), on_tape, by_user,
       options = Tape::innermost()->options()](Backward& b) mutable {
        for (const Saved& leaf : leaf_values) leaf.get();  // throws if it was written since
        Tape tape(options);
        std::vector<Tensor> again;
        for (size_t i = 0; i < saved.size(); ++i) {
          const Tensor& input = saved[i].get();
          again.push_back(b.needs(int(i)) ? LeafCollector::stand_in(tape, input, b.grad_dtype(int(i)))
                                          : input.detach());
        }
        std::vector<Tensor> results, grads;
        {
          const RandomReplay replay(RandomReplay::Mode::replay, streams);
          const StateReplay replay_states(StateReplay::Mode::replay, states);
          std::vector<Tensor> outputs = call(f, again, by_user);
          check(replay.used() == streams.size(), "checkpoint: the function drew ", streams.size(),
                " random streams (a dropout is one) and, run again for the backward pass, ", replay.used(),
                kSameEachTime);
          check(outputs.size() == on_tape.size(), "checkpoint: the function had ", on_tape.size(),
                " results and, run again for the backward pass, has ", outputs.size(), kSameEachTime);
          for (size_t i = 0, n = 0; i < outputs.size(); ++i) {
            if (!on_tape[i]) continue;
            if (b.has_grad(int(n))) {
              results.push_back(outputs[i]);
              grads.push_back(b.grad(int(n)));
              check(outputs[i].defined() && outputs[i].shape() == grads.back().shape(), "checkpoint: output ",
                    i, " of the function had the shape ", grads.back().shape(),
                    " and, run again for the backward pass, is ", describe(outputs[i]), kSameEachTime);
            }
            ++n;
          }
        }
        tape.backward(results, grads);
        for (size_t i = 0; i < again.size(); ++i)
          if (b.needs(int(i))) b.pass(again[i], int(i));
      });
  return outputs;
}

Tensor checkpoint(std::function<Tensor(const Tensor&)> f, const Tensor& input, Site site) {
  return checkpoint(
      [f = std::move(f)](const std::vector<Tensor>& inputs) { return std::vector{f(inputs[0])}; },
      std::vector{input}, site)[0];
}

std::vector<Tensor> gradients::leaves_used(const std::function<void()>& f) {
  const LeafCollector collector;
  f();
  std::vector<Tensor> leaves;
  std::vector<Saved> values;
  collector.leaves(leaves, values);
  return leaves;
}

}  // namespace tessera
