#include "autograd/checkpoint.h"

#include <utility>

#include "runtime/rng.h"

namespace tessera {

/// A tape that keeps no entries, only the leaves that were used: they are inputs of the checkpoint's one
/// entry.
class LeafCollector {
 public:
  LeafCollector() { tape_.collects_only_ = true; }
  Tensor stand_in(const Tensor& input) const { return stand_in(tape_, input, requires_grad(input)); }
  /// A stand-in for an input of the checkpointed function: a result of that tape if a gradient is wanted, so
  /// that the gradient that arrives need not be copied, as a leaf's must be.
  static Tensor stand_in(const Tape& tape, const Tensor& input, bool wanted) {
    Tensor inside = input.detach();
    if (!wanted) return inside;
    auto state = std::make_shared<GradState>();
    state->tape = tape.id_;
    state->grad_dtype = input.dtype();
    inside.set_grad_state(std::move(state), true);
    return inside;
  }
  const std::vector<std::shared_ptr<GradState>>& leaves() const { return tape_.states_; }

 private:
  Tape tape_;
};

namespace {

thread_local bool t_recomputing = false;

struct Recomputing {
  Recomputing() : outer(std::exchange(t_recomputing, true)) {}
  ~Recomputing() { t_recomputing = outer; }
  Recomputing(const Recomputing&) = delete;
  bool outer;
};

}  // namespace

bool recomputing() {
  return t_recomputing;
}

std::vector<Tensor> checkpoint(CheckpointFunction f, const std::vector<Tensor>& inputs, Site site) {
  const CallScope call(site);
  if (!Tape::innermost()) return f(inputs);
  std::vector<RandomStream> streams;
  std::vector<Tensor> outputs;
  std::vector<Tensor> leaves;  // empty tensors that carry the leaves' states
  {
    LeafCollector collector;
    const RandomReplay record(RandomReplay::Mode::record, streams);
    std::vector<Tensor> inside;
    for (const Tensor& input : inputs) inside.push_back(collector.stand_in(input));
    outputs = f(inside);
    for (const auto& state : collector.leaves()) {
      Tensor carrier;
      carrier.set_grad_state(state);
      leaves.push_back(std::move(carrier));
    }
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
      [f = std::move(f), saved = std::move(saved), streams = std::move(streams), on_tape,
       scale = Tape::innermost()->loss_scale()](Backward& b) mutable {
        Tape tape({.loss_scale = scale});
        std::vector<Tensor> again;
        for (size_t i = 0; i < saved.size(); ++i)
          again.push_back(LeafCollector::stand_in(tape, saved[i].get(), b.needs(int(i))));
        std::vector<Tensor> results, grads;
        {
          const RandomReplay replay(RandomReplay::Mode::replay, streams);
          const Recomputing second_run;
          std::vector<Tensor> outputs = f(again);
          for (size_t i = 0, n = 0; i < outputs.size(); ++i) {
            if (!on_tape[i]) continue;
            if (b.has_grad(int(n))) {
              results.push_back(outputs[i]);
              grads.push_back(b.grad(int(n)));
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

}  // namespace tessera
