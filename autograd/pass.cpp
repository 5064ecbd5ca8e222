#include <algorithm>
#include <unordered_set>

#include "autograd/pass_internal.h"
#include "runtime/capture.h"

namespace tessera {

bool if_pass_throws(const void* key, std::function<void()> undo) {
  return gradients::Pass::if_throws(key, std::move(undo));
}

namespace gradients {

bool LeafGrad::is_unchanged() const {
  return state->stale == stale && state->grad.same_elements(grad);
}

void LeafGrad::restore() const {
  state->grad = grad;
  state->stale = stale;
  state->arrived = false;
  state->gaps = nullptr;
}

namespace {

/// The leaves whose gradients a graph being captured reads or writes, with their state before and after the
/// body. The graph may be replayed only if they are in the state of before; each launch puts them into the
/// state of after.
struct CapturedGrads {
  std::vector<LeafGrad> before, after;
  std::unordered_set<const GradState*> known;

  static void restore(const std::vector<LeafGrad>& leaves) {
    for (const LeafGrad& leaf : leaves) leaf.restore();
  }
};

}  // namespace

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
                                                   [](const LeafGrad& leaf) { return leaf.is_unchanged(); });
                      }});
  }
  CapturedGrads& grads = *static_cast<CapturedGrads*>(slot.get());
  if (grads.known.insert(leaf.get()).second) grads.before.emplace_back(leaf);
}

void note_scaled_pass(const Tensor& loss_scale) {
  loss_scale.bump_version();
  if (CaptureSession* const session = CaptureSession::current())
    session->add(
        {.key = loss_scale.storage().get(), .after_launch = [loss_scale] { loss_scale.bump_version(); }});
}

thread_local Pass* Pass::current_ = nullptr;

Pass::Pass() : outermost_(!current_) {
  if (outermost_) current_ = this;
}

Pass::~Pass() {
  if (!outermost_) return;
  for (const Logged& leaf : log_) leaf.before.state->logged = false;
  current_ = nullptr;
}

void Pass::touch(const std::shared_ptr<GradState>& state) {
  shorten_chain(*state);
  const std::shared_ptr<GradState>& root = root_of(state);
  if (root->tape != 0) return;
  if (root->stale)
    if (const auto hook = root->before_grad) (*hook)();  // a copy: the hook may replace itself
  note_in_capture(root);
  if (current_ && !root->logged) current_->log(root);
}

PassEnd& Pass::at_end(const void* key, std::unique_ptr<PassEnd> (*make)()) {
  for (const auto& [known, end] : current_->ends_)
    if (known == key) return *end;
  return *current_->ends_.emplace_back(key, make()).second;
}

bool Pass::if_throws(const void* key, std::function<void()> undo) {
  check(current_ != nullptr,
        "if_pass_throws: no backward pass runs on this thread; call it in a hook of one");
  for (const auto& [known, other] : current_->undos_)
    if (known == key) return false;
  current_->undos_.emplace_back(key, std::move(undo));
  return true;
}

void Pass::finish() {
  if (!outermost_) return;
  for (const auto& [key, end] : ends_) end->finish();
  for (const Logged& leaf : log_) fill_gaps(*leaf.before.state);
}

void Pass::restore() noexcept {
  if (!outermost_) return;
  for (const auto& [key, undo] : undos_) {
    try {
      undo();
    } catch (const std::exception&) {  // the pass's own error is the cause
    }
  }
  for (const Logged& leaf : log_) {
    leaf.before.restore();
    try {
      if (leaf.content.defined()) leaf.before.grad.copy_from(leaf.content);
    } catch (const std::exception&) {  // the device is broken, which the current error is about
    }
  }
}

void Pass::log(const std::shared_ptr<GradState>& leaf) {
  // While capturing nothing is added yet: launches will do that.
  const bool adds = !leaf->stale && leaf->grad.defined() && !CaptureSession::current();
  Tensor content;
  if (adds) {
    const MemoryTag tag("gradients before the pass");
    content = leaf->grad.clone();
  }
  log_.push_back({LeafGrad(leaf), std::move(content)});
  leaf->logged = true;
}

}  // namespace gradients
}  // namespace tessera
