#pragma once

#include <cstddef>
#include <vector>

#include "runtime/error.h"
#include "runtime/override.h"

namespace tessera {

/// Repeats a piece of code with the values that it took from outside before: random streams, state of layers.
/// While a Replay in mode `record` lives on this thread, each value that next() returns is noted in `log`; in
/// mode `replay` the values are taken from it, in order. Of nested scopes the innermost replay supplies the
/// value, and the recording scopes inside it note it, too.
template <class T>
class Replay {
 public:
  enum class Mode { record, replay };
  Replay(Mode mode, std::vector<T>& log) : mode_(mode), log_(log) {}

  /// The next value: from the log of a replay, else made by `make`. Throws `too_many` where the log ends.
  template <class Make>
  static T next(const char* too_many, Make&& make) {
    Replay* const from = replaying();
    check(!from || from->used_ < from->log_.size(), too_many);
    T value = from ? from->log_[from->used_++] : make();
    for (Replay* noting = innermost_; noting != from; noting = noting->scope_.outer())
      noting->log_.push_back(value);
    return value;
  }
  /// Number of values that were taken from the log.
  size_t used() const { return used_; }
  /// The innermost scope in mode `replay`, or null.
  static Replay* replaying() {
    Replay* scope = innermost_;
    while (scope && scope->mode_ == Mode::record) scope = scope->scope_.outer();
    return scope;
  }
  /// How many scopes, of both modes, this thread is in.
  static int depth() {
    int depth = 0;
    for (const Replay* scope = innermost_; scope; scope = scope->scope_.outer()) ++depth;
    return depth;
  }

 private:
  static inline constinit thread_local Replay* innermost_ = nullptr;
  const Mode mode_;
  std::vector<T>& log_;
  size_t used_ = 0;
  Override<Replay*> scope_{innermost_, this};
};

}  // namespace tessera
