#pragma once

#include <functional>
#include <utility>

#include "runtime/override.h"

namespace tessera {

/// For the lifetime of the scope, `hook` is called on this thread after each entry that a tape records, with
/// the operator's name and the entry's index: the operator's work has been issued, and CallScope::current()
/// names its layer. Only the innermost scope is called. For analysis; Tape::on_entry is its counterpart for
/// backward. The hook must not record.
class OnRecord {
 public:
  using Hook = std::function<void(const char* name, size_t index)>;
  explicit OnRecord(Hook hook) : hook_(std::move(hook)) {}

  /// Called by Tape.
  static void notify(const char* name, size_t index) {
    if (current_) [[unlikely]]
      current_->hook_(name, index);
  }

 private:
  static inline constinit thread_local OnRecord* current_ = nullptr;
  Hook hook_;
  Override<OnRecord*> scope_{current_, this};
};

}  // namespace tessera
