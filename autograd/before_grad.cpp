#include "autograd/before_grad.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace tessera {
namespace {

/// Hooks by leaf. They lie here since few leaves have one, those of an optimizer whose gradients are spread
/// over ranks, while every result of a tape has a GradState.
struct Openings {
  struct Opening {
    std::weak_ptr<GradState> leaf;  // another leaf may get the address of one that is gone
    std::shared_ptr<const std::function<void()>> hook;
  };
  std::atomic<size_t> count = 0;
  std::mutex mutex;
  std::unordered_map<const GradState*, Opening> by_leaf;
};

Openings& openings() {
  static Openings all;
  return all;
}

}  // namespace

void before_grad(const Tensor& leaf, std::function<void()> hook) {
  const std::shared_ptr<GradState>& state = leaf.grad_state();
  check(state && state->tape == 0, "before_grad: ", describe(leaf), " is no leaf; call require_grad first");
  Openings& all = openings();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.by_leaf, [](const auto& entry) { return entry.second.leaf.expired(); });
  if (hook)
    all.by_leaf[state.get()] = {state, std::make_shared<const std::function<void()>>(std::move(hook))};
  else
    all.by_leaf.erase(state.get());
  all.count = all.by_leaf.size();
}

void gradients::open(const std::shared_ptr<GradState>& leaf) {
  Openings& all = openings();
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
