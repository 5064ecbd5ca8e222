#include "autograd/before_grad.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace tessera {
namespace {

/// Hooks by leaf. Not in GradState, which every result of a tape has: only leaves of an optimizer with
/// sharded gradients have such a hook.
struct BeforeGradHooks {
  struct Hook {
    std::weak_ptr<GradState> leaf;  // to detect that another leaf reuses the address of a deleted one
    std::shared_ptr<const std::function<void()>> hook;
  };
  std::atomic<size_t> count = 0;
  std::mutex mutex;
  std::unordered_map<const GradState*, Hook> by_leaf;
};

BeforeGradHooks& before_grad_hooks() {
  static BeforeGradHooks all;
  return all;
}

}  // namespace

void before_grad(const Tensor& leaf, std::function<void()> hook) {
  const std::shared_ptr<GradState>& state = leaf.grad_state();
  check(state && state->tape == 0, "before_grad: ", describe(leaf), " is no leaf; call require_grad first");
  BeforeGradHooks& all = before_grad_hooks();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.by_leaf, [](const auto& entry) { return entry.second.leaf.expired(); });
  if (hook)
    all.by_leaf[state.get()] = {state, std::make_shared<const std::function<void()>>(std::move(hook))};
  else
    all.by_leaf.erase(state.get());
  all.count = all.by_leaf.size();
}

void gradients::run_before_grad_hook(const std::shared_ptr<GradState>& leaf) {
  BeforeGradHooks& all = before_grad_hooks();
  if (all.count == 0) [[likely]]
    return;
  std::shared_ptr<const std::function<void()>> hook;
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_leaf.find(leaf.get());
    if (found == all.by_leaf.end() || found->second.leaf.lock() != leaf) return;
    hook = found->second.hook;
  }
  (*hook)();
}

}  // namespace tessera
