#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "autograd/backward.h"
#include "autograd/gradient_internal.h"
#include "runtime/override.h"

namespace tessera::gradients {

/// The backward pass in progress on this thread: what to restore if it throws, and work deferred to its end.
/// A nested pass (checkpointing) is part of the outer one.
class Pass {
 public:
  Pass();
  ~Pass();
  Pass(const Pass&) = delete;

  /// Call before a gradient is written, or its memory is handed out for writing.
  static void touch(const std::shared_ptr<GradState>& state);
  /// The PassEnd of that key, for all passes inside the outermost one.
  static PassEnd& at_end(const void* key, std::unique_ptr<PassEnd> (*make)());
  /// if_pass_throws (autograd/gradient.h).
  static bool if_throws(const void* key, std::function<void()> undo);

  void finish();
  void restore() noexcept;

 private:
  struct Logged {
    LeafGrad before;
    Tensor content;  // undefined if there was none
  };
  void log(const std::shared_ptr<GradState>& leaf);

  static thread_local Pass* current_;
  const bool outermost_;
  std::vector<Logged> log_;
  std::vector<std::pair<const void*, std::unique_ptr<PassEnd>>> ends_;
  std::vector<std::pair<const void*, std::function<void()>>> undos_;
};

/// A pass with a loss scale, or the replay of a captured one, bumps the scale's version: that is how the
/// optimizer knows that its gradients are scaled.
void note_scaled_pass(const Tensor& loss_scale);

/// Names the operator whose backward runs, for messages.
class RunningEntry {
 public:
  explicit RunningEntry(const char* name) : scope_(name_, name) {}
  static const char* name() { return name_; }

 private:
  static inline constinit thread_local const char* name_ = "";
  Override<const char*> scope_;
};

}  // namespace tessera::gradients
