#include "nn/observe.h"

#include "autograd/checkpoint.h"

namespace tessera::nn {

Observe::Observe(Names names, Observer observer)
    : state_(std::make_shared<State>(State{std::move(names), std::move(observer)})), scope_(current_, this) {
  check(!CaptureSession::current(),
        "nn::Observe: a step is being captured, and replays of the graph would not call the observer; begin "
        "the scope outside the captured body");
  check(!state_->names.empty(), "nn::Observe: there is no linear layer to observe");
}

bool Observe::find(const void* layer) {
  for (const Observe* scope = current_; scope; scope = scope->scope_.outer())
    if (scope->state_->names.contains(layer)) return true;
  return false;
}

Tensor Observe::report_to_all(const void* layer, const Tensor& x, const Tensor& y) {
  Tensor result = y;
  for (const Observe* scope = current_; scope; scope = scope->scope_.outer()) {
    const std::shared_ptr<State> state = scope->state_;  // the observer may end what it likes
    const auto found = state->names.find(layer);
    if (found == state->names.end()) continue;
    if (state->observer.forward && !recomputing()) {
      const Tensor input = x.detach(), output = y.detach();
      const Pause pause;
      state->observer.forward({found->second, input, output});
    }
    if (state->observer.backward && Tape::recording(result))
      result = watch_gradient(state, found->second, x, result);
  }
  return result;
}

Tensor Observe::watch_gradient(const std::shared_ptr<State>& state, const std::string& name, const Tensor& x,
                               const Tensor& y) {
  Tensor seen = y.detach();
  Tape::recording(y)->record("observe", {&y}, {&seen},
                             [state, &name, x = Saved(x), y = Saved(y)](Backward& b) {
                               const Tensor dy = b.grad();
                               if (state->alive) {
                                 const Pause pause;
                                 state->observer.backward({name, x.get(), y.get()}, dy.detach());
                               }
                               b.pass(0, {0});
                             });
  return seen;
}

}  // namespace tessera::nn
