#include "autograd/tape.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "runtime/capture.h"
#include "runtime/profile.h"
#include "tensor/finite.h"
#include "tensor/kernels.h"

namespace tessera {
namespace {

std::atomic<uint64_t> g_next_tape{1};
thread_local ModuleScope* t_module = nullptr;
thread_local const char* t_running = "";  // the entry whose backward runs, for Saved's message

constexpr size_t kChunk = 64 * 1024;

GradState& leaf_state(const Tensor& leaf, const char* what) {
  check(leaf.grad_state() != nullptr, what, ": ", describe(leaf),
        " does not require a gradient; call require_grad first");
  return *leaf.grad_state();
}

/// A result's gradient may be another tensor's memory, or an expanded view: only a copy can be added to.
bool is_writable(const GradState& state) {
  return state.grad.storage().use_count() == 1 && !state.grad.layout().is_expanded();
}
/// Whether something has arrived to which a kernel may add in place.
bool has_sum(const GradState& state) {
  return state.grad.defined() && (state.tape == 0 ? !state.stale : is_writable(state));
}
/// A backward pass, or the replay of a captured one, bumps the scale's version: that is how the optimizer
/// knows that its gradients are scaled.
void note_use(const Tensor& loss_scale) {
  loss_scale.bump_version();
  if (CaptureSession* const session = CaptureSession::current())
    session->add({.key = loss_scale.storage().get(),
                  .before_launch = [] {},
                  .capture_end = [] {},
                  .after_launch = [loss_scale] { loss_scale.bump_version(); },
                  .failed = [] {}});
}

void make_writable(GradState& state) {
  if (!is_writable(state)) state.grad = state.grad.clone();
}

bool same_place(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.shares_storage(b) && a.raw() == b.raw() && a.layout().strides == b.layout().strides;
}

/// A leaf's gradient as it was at some point.
struct LeafGrad {
  std::shared_ptr<GradState> state;
  Tensor grad;
  bool stale;

  explicit LeafGrad(const std::shared_ptr<GradState>& state)
      : state(state), grad(state->grad), stale(state->stale) {}
  bool still_is() const { return state->stale == stale && same_place(state->grad, grad); }
  void restore() const {
    state->grad = grad;
    state->stale = stale;
    state->arrived = false;
  }
};

/// The leaves whose gradients a graph being captured reads or writes: before the body and after it. Its
/// kernels do what the body would do only if the leaves are as they were before, and each launch leaves them
/// as they were after.
struct CapturedGrads {
  std::vector<LeafGrad> before, after;
  std::unordered_set<const GradState*> known;

  static void restore(const std::vector<LeafGrad>& leaves) {
    for (const LeafGrad& leaf : leaves) leaf.restore();
  }
};

/// Called before a leaf's gradient is read or written.
void note_in_capture(const std::shared_ptr<GradState>& leaf) {
  CaptureSession* const session = CaptureSession::current();
  if (!session) [[likely]]
    return;
  static const char key = 0;
  std::shared_ptr<void>& slot = session->state(&key);
  if (!slot) {
    const auto grads = std::make_shared<CapturedGrads>();
    slot = grads;
    session->add({.key = &key,
                  .capture_end =
                      [grads] {
                        for (const LeafGrad& leaf : grads->before) grads->after.emplace_back(leaf.state);
                        CapturedGrads::restore(grads->before);  // nothing has run yet
                      },
                  .after_launch = [grads] { CapturedGrads::restore(grads->after); },
                  .failed = [grads] { CapturedGrads::restore(grads->before); },
                  .still_matches =
                      [grads] {
                        return std::ranges::all_of(grads->before,
                                                   [](const LeafGrad& leaf) { return leaf.still_is(); });
                      }});
  }
  CapturedGrads& grads = *static_cast<CapturedGrads*>(slot.get());
  if (grads.known.insert(leaf.get()).second) grads.before.emplace_back(leaf);
}

/// The backward pass in progress on this thread: what it has to restore if it throws.
class Pass {
 public:
  Pass() : outermost_(!current_) {
    if (outermost_) current_ = this;
  }
  ~Pass() {
    if (!outermost_) return;
    for (const Logged& leaf : log_) leaf.before.state->logged = false;
    current_ = nullptr;
  }
  Pass(const Pass&) = delete;

  /// Called before a gradient is written, or its memory given out to be written.
  static void touch(const std::shared_ptr<GradState>& state) {
    if (state->tape != 0) return;
    note_in_capture(state);
    if (current_ && !state->logged) current_->log(state);
  }

  /// The PassEnd of that key, for all passes inside the outermost one.
  static PassEnd& at_end(const void* key, std::unique_ptr<PassEnd> (*make)()) {
    for (const auto& [known, end] : current_->ends_)
      if (known == key) return *end;
    return *current_->ends_.emplace_back(key, make()).second;
  }

  void finish() {
    if (!outermost_) return;
    for (const auto& [key, end] : ends_) end->finish();
  }

  void restore() noexcept {
    if (!outermost_) return;
    for (const Logged& leaf : log_) {
      leaf.before.restore();
      try {
        if (leaf.content.defined()) leaf.before.grad.copy_from(leaf.content);
      } catch (const std::exception&) {  // the device is broken, which the current error is about
      }
    }
  }

 private:
  struct Logged {
    LeafGrad before;
    Tensor content;  // undefined if there was none
  };

  void log(const std::shared_ptr<GradState>& state) {
    // What a captured pass adds is added by launches alone.
    const bool adds = !state->stale && state->grad.defined() && !CaptureSession::current();
    Tensor content;
    if (adds) {
      const MemoryTag tag("gradients before the pass");
      content = state->grad.clone();
    }
    log_.push_back({LeafGrad(state), std::move(content)});
    state->logged = true;
  }

  static thread_local Pass* current_;
  const bool outermost_;
  std::vector<Logged> log_;
  std::vector<std::pair<const void*, std::unique_ptr<PassEnd>>> ends_;
};

thread_local Pass* Pass::current_ = nullptr;

void add(GradState& state, const Tensor& gradient) {
  const bool leaf = state.tape == 0;
  state.arrived = true;
  if (!state.grad.defined() || (leaf && state.stale)) {
    if (leaf && state.grad.defined()) {
      state.grad.copy_from(gradient);  // a leaf's buffer keeps its address
    } else if (gradient.dtype() != state.grad_dtype) {
      state.grad = gradient.to(state.grad_dtype);
    } else if (leaf && (gradient.storage().use_count() > 1 || gradient.layout().is_expanded())) {
      state.grad =
          gradient.clone();  // later ones are added in place, so no other tensor may share this memory
    } else {
      state.grad = gradient;
    }
    state.stale = false;
    return;
  }
  if (!leaf) make_writable(state);
  accumulate(state.grad, gradient);
}

}  // namespace

// ---- leaves ----

void require_grad(Tensor& tensor) {
  require_grad(tensor, tensor.dtype());
}

void require_grad(Tensor& tensor, DType grad_dtype) {
  check(tensor.defined() && is_floating(tensor.dtype()) && is_floating(grad_dtype),
        "require_grad: ", describe(tensor), " cannot have a gradient; only floating tensors can");
  auto state = std::make_shared<GradState>();
  state->grad_dtype = grad_dtype;
  tensor.set_grad_state(std::move(state));
}

Tensor grad(const Tensor& leaf) {
  const GradState& state = leaf_state(leaf, "grad");
  if (state.tape == 0) note_in_capture(leaf.grad_state());
  return state.tape == 0 && state.stale ? Tensor() : state.grad;
}

void zero_grad(const Tensor& leaf) {
  GradState& state = leaf_state(leaf, "zero_grad");
  if (state.tape == 0) note_in_capture(leaf.grad_state());
  state.stale = true;
}

void set_grad_buffer(const Tensor& leaf, Tensor buffer) {
  GradState& state = leaf_state(leaf, "set_grad_buffer");
  check(state.tape == 0, "set_grad_buffer: the tensor is a result of a tape, not a leaf");
  check(buffer.defined() && buffer.shape() == leaf.shape() && buffer.dtype() == state.grad_dtype &&
            buffer.device() == leaf.device(),
        "set_grad_buffer: ", describe(buffer), " for a leaf ", describe(leaf), " whose gradient is ",
        state.grad_dtype);
  note_in_capture(leaf.grad_state());
  if (!state.stale) buffer.copy_from(state.grad);
  state.grad = std::move(buffer);
}

void retain_grad(const Tensor& result) {
  leaf_state(result, "retain_grad").retain = true;
}

void on_grad(const Tensor& leaf, std::function<void(const Tensor&)> hook) {
  GradState& state = leaf_state(leaf, "on_grad");
  check(state.tape == 0, "on_grad: ", describe(leaf), " is a result of a tape, not a leaf");
  state.hooks.push_back(std::move(hook));
}

void Saved::fail() const {
  fail_at(Site::here(), "backward of ", t_running, ": the tensor ", describe(tensor_),
          " that it saved was written in place after the forward pass (version ", tensor_.version(),
          ", saved at ", version_, "); write to a copy, or after backward()");
}

// ---- the entry's view ----

DType Backward::grad_dtype(int input) const {
  return inputs_[size_t(input)]->grad_dtype;
}

Tensor Backward::grad(int output) {
  GradState& state = *outputs_[size_t(output)];
  check(state.grad.defined(), "backward of ", t_running, ": no gradient of output ", output, " has arrived");
  return state.grad;
}

Tensor Backward::take_grad(int output) {
  const Tensor gradient = grad(output);
  if (GradState& state = *outputs_[size_t(output)]; !state.retain) state.grad = Tensor();
  return gradient;
}

void Backward::accumulate(int input, const Tensor& gradient) {
  const auto& state = inputs_[size_t(input)];
  if (!state) return;
  Pass::touch(state);
  const Storage* const storage = gradient.storage().get();
  const bool taken = std::ranges::find(adopted_, storage) != adopted_.end();
  // Not `taken ? gradient.clone() : gradient`: that makes a second handle, and add() copies what two hold.
  if (taken) {
    add(*state, gradient.clone());
  } else {
    add(*state, gradient);
  }
  if (state->tape == 0 && state->grad.storage().get() == storage) adopted_.push_back(storage);
}

Tensor Backward::whole_gradient(int input, const Shape& shape, Device device) {
  GradState& state = *inputs_[size_t(input)];
  Pass::touch(inputs_[size_t(input)]);
  if (!state.grad.defined()) {
    state.grad = Tensor::zeros(shape, state.grad_dtype, device);
  } else if (state.tape != 0) {
    make_writable(state);
  } else if (state.stale) {
    state.grad.fill(0);
  }
  state.stale = false;
  state.arrived = true;
  return state.grad;
}

void Backward::add_into(const Tensor& part, const Tensor& gradient) {
  tessera::accumulate(part, gradient);
}

Tensor WholeGrad::part(int dim, int64_t begin, int64_t end) {
  if (!grad.defined()) {
    std::array<int, kMaxRank> order{};
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.begin() + shape.rank(),
                     [&](int a, int b) { return strides[size_t(a)] > strides[size_t(b)]; });
    Shape sizes = shape;
    for (int at = 0; at < shape.rank(); ++at) sizes = sizes.with(at, shape[order[size_t(at)]]);
    const Tensor made = Tensor::empty(sizes, dtype, device);
    Layout layout = made.layout();
    layout.shape = shape;
    for (int at = 0; at < shape.rank(); ++at)
      layout.strides[size_t(order[size_t(at)])] = made.layout().strides[size_t(at)];
    grad = Tensor::view_of(made.storage(), layout, dtype);
  }
  return grad.slice(dim, begin, end);
}

GradTarget Backward::target(int input) {
  GradState& state = *inputs_[size_t(input)];
  Pass::touch(inputs_[size_t(input)]);
  if (state.source) Pass::touch(state.source);
  if (!state.grad.defined() && state.whole && !std::exchange(state.placed, true))
    return {.grad = state.whole->part(state.dim, state.begin, state.end), .part = true};
  if (!state.grad.defined() && state.source && !state.retain && has_sum(*state.source))
    return {state.source->grad.slice(state.dim, state.begin, state.end), true};
  if (state.grad.defined() && (state.tape == 0 || is_writable(state)))
    return {state.grad, state.tape != 0 || !state.stale};
  return {Tensor(), false};
}

void Backward::written(int input, const GradTarget& target) {
  GradState& state = *inputs_[size_t(input)];
  if (state.grad.defined() && target.grad.shares_storage(state.grad)) {
    state.stale = false;
    state.arrived = true;
    state.grad.bump_version();
  } else if (state.source && state.source->grad.defined() && target.grad.shares_storage(state.source->grad)) {
    state.source->arrived = true;
    state.source->grad.bump_version();
  } else {
    accumulate(input, target.grad);
  }
}

bool Backward::may_wait(int input) const {
  const GradState& state = *inputs_[size_t(input)];
  return state.tape == 0 && state.stale && state.pending == 1 && state.hooks.empty() && !checked_;
}

PassEnd& Backward::at_end(const void* key, std::unique_ptr<PassEnd> (*make)()) {
  return Pass::at_end(key, make);
}

// ---- the tape ----

thread_local Tape* Tape::current_ = nullptr;

Tape::Tape(TapeOptions options) : outer_(current_), options_(options), id_(g_next_tape++) {
  if (outer_) options_.check_finite |= outer_->options_.check_finite;
  const Tensor& scale = options_.loss_scale;
  check(!scale.defined() || (scale.dtype() == DType::f32 && scale.rank() == 0), "tape: the loss scale is ",
        describe(scale), "; expected f32 of rank 0, as Optimizer::loss_scale() returns");
  current_ = this;
}

Tape::~Tape() {
  while (!entries_.empty()) {
    Entry entry = std::move(entries_.back());
    entries_.pop_back();
    pop(entry, false);
  }
  current_ = outer_;
}

Tape* Tape::recording_any(std::span<const Tensor> inputs) {
  if (!current_) return nullptr;
  for (const Tensor& input : inputs)
    if (requires_grad(input)) return current_;
  return nullptr;
}

bool Tape::begin_entry(const char* name, Site site, std::span<const Tensor* const> inputs,
                       std::span<Tensor* const> outputs) {
  check(!spent_, name, ": this tape has run backward already; make a new Tape for the next step");
  if (options_.check_finite) check_result(name, site, outputs);
  for (Tensor* output : outputs) {
    auto state = std::make_shared<GradState>();
    state->tape = id_;
    state->grad_dtype = output->dtype();
    output->set_grad_state(std::move(state));
  }
  for (const Tensor* input : inputs) {
    const auto& state = input->grad_state();
    if (!state) continue;
    check(state->tape == 0 || state->tape == id_, name, ": input ", describe(*input),
          " belongs to another tape; pass it as "
          "an input of the checkpointed function, or detach() it");
    if (state->tape == 0 && collects_only_) {
      bool known = false;
      for (const auto& leaf : states_) known = known || leaf == state;
      if (!known) states_.push_back(state);
    }
  }
  if (collects_only_) return false;
  for (const Tensor* input : inputs) {
    states_.push_back(input->grad_state());
    if (const auto& state = states_.back(); state && state->tape == 0) state->pending += 1;
  }
  for (Tensor* output : outputs) states_.push_back(output->grad_state());
  entries_.push_back({name, site, uint32_t(inputs.size()), uint32_t(outputs.size()), 0, 0, nullptr, nullptr,
                      nullptr, options_.check_finite ? ModuleScope::path() : std::string(), f32_math()});
  return true;
}

void* Tape::reserve(size_t bytes, size_t align) {
  Entry& entry = entries_.back();
  for (;;) {
    if (!chunks_.empty()) {
      Chunk& chunk = chunks_.back();
      entry.chunk = chunks_.size() - 1;
      entry.used_before = chunk.used;
      const size_t start = (chunk.used + align - 1) / align * align;
      if (start + bytes <= chunk.size) {
        chunk.used = start + bytes;
        return chunk.bytes.get() + start;
      }
    }
    const size_t size = std::max(kChunk, bytes + align);
    chunks_.push_back({std::make_unique_for_overwrite<std::byte[]>(size), size, 0});
  }
}

void Tape::end_entry(void* function, void (*run)(void*, Backward&), void (*destroy)(void*)) {
  Entry& entry = entries_.back();
  entry.function = function;
  entry.run = run;
  entry.destroy = destroy;
}

void Tape::pop(Entry& entry, bool run_hooks) {
  entry.destroy(entry.function);
  chunks_.resize(entry.chunk + 1);
  chunks_.back().used = entry.used_before;
  const size_t first = states_.size() - entry.inputs - entry.outputs;
  std::vector<std::shared_ptr<GradState>> complete;  // leaves whose hooks are due
  for (size_t i = first; i < first + entry.inputs; ++i) {
    const auto& state = states_[i];
    if (!state || state->tape != 0) continue;
    state->pending -= 1;
    if (state->pending == 0 && std::exchange(state->arrived, false) && run_hooks && !state->hooks.empty())
      complete.push_back(state);
  }
  for (size_t i = first + entry.inputs; i < states_.size(); ++i)
    if (!states_[i]->retain) states_[i]->grad = Tensor();
  states_.resize(first);
  for (const auto& leaf : complete)  // last: a hook may throw
    for (const auto& hook : leaf->hooks) hook(leaf->grad);
}

Tensor Tape::initial_gradient(DType dtype, Device device) const {
  const Tensor& scale = options_.loss_scale;
  if (!scale.defined()) return {};
  check(scale.device() == device, "tape: the loss scale is on ", scale.device().name(), ", but the loss on ",
        device.name(), "; use one device for the model and its optimizer");
  return scale.to(dtype);
}

void Tape::backward(const Tensor& loss) {
  check(loss.defined() && loss.count() == 1, "backward: the loss ", describe(loss),
        " must have one element; reduce it with ops::mean or ops::sum, or pass gradients");
  const Tensor scale = initial_gradient(loss.dtype(), loss.device());
  const Tensor first = scale.defined() ? scale.reshape(loss.shape())
                                       : Tensor::full(loss.shape(), 1.0, loss.dtype(), loss.device());
  backward(std::span(&loss, 1), std::span(&first, 1));
}

void Tape::backward(std::span<const Tensor> results, std::span<const Tensor> grads) {
  check(!spent_,
        "backward: this tape has run backward already; what it saved is gone. Make a new Tape for the next "
        "step");
  check(current_ == this, "backward: only the innermost tape of the thread can run backward");
  check(results.size() == grads.size(), "backward: ", results.size(), " results and ", grads.size(),
        " gradients");
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& state = results[i].grad_state();
    check(state != nullptr && state->tape == id_, "backward: ", describe(results[i]),
          state ? " is a result of another tape"
                : " is not a result of this tape: no input of its computation requires a "
                  "gradient, or it was detached");
    check(grads[i].shape() == results[i].shape() && grads[i].device() == results[i].device(),
          "backward: gradient ", describe(grads[i]), " for a result ", describe(results[i]));
  }
  spent_ = true;
  if (options_.loss_scale.defined()) note_use(options_.loss_scale);
  for (size_t i = 0; i < results.size(); ++i) add(*results[i].grad_state(), grads[i].detach());
  run();
}

void Tape::run() {
  const NoTape off;
  const ProfileRange range("backward");
  Pass pass;
  try {
    run_entries();
    pass.finish();
  } catch (...) {
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
    const size_t first = states_.size() - entry.inputs - entry.outputs;
    Backward view;
    view.inputs_ = std::span(states_).subspan(first, entry.inputs);
    view.outputs_ = std::span(states_).subspan(first + entry.inputs, entry.outputs);
    view.checked_ = check_gradients;
    bool wanted = false;
    for (const auto& output : view.outputs_) wanted = wanted || output->grad.defined();
    if (wanted) {
      const char* const outer_name = std::exchange(t_running, entry.name);
      try {
        const F32MathScope math(entry.math);
        entry.run(entry.function, view);
        if (check_gradients) {
          for (size_t i = 0; i < view.inputs_.size(); ++i) {
            const auto& state = view.inputs_[i];
            if (!state || !state->grad.defined()) continue;
            const NonFinite bad = find_nonfinite(state->grad);
            check(!bad, "non-finite gradient: backward of ", entry.name, entry.path.empty() ? "" : " in ",
                  entry.path, " made ", bad.nan, " NaN and ", bad.inf, " infinite of ", state->grad.count(),
                  " elements of d_input ", i, " ", describe(state->grad), ", the first at ", bad.first,
                  "; called at ", entry.site.file, ":", entry.site.line);
          }
        }
      } catch (...) {
        t_running = outer_name;
        pop(entry, false);
        throw;
      }
      t_running = outer_name;
    }
    pop(entry, true);
    if (entry_hook_) entry_hook_(entry.name, entries_.size());
  }
}

void Tape::check_result(const char* name, Site site, std::span<Tensor* const> outputs) const {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const NonFinite bad = find_nonfinite(outputs[i]->detach());
    const std::string path = ModuleScope::path();
    check(!bad, "non-finite result: ", name, path.empty() ? "" : " in ", path, " made ", bad.nan, " NaN and ",
          bad.inf, " infinite of ", outputs[i]->count(), " elements of output ", i, " ",
          describe(*outputs[i]), ", the first at ", bad.first, "; called at ", site.file, ":", site.line);
  }
}

// ---- module path ----

ModuleScope::ModuleScope(const char* name, int64_t index) : name_(name), index_(index), outer_(t_module) {
  t_module = this;
}

ModuleScope::~ModuleScope() {
  t_module = outer_;
}

std::string ModuleScope::path() {
  std::string path;
  for (const ModuleScope* scope = t_module; scope; scope = scope->outer_) {
    std::string part = scope->name_;
    if (scope->index_ >= 0) part += "." + std::to_string(scope->index_);
    path = path.empty() ? part : part + "." + path;
  }
  return path;
}

}  // namespace tessera
