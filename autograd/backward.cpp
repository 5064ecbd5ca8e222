#include "autograd/backward.h"

#include <algorithm>

#include "autograd/pass_internal.h"

namespace tessera {

using namespace gradients;

void Saved::fail() const {
  fail_at(Site::here(), "backward of ", RunningEntry::name(), ": the tensor ", describe(tensor_),
          " that it saved was written in place after the forward pass (version ", tensor_.version(),
          ", saved at ", version_, "); write to a copy, or after backward()");
}

void Backward::fail_number(const char* what, int number, size_t count) {
  fail_at(Site::here(), "backward of ", RunningEntry::name(), ": there is no ", what, " ", number,
          "; the operator was recorded with ", count, " of them");
}

void Backward::check_gradient(int input, const Tensor& gradient) const {
  const GradState& state = *input_at(input);
  if (gradient.defined() && gradient.shape() == state.shape && is_floating(gradient.dtype()) &&
      gradient.device() == state.device) [[likely]]
    return;
  fail_at(Site::here(), "backward of ", RunningEntry::name(), ": gradient of input ", input, " is ",
          describe(gradient), ", expected ", state.grad_dtype, state.shape, " on ", state.device.name(),
          "; a gradient has the shape and the device of its input, and any floating dtype");
}

DType Backward::grad_dtype(int input) const {
  return input_at(input)->grad_dtype;
}

Tensor Backward::grad(int output) {
  const GradState& state = *output_at(output);
  check(state.grad.defined(), "backward of ", RunningEntry::name(), ": no gradient of output ", output,
        " has arrived");
  return state.grad;
}

void Backward::accumulate(int input, const Tensor& gradient) {
  if (!needs(input)) return;
  check_gradient(input, gradient);
  add(input_at(input), {gradient});
}

namespace {

/// Whether the gradient of a result is `given` itself, neither a sum nor rounded to another dtype.
bool holds(const GradState& state, const Tensor& given) {
  return state.wants_sums && !state.view && state.grad.defined() && state.grad.same_elements(given);
}

}  // namespace

void Backward::give(std::initializer_list<int> inputs, Tensor&& gradient) {
  distribute({std::move(gradient), true}, inputs);
}

bool Backward::wants_column_sums(int input) const {
  if (!needs(input)) return false;
  const GradState& state = *input_at(input);
  return state.wants_sums && !state.view && !state.grad.defined();
}

void Backward::give_summed(int input, Tensor&& gradient, const Tensor& column_sums) {
  const Tensor given = gradient;
  give(input, std::move(gradient));
  if (!holds(*input_at(input), given)) return;
  GradState& state = *input_at(input);
  state.column_sums = column_sums;
  state.summed_version = state.grad.version();
}

Tensor Backward::column_sums(int output) const {
  const GradState& state = *output_at(output);
  const bool valid =
      state.column_sums.defined() && state.grad.defined() && state.grad.version() == state.summed_version;
  return valid ? state.column_sums : Tensor();
}

bool Backward::would_copy(int first, int second) const {
  const auto &one = input_at(first), &other = input_at(second);
  return one != other && one->tape == 0 && other->tape == 0;
}

void Backward::pass(int output, std::initializer_list<int> inputs) {
  pass(*output_at(output), inputs);
}

void Backward::pass(const Tensor& result, int input) {
  GradState& state = *result.grad_state();
  fill_gaps(state);
  if (state.grad.defined()) pass(state, {input});
}

void Backward::pass(GradState& from, std::initializer_list<int> inputs) {
  Arrival arrival{from.grad, from.given && !from.retain, from.sharers};
  if (!from.retain) from.grad = Tensor(), from.sharers = nullptr;
  distribute(std::move(arrival), inputs);
}

void Backward::distribute(Arrival arrival, std::initializer_list<int> inputs) {
  size_t left = 0;
  for (const int input : inputs) {
    if (!needs(input)) continue;
    check_gradient(input, arrival.gradient);
    left += 1;
  }
  if (arrival.given && left > 1 && !arrival.sharers) arrival.sharers = std::make_shared<char>();
  for (const int input : inputs) {
    if (!needs(input)) continue;
    if (--left > 0) {
      add(input_at(input), arrival);
    } else {
      return add(input_at(input), std::move(arrival));
    }
  }
}

GradTarget Backward::target(int input) {
  GradState& state = *input_at(input);
  Pass::touch(input_at(input));
  if (is_alias(state)) return view_target(input);
  if (!state.grad.defined() || !is_writable(state)) return {};
  if (is_empty(state)) return is_shared(input) ? GradTarget() : GradTarget{state.grad};
  fill_gaps(state);
  return {state.grad, true};
}

bool Backward::is_shared(int input) const {
  const auto& root = root_of(input_at(input));
  for (size_t other = 0; other < inputs_.size(); ++other)
    if (int(other) != input && inputs_[other] && root_of(inputs_[other]) == root) return true;
  return false;
}

GradTarget Backward::view_target(int input) {
  const auto& state = input_at(input);
  const auto& root = root_of(state);
  const std::optional<Range> range = range_of(*state);
  if (range && is_gap(*root, *range)) {
    for (size_t other = 0; other < inputs_.size(); ++other) {
      if (int(other) == input || !inputs_[other] || root_of(inputs_[other]) != root) continue;
      const std::optional<Range> theirs = range_of(*inputs_[other]);
      if (!theirs || range->overlaps(*theirs)) return {};
    }
    if (is_empty(*root)) prepare_for_view(state);
    Tensor part = memory_of(*state);
    return {.grad = part, .part = part.defined()};
  }
  if (is_empty(*root) || !is_writable(*root)) return {};
  Tensor part = memory_of(*state);
  if (!part.defined()) return {};
  if (range) {
    close_gap(*root, *range);
  } else {
    fill_gaps(*root);
  }
  return {.grad = part, .accumulate = true};
}

void Backward::written(int input, const GradTarget& target) {
  const auto& state = input_at(input);
  const auto& root = root_of(state);
  if (!root->grad.defined() || !target.grad.shares_storage(root->grad))
    return give(input, Tensor(target.grad));
  if (target.part) close_gap(*root, *range_of(*state));
  root->stale = false;
  root->arrived = true;
  root->grad.bump_version();
}

bool Backward::may_wait(int input) const {
  const GradState& state = *input_at(input);
  return state.tape == 0 && state.stale && state.pending == 1 && state.hooks.empty() && !checked_;
}

PassEnd& Backward::at_end(const void* key, std::unique_ptr<PassEnd> (*make)()) {
  return Pass::at_end(key, make);
}

}  // namespace tessera
