#include "autograd/gradient.h"

#include <algorithm>
#include <numeric>

#include "autograd/gradient_internal.h"
#include "autograd/pass_internal.h"
#include "tensor/kernels.h"

namespace tessera {
namespace {

GradState& state_of(const Tensor& tensor, const char* what) {
  check(tensor.grad_state() != nullptr, what, ": ", describe(tensor),
        " does not require a gradient; call require_grad first");
  return *tensor.grad_state();
}

/// Allocates with the dimensions in the memory order of `layout`, so that whatever is a view of the tensor is
/// also a view of its gradient.
Tensor empty_as(const Layout& layout, DType dtype, Device device) {
  if (layout.is_packed()) return Tensor::empty_packed(layout.shape, dtype, device);
  std::array<int, kMaxRank> order{};
  const int rank = layout.rank();
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.begin() + rank,
                   [&](int a, int b) { return layout.strides[size_t(a)] > layout.strides[size_t(b)]; });
  std::array<int64_t, kMaxRank> sizes{};
  for (int at = 0; at < rank; ++at) sizes[size_t(at)] = layout.shape[order[size_t(at)]];
  const Tensor made = Tensor::empty(Shape(std::span(sizes).first(size_t(rank))), dtype, device);
  Layout like = made.layout();
  like.shape = layout.shape;
  for (int at = 0; at < rank; ++at)
    like.strides[size_t(order[size_t(at)])] = made.layout().strides[size_t(at)];
  return Tensor::view_of(made.storage(), like, dtype);
}

}  // namespace

Tensor View::of(const Tensor& base) const {
  if (kind_ == Kind::slice) return base.slice(a_, begin_, end_, step_);
  if (kind_ == Kind::transpose) return base.transpose(a_, b_);
  return base.can_reshape(shape_) ? base.reshape(shape_) : Tensor();
}

Tensor View::inverse(const Tensor& tensor, const Shape& base) const {
  return kind_ == Kind::transpose ? tensor.transpose(a_, b_) : tensor.reshaped(base);
}

std::optional<View> View::within(const View& outer, const Shape& shape) const {
  if (is_range() && outer.is_range() && a_ == outer.a_)
    return slice(a_, outer.begin_ + begin_, outer.begin_ + end_);
  if (kind_ == Kind::reshape && outer.kind_ == Kind::reshape) return *this;
  if (kind_ == Kind::transpose && outer.kind_ == Kind::transpose && a_ == outer.a_ && b_ == outer.b_)
    return reshape(shape);
  return std::nullopt;
}

// ---- leaves ----

void require_grad(Tensor& tensor) {
  require_grad(tensor, tensor.dtype());
}

void require_grad(Tensor& tensor, DType grad_dtype) {
  check(!tensor.grad_state() || tensor.grad_state()->tape == 0, "require_grad: ", describe(tensor),
        " is a result of a tape, whose gradient would end here; detach() it first, or read its gradient with "
        "retain_grad()");
  check(tensor.defined() && is_floating(tensor.dtype()) && is_floating(grad_dtype),
        "require_grad: ", describe(tensor), " cannot have a gradient; only floating tensors can");
  if (tensor.grad_state() && tensor.grad_state()->grad_dtype == grad_dtype) return;
  tensor.set_grad_state(gradients::new_state(tensor, grad_dtype, 0));
}

Tensor grad(const Tensor& leaf) {
  GradState& state = state_of(leaf, "grad");
  check(state.tape == 0 || state.retain, "grad: ", describe(leaf),
        " is a result of the tape, whose gradient is gone once it was used; call retain_grad() on it before "
        "backward(), or read the gradient of a leaf");
  if (state.tape == 0) gradients::note_in_capture(leaf.grad_state());
  if (state.tape == 0 && state.stale) return {};
  gradients::fill_gaps(state);
  return state.grad;
}

void zero_grad(const Tensor& leaf) {
  GradState& state = state_of(leaf, "zero_grad");
  if (state.tape == 0) gradients::note_in_capture(leaf.grad_state());
  state.stale = true;
  state.gaps = nullptr;
}

void set_grad_buffer(const Tensor& leaf, Tensor buffer) {
  GradState& state = state_of(leaf, "set_grad_buffer");
  check(state.tape == 0, "set_grad_buffer: the tensor is a result of a tape, not a leaf");
  check(buffer.defined() && buffer.shape() == leaf.shape() && buffer.dtype() == state.grad_dtype &&
            buffer.device() == leaf.device(),
        "set_grad_buffer: ", describe(buffer), " for a leaf ", describe(leaf), " whose gradient is ",
        state.grad_dtype);
  gradients::note_in_capture(leaf.grad_state());
  gradients::fill_gaps(state);
  if (!state.stale) buffer.copy_from(state.grad);
  state.grad = std::move(buffer);
}

void want_column_sums(const Tensor& result) {
  state_of(result, "want_column_sums").wants_sums = true;
}

void retain_grad(const Tensor& result) {
  state_of(result, "retain_grad").retain = true;
}

void on_grad(const Tensor& leaf, std::function<void(const Tensor&)> hook) {
  GradState& state = state_of(leaf, "on_grad");
  check(state.tape == 0, "on_grad: ", describe(leaf), " is a result of a tape, not a leaf");
  check(hook != nullptr, "on_grad: the hook of ", describe(leaf), " is empty");
  state.hooks.push_back(std::move(hook));
}

void before_grad(const Tensor& leaf, std::function<void()> hook) {
  GradState* const state = leaf.grad_state().get();
  check(state && state->tape == 0, "before_grad: ", describe(leaf), " is no leaf; call require_grad first");
  state->before_grad = hook ? std::make_shared<const std::function<void()>>(std::move(hook)) : nullptr;
}

namespace gradients {

std::shared_ptr<GradState> new_state(const Tensor& tensor, DType grad_dtype, uint64_t tape) {
  auto state = std::make_shared<GradState>();
  state->tape = tape;
  state->grad_dtype = grad_dtype;
  state->shape = tensor.shape();
  state->device = tensor.device();
  return state;
}

// ---- views ----

const std::shared_ptr<GradState>& root_of(const std::shared_ptr<GradState>& state) {
  const std::shared_ptr<GradState>* at = &state;
  while (is_alias(**at)) at = &(*at)->view->base;
  return *at;
}

void fill_gaps(GradState& state) {
  if (!state.gaps) return;
  const Gaps gaps = std::move(*state.gaps);
  state.gaps = nullptr;
  for (const auto& [begin, end] : gaps.ranges) gaps.memory.slice(gaps.dim, begin, end).fill(0);
}

void shorten_chain(GradState& view) {
  std::vector<GradState*> chain;
  for (GradState* at = &view; is_alias(*at) && is_alias(*at->view->base); at = at->view->base.get())
    chain.push_back(at);
  for (; !chain.empty(); chain.pop_back()) {  // from the outermost on
    GradState& inner = *chain.back();
    while (is_alias(*inner.view->base)) {
      const ViewOf& outer = *inner.view->base->view;
      const std::optional<View> one = inner.view->view.within(outer.view, inner.shape);
      if (!one) break;
      inner.view = std::make_unique<ViewOf>(ViewOf{outer.base, *one, outer.layout, outer.device});
    }
  }
}

std::optional<Range> range_of(const GradState& view) {
  const GradState* at = &view;
  while (is_alias(*at) && !at->view->view.is_slice()) at = at->view->base.get();
  if (!is_alias(*at) || !at->view->view.is_range()) return std::nullopt;
  const View& slice = at->view->view;
  const GradState* const whole = at->view->base.get();
  for (at = whole; is_alias(*at); at = at->view->base.get())
    if (at->view->view.is_slice()) return std::nullopt;
  return Range{whole, slice.dim(), slice.begin(), slice.end()};
}

Tensor memory_of(const GradState& view) {
  std::vector<const View*> chain;
  const GradState* at = &view;
  for (; is_alias(*at); at = at->view->base.get()) chain.push_back(&at->view->view);
  Tensor memory = at->grad;
  for (; !chain.empty() && memory.defined(); chain.pop_back()) memory = chain.back()->of(memory);
  return memory;
}

void prepare_for_view(const std::shared_ptr<GradState>& view) {
  GradState& root = *root_of(view);
  if (!root.grad.defined()) {
    const ViewOf* outermost = view->view.get();
    while (is_alias(*outermost->base)) outermost = outermost->base->view.get();
    root.grad = empty_as(outermost->layout, root.grad_dtype, outermost->device);
    root.given = true;
  }
  root.stale = false;
  const std::optional<Range> range = range_of(*view);
  const Tensor whole = range ? memory_of(*range->whole) : Tensor();
  if (whole.defined()) {
    root.gaps = std::make_unique<Gaps>(Gaps{whole, range->dim, {{0, whole.size(range->dim)}}});
  } else {
    root.grad.fill(0);
  }
}

bool is_gap(const GradState& root, const Range& range) {
  if (is_empty(root)) return true;
  if (!root.gaps || root.gaps->dim != range.dim || !root.gaps->memory.same_elements(memory_of(*range.whole)))
    return false;
  return std::ranges::any_of(root.gaps->ranges, [&](const auto& gap) {
    return gap.first <= range.begin && range.end <= gap.second;
  });
}

bool close_gap(GradState& root, const Range& range) {
  if (!root.gaps) return false;
  const bool was_gap = is_gap(root, range);
  if (root.gaps->dim != range.dim || !root.gaps->memory.same_elements(memory_of(*range.whole))) {
    fill_gaps(root);
    return false;
  }
  std::vector<std::pair<int64_t, int64_t>> left;
  for (const auto& [begin, end] : root.gaps->ranges) {
    const int64_t from = std::max(begin, range.begin), to = std::min(end, range.end);
    if (from >= to) {
      left.emplace_back(begin, end);
      continue;
    }
    if (!was_gap) root.gaps->memory.slice(range.dim, from, to).fill(0);
    if (begin < from) left.emplace_back(begin, from);
    if (to < end) left.emplace_back(to, end);
  }
  root.gaps->ranges = std::move(left);
  if (root.gaps->ranges.empty()) root.gaps = nullptr;
  return was_gap;
}

// ---- sums ----

namespace {

bool is_exclusive(const Arrival& arrival) {
  return arrival.given && (!arrival.sharers || arrival.sharers.use_count() == 1) &&
         !arrival.gradient.layout().is_expanded();
}

void hold(GradState& state, Arrival arrival) {
  state.given = arrival.given && !arrival.gradient.layout().is_expanded();
  state.grad = std::move(arrival.gradient);
  state.sharers = std::move(arrival.sharers);
  state.column_sums = Tensor();
}

/// Stores the first gradient of a result, or of a leaf since zero_grad().
void begin(GradState& state, Arrival arrival) {
  const bool leaf = state.tape == 0;
  state.stale = false;
  state.gaps = nullptr;
  if (leaf && state.grad.defined()) return state.grad.copy_from(arrival.gradient);  // it keeps its address
  if (arrival.gradient.dtype() != state.grad_dtype) {
    hold(state, {arrival.gradient.to(state.grad_dtype), true});
  } else if (leaf && !is_exclusive(arrival)) {
    hold(state, {arrival.gradient.clone(), true});  // later ones are added in place
  } else {
    hold(state, std::move(arrival));
  }
}

void add_to_slice(const std::shared_ptr<GradState>& view, Arrival arrival) {
  GradState& root = *root_of(view);
  if (is_empty(root)) {
    prepare_for_view(view);
  } else if (!is_writable(root)) {
    hold(root, {root.grad.clone(), true});
  }
  root.arrived = true;
  const Tensor part = memory_of(*view);
  if (!part.defined()) {
    const ViewOf& of = *view->view;
    const Tensor whole = Tensor::zeros(of.layout.shape, of.base->grad_dtype, of.device);
    of.view.of(whole).copy_from(arrival.gradient);
    return add(of.base, {whole, true});
  }
  const std::optional<Range> range = range_of(*view);
  if (!range) fill_gaps(root);
  if (range && close_gap(root, *range)) {
    part.copy_from(arrival.gradient);
  } else {
    accumulate(part, arrival.gradient);
  }
}

}  // namespace

void add(const std::shared_ptr<GradState>& to, Arrival arrival) {
  Pass::touch(to);
  const std::shared_ptr<GradState>* at = &to;
  for (; is_alias(**at); at = &(*at)->view->base) {  // no recursion: views of views may be many
    const ViewOf& of = *(*at)->view;
    const DType dtype = (*at)->grad_dtype;
    if (arrival.gradient.dtype() != dtype) arrival = {arrival.gradient.to(dtype), true};
    if (of.view.is_slice()) return add_to_slice(*at, std::move(arrival));
    Tensor whole = of.view.inverse(arrival.gradient, of.layout.shape);
    if (!whole.shares_storage(arrival.gradient)) arrival = {{}, true};
    arrival.gradient = std::move(whole);
  }
  GradState& state = **at;
  state.arrived = true;
  if (is_empty(state)) return begin(state, std::move(arrival));
  fill_gaps(state);
  if (!is_writable(state)) {
    if (is_exclusive(arrival) && arrival.gradient.dtype() == state.grad.dtype()) {
      accumulate(arrival.gradient, state.grad);  // the sum goes to the memory that may be written
      return hold(state, std::move(arrival));
    }
    hold(state, {state.grad.clone(), true});
  }
  accumulate(state.grad, arrival.gradient);
}

void add_retained_to_base(const std::shared_ptr<GradState>& view) {
  view->retain = false;  // what arrives for a view goes to its base
  add(view, {view->grad});
  view->retain = true;
}

}  // namespace gradients
}  // namespace tessera
