#pragma once

#include <functional>
#include <utility>

namespace tessera {

/// While it lives, `hook` is called on this thread after each entry that a tape records, with the name of the
/// operator and the entry's index on its tape: the operator's work has been issued, and CallScope::current()
/// names its layer. Of nested scopes the innermost is called. For analysis, with Tape::on_entry, which is the
/// same of the backward pass. The hook must not record.
class OnRecord {
 public:
  using Hook = std::function<void(const char* name, size_t index)>;
  explicit OnRecord(Hook hook) : hook_(std::move(hook)), outer_(std::exchange(current_, this)) {}
  ~OnRecord() { current_ = outer_; }
  OnRecord(const OnRecord&) = delete;

  /// Of tapes.
  static void tell(const char* name, size_t index) {
    if (current_) [[unlikely]]
      current_->hook_(name, index);
  }

 private:
  static inline constinit thread_local OnRecord* current_ = nullptr;
  Hook hook_;
  OnRecord* outer_;
};

}  // namespace tessera
