#include "autograd/tape.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <set>

#include "autograd/checkpoint.h"
#include "autograd/on_record.h"
#include "autograd/pass_internal.h"
#include "runtime/profile.h"
#include "tensor/finite.h"

namespace tessera {

using namespace gradients;

namespace {

std::atomic<uint64_t> g_next_tape{1};

void check_finite(const Tensor& x, const char* kind, const char* name, const char* part, size_t index) {
  const NonFinite bad = find_nonfinite(x);
  check(!bad, "non-finite ", kind, name, " made ", bad.nan, " NaN and ", bad.inf, " infinite of ", x.count(),
        " elements of ", part, " ", index, " ", describe(x), ", the first at ", bad.first);
}

}  // namespace

// Not inline: GCC 12 would say that the address of the scope outlives it.
NoTape::NoTape() = default;

Tape::Tape(TapeOptions options) : outer_(innermost()), options_(options), id_(g_next_tape++) {
  if (outer_) options_.check_finite |= outer_->options_.check_finite;
  const Tensor& scale = options_.loss_scale;
  check(!scale.defined() || (scale.dtype() == DType::f32 && scale.rank() == 0), "tape: the loss scale is ",
        describe(scale), "; expected f32 of rank 0, as Optimizer::loss_scale() returns");
  TapeOfThread::innermost = this;
}

Tape::~Tape() {
  // A destructor cannot report it in another way: what is thrown here ends the process with this message.
  check(home_ == &TapeOfThread::innermost,
        "tape: a tape is destroyed on another thread than the one that made it, which would go on recording "
        "to it; destroy it where it was made");
  while (!entries_.empty()) {
    Entry entry = std::move(entries_.back());
    entries_.pop_back();
    pop(entry, false);
  }
  // Tapes need not end in reverse order (a new tape may replace one that still exists), and a NoTape that
  // lives keeps those from before it.
  bool left = leave(TapeOfThread::innermost);
  for (NoTape* off = NoTape::current_; off && !left; off = off->scope_.outer())
    left = leave(off->tape_.outer());
}

/// Takes the tape out of a thread's list of tapes if it is there.
bool Tape::leave(Tape*& innermost) {
  for (Tape** tape = &innermost; *tape; tape = &(*tape)->outer_)
    if (*tape == this) {
      *tape = outer_;
      return true;
    }
  return false;
}

Tape* Tape::recording_any(std::span<const Tensor> inputs) {
  return innermost() && std::ranges::any_of(inputs, requires_grad) ? innermost() : nullptr;
}

void Tape::append(const char* name, std::span<const Tensor* const> inputs, std::span<Tensor* const> outputs,
                  std::unique_ptr<Function> function) {
  check(!spent_, name,
        ": this tape has run backward already; make a new Tape for the next step, or a NoTape around what "
        "needs no gradient, such as an evaluation");
  for (size_t i = 0; i < outputs.size(); ++i) {
    check(outputs[i]->defined(), name, ": output ", i, " is undefined; record it when it has its values");
    const auto input = std::ranges::find(inputs, outputs[i]);
    check(input == inputs.end(), name, ": output ", i, " is input ", input - inputs.begin(), ", ",
          describe(*outputs[i]),
          ", whose gradient would be lost; record another handle, such as its detach()");
    if (options_.check_finite) check_finite(outputs[i]->detach(), "result: ", name, "output", i);
  }
  // Integers, such as indices, have no gradient: their state only keeps the numbers of the outputs.
  for (Tensor* output : outputs)
    output->set_grad_state(is_floating(output->dtype()) ? new_state(*output, output->dtype(), id_) : nullptr,
                           is_floating(output->dtype()));
  const auto is_of_outer = [&](const GradState& state) {
    const Tape* tape = outer_;
    while (tape && tape->id_ != state.tape) tape = tape->outer_;
    return tape != nullptr;
  };
  for (const Tensor* input : inputs) {
    const auto& state = input->grad_state();
    if (!state) continue;
    check(state->tape == 0 || state->tape == id_, name, ": input ", describe(*input),
          " belongs to another tape",
          recomputing() || (collects_only_ && is_of_outer(*state))
              ? "; pass it as an input of the checkpointed function, or detach() it"
              : ", such as that of an earlier step, through which this one does not differentiate; detach() "
                "it");
    const auto is_same = [&](const Leaf& leaf) { return leaf.tensor.grad_state() == state; };
    if (state->tape == 0 && collects_only_ && std::ranges::none_of(leaves_, is_same))
      leaves_.push_back({*input, Saved(*input)});
  }
  if (collects_only_) return;
  for (const Tensor* input : inputs) states_.push_back(input->grad_state());
  for (Tensor* output : outputs)
    states_.push_back(output->grad_state() ? output->grad_state() : new_state(*output, output->dtype(), id_));
  entries_.push_back({.name = name,
                      .call = CallScope::current(),
                      .inputs = uint32_t(inputs.size()),
                      .outputs = uint32_t(outputs.size()),
                      .math = f32_math(),
                      .function = std::move(function)});
  OnRecord::notify(name, entries_.size() - 1);
}

void Tape::record_views(const char* name, const Tensor& x, std::span<Tensor> outputs,
                        std::span<const View> views) {
  std::vector<Tensor*> results;
  for (Tensor& output : outputs) results.push_back(&output);
  const Tensor* const input = &x;
  record(name, std::span(&input, 1), results, [](Backward& b) {
    for (const auto& view : b.outputs_)
      if (view->grad.defined()) add_retained_to_base(view);
  });
  if (collects_only_) return;
  for (size_t i = 0; i < outputs.size(); ++i) {
    GradState& state = *outputs[i].grad_state();
    state.view = std::make_unique<ViewOf>(ViewOf{x.grad_state(), views[i], x.layout(), x.device()});
    // What arrives for a view goes to its base, whose gradient may be wider than its values.
    state.grad_dtype = x.grad_state()->grad_dtype;
  }
}

void Tape::pop(Entry& entry, bool run_hooks) {
  entry.function = nullptr;
  const size_t first = states_.size() - entry.inputs - entry.outputs;
  std::vector<std::shared_ptr<GradState>> complete;  // leaves whose hooks are due
  for (size_t i = first; i < first + entry.inputs; ++i) {
    const auto& state = states_[i];
    if (!counted_ || !state || state->tape != 0) continue;
    if (--state->pending == 0 && std::exchange(state->arrived, false) && run_hooks && !state->hooks.empty())
      complete.push_back(state);
  }
  for (size_t i = first + entry.inputs; i < states_.size(); ++i) {
    GradState& state = *states_[i];
    state.view = nullptr, state.gaps = nullptr;
    if (!state.retain) state.grad = Tensor(), state.sharers = nullptr, state.column_sums = Tensor();
  }
  states_.resize(first);
  for (const auto& leaf : complete) {  // last: a hook may throw
    fill_gaps(*leaf);
    for (const auto& hook : leaf->hooks) hook(leaf->grad);
  }
}

std::vector<Tape::UsedLeaf> Tape::used_leaves() const {
  std::vector<UsedLeaf> leaves;
  std::set<const GradState*> known;
  size_t at = 0;
  for (const Entry& entry : entries_) {
    for (const auto& state : std::span(states_).subspan(at, entry.inputs))
      if (state && state->tape == 0 && known.insert(state.get()).second)
        leaves.push_back({state, entry.name, entry.call});
    at += entry.inputs + entry.outputs;
  }
  return leaves;
}

/// A pass knows by these counts when a leaf's last gradient has arrived. A tape that runs no pass is not
/// counted: one that waits, or whose pass has failed, holds up no hook.
void Tape::count_pending(int by) {
  for (const auto& state : states_)
    if (state && state->tape == 0) state->pending += by;
  counted_ = by > 0;
}

Tensor Tape::initial_gradient(DType dtype, Device device) const {
  const Tensor& scale = options_.loss_scale;
  if (!scale.defined()) return {};
  check(scale.device() == device, "tape: the loss scale is on ", scale.device().name(), ", but the loss on ",
        device.name(), "; use one device for the model and its optimizer");
  return scale.to(dtype);
}

void Tape::backward(const Tensor& loss, Site site) {
  const CallScope call(site);
  check(loss.defined() && loss.count() == 1, "backward: the loss ", describe(loss),
        " must have one element; reduce it with ops::mean or ops::sum, or pass gradients");
  const Tensor scale = initial_gradient(loss.dtype(), loss.device());
  const Tensor first = scale.defined() ? scale.reshape(loss.shape())
                                       : Tensor::full(loss.shape(), 1.0, loss.dtype(), loss.device());
  backward(std::span(&loss, 1), std::span(&first, 1));
}

void Tape::backward(std::span<const Tensor> results, std::span<const Tensor> grads, Site site) {
  const CallScope call(site);
  check(!spent_,
        "backward: this tape has run backward already; what it saved is gone. Make a new Tape for the next "
        "step");
  check(innermost() == this, "backward: only the innermost tape of the thread can run backward");
  check(results.size() == grads.size(), "backward: ", results.size(), " results and ", grads.size(),
        " gradients");
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& state = results[i].grad_state();
    check(state != nullptr && state->tape == id_, "backward: ", describe(results[i]),
          state && state->tape == 0 ? " is a parameter, not a result of this tape"
          : state
              ? " is a result of another tape, which was there when it was computed; make one Tape per "
                "step, before the forward pass, and run its backward()"
              : " is not a result of this tape. It was computed before the Tape was made, or within a "
                "NoTape: make the Tape first, then run the forward pass. Or it went through a copy "
                "(detach, copy_from, Tensor::from): use operators instead. Or no input of its computation "
                "requires a gradient: make parameters with nn::make_parameter or require_grad");
    check(grads[i].defined() && is_floating(grads[i].dtype()) && grads[i].shape() == results[i].shape() &&
              grads[i].device() == results[i].device(),
          "backward: gradient ", describe(grads[i]), " for a result ", describe(results[i]),
          "; expected a floating tensor of its shape on its device");
  }
  spent_ = true;
  if (options_.loss_scale.defined()) note_scaled_pass(options_.loss_scale);
  run(results, grads);
}

void Tape::run(std::span<const Tensor> results, std::span<const Tensor> grads) {
  const NoTape off;
  const ProfileRange range("backward");
  Pass pass;
  count_pending(1);
  try {
    for (size_t i = 0; i < results.size(); ++i) add(results[i].grad_state(), {grads[i].detach()});
    run_entries();
    pass.finish();
  } catch (...) {
    count_pending(-1);
    pass.restore();
    throw;
  }
}

void Tape::run_entries() {
  const bool check_gradients =
      options_.check_finite && !(options_.loss_scale.defined() && options_.loss_scale.item() > 1);
  while (!entries_.empty()) {
    Entry entry = std::move(entries_.back());
    entries_.pop_back();
    try {
      run_entry(entry, check_gradients);
    } catch (...) {
      pop(entry, false);
      throw;
    }
    pop(entry, true);
    if (entry_hook_) entry_hook_(entry.name, entries_.size());
  }
}

void Tape::run_entry(Entry& entry, bool check_gradients) {
  Backward view;
  view.inputs_ = std::span(states_).last(entry.inputs + entry.outputs).first(entry.inputs);
  view.outputs_ = std::span(states_).last(entry.outputs);
  view.checked_ = check_gradients;
  for (const auto& output : view.outputs_) fill_gaps(*output);
  const auto has_gradient = [](const auto& output) { return output->grad.defined(); };
  if (std::ranges::none_of(view.outputs_, has_gradient)) return;
  const CallScope call(entry.call);
  const RunningEntry running(entry.name);
  const F32MathScope math(entry.math);
  entry.function->run(view);
  if (!check_gradients) return;
  for (size_t i = 0; i < view.inputs_.size(); ++i) {
    if (!view.inputs_[i]) continue;
    const GradState& root = *root_of(view.inputs_[i]);
    if (root.gaps || is_empty(root)) continue;  // not written, or only in part
    const Tensor gradient = memory_of(*view.inputs_[i]);
    if (gradient.defined()) check_finite(gradient, "gradient: backward of ", entry.name, "d_input", i);
  }
}

}  // namespace tessera
