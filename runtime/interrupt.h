#pragma once

#include "runtime/error.h"

namespace tessera {

/// Thrown by check_interrupt(). Its handlers leave everything as after any other error.
class Interrupted : public Error {
 public:
  Interrupted(int signal, const char* file, int line);
  int signal() const { return signal_; }

 private:
  int signal_;
};

/// While it lives, SIGINT, SIGTERM and, unless it was ignored (nohup), SIGHUP ask for an orderly end instead
/// of killing the process: loops finish their step, save and return, or call check_interrupt(). A second
/// signal ends the process at once. A guard within the scope of another one changes nothing; the former
/// handlers come back with the end of the outermost. Made and destroyed by one thread at a time.
class InterruptGuard {
 public:
  /// `notice`: written to the standard error by the handler itself when the first signal arrives, so that it
  /// is acknowledged however long the current step takes; null: nothing. A string literal.
  explicit InterruptGuard(const char* notice = nullptr);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  /// Replaces the notice of the outermost guard, where the work comes to a state that is left otherwise.
  static void set_notice(const char* notice);
  /// The signal that arrived since the outermost guard was made, or 0.
  static int signal_received();
};

/// Throws Interrupted if a guard lives and a signal has arrived. For loops that may take seconds, between
/// states that may be left. Any thread.
void check_interrupt(Site site = Site::here());

}  // namespace tessera
