#pragma once

#include <string>

#include "runtime/error.h"
#include "runtime/override.h"

namespace tessera {

/// The user's call into the library, as far as it is known: every Error appends it to its message.
struct CallSite {
  Site site = Site();            // the user's line
  const char* module = nullptr;  // the part of the model, "blocks.3.mlp.down": from intern_name, or null

  /// "; called at main.cpp:42 in blocks.3.mlp.down", "" if nothing is known.
  std::string text() const;
};

/// A copy of `name` that is never deleted: the same pointer for equal names.
const char* intern_name(const std::string& name);

/// For the lifetime of the scope, this thread works for a call of the library. Operators, layers and the tape
/// open one with their defaulted last parameter `Site site = Site::here()`; nested calls inherit the
/// outermost source line, which is the user's, and the name of the innermost layer that has one. Costs a copy
/// of three words each way.
class CallScope {
 public:
  explicit CallScope(Site site, const char* module = nullptr)
      : CallScope(CallSite{current_.site.file ? current_.site : site, module ? module : current_.module}) {}
  /// Resumes a call recorded earlier: backward runs for the call of its forward pass.
  explicit CallScope(const CallSite& noted) : scope_(current_, noted) {}

  static const CallSite& current() { return current_; }

 private:
  static inline thread_local CallSite current_ = {};
  Override<CallSite> scope_;
};

}  // namespace tessera
