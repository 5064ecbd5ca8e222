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

DType Backward::grad_dtype(int input) const {
  return inputs_[size_t(input)]->grad_dtype;
}

Tensor Backward::grad(int output) {
  const GradState& state = *outputs_[size_t(output)];
  check(state.grad.defined(), "backward of ", RunningEntry::name(), ": no gradient of output ", output,
        " has arrived");
  return state.grad;
}

void Backward::accumulate(int input, const Tensor& gradient) {
  if (needs(input)) add(inputs_[size_t(input)], {gradient});
}

void Backward::give(std::initializer_list<int> inputs, Tensor&& gradient) {
  GradState donor;
  donor.grad = std::move(gradient);
  donor.given = true;
  pass(donor, inputs);
}

void Backward::pass(int output, std::initializer_list<int> inputs) {
  pass(*outputs_[size_t(output)], inputs);
}

void Backward::pass(const Tensor& result, int input) {
  GradState& state = *result.grad_state();
  fill_gaps(state);
  if (state.grad.defined()) pass(state, {input});
}

void Backward::pass(GradState& from, std::initializer_list<int> inputs) {
  Arrival arrival{from.grad, from.given && !from.retain, from.sharers};
  if (!from.retain) from.grad = Tensor(), from.sharers = nullptr;
  const auto wanted = [&](int input) { return needs(input); };
  size_t left = size_t(std::ranges::count_if(inputs, wanted));
  if (arrival.given && left > 1 && !arrival.sharers) arrival.sharers = std::make_shared<char>();
  for (const int input : inputs) {
    if (!needs(input)) continue;
    if (--left > 0) {
      add(inputs_[size_t(input)], arrival);
    } else {
      return add(inputs_[size_t(input)], std::move(arrival));
    }
  }
}

GradTarget Backward::target(int input) {
  GradState& state = *inputs_[size_t(input)];
  Pass::touch(inputs_[size_t(input)]);
  if (is_alias(state)) return view_target(input);
  if (!state.grad.defined() || !is_writable(state)) return {};
  if (is_empty(state)) return is_shared(input) ? GradTarget() : GradTarget{state.grad};
  fill_gaps(state);
  return {state.grad, true};
}

bool Backward::is_shared(int input) const {
  const auto& root = root_of(inputs_[size_t(input)]);
  for (size_t other = 0; other < inputs_.size(); ++other)
    if (int(other) != input && inputs_[other] && root_of(inputs_[other]) == root) return true;
  return false;
}

GradTarget Backward::view_target(int input) {
  const auto& state = inputs_[size_t(input)];
  const auto& root = root_of(state);
  const std::optional<Range> range = range_of(*state);
  if (range && root->grad_dtype == state->grad_dtype && is_gap(*root, *range)) {
    for (size_t other = 0; other < inputs_.size(); ++other) {
      if (int(other) == input || !inputs_[other] || root_of(inputs_[other]) != root) continue;
      const std::optional<Range> theirs = range_of(*inputs_[other]);
      if (!theirs || range->overlaps(*theirs)) return {};
    }
    if (is_empty(*root)) open_for(state);
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
  const auto& state = inputs_[size_t(input)];
  const auto& root = root_of(state);
  if (!root->grad.defined() || !target.grad.shares_storage(root->grad))
    return give(input, Tensor(target.grad));
  if (target.part) close_gap(*root, *range_of(*state));
  root->stale = false;
  root->arrived = true;
  root->grad.bump_version();
}

bool Backward::may_wait(int input) const {
  const GradState& state = *inputs_[size_t(input)];
  return state.tape == 0 && state.stale && state.pending == 1 && state.hooks.empty() && !checked_;
}

PassEnd& Backward::at_end(const void* key, std::unique_ptr<PassEnd> (*make)()) {
  return Pass::at_end(key, make);
}

}  // namespace tessera
