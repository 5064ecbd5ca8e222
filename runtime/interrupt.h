#pragma once

#include <csignal>
#include <initializer_list>

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

/// For the lifetime of the guard, SIGINT, SIGTERM and (unless ignored, as by nohup) SIGHUP request an orderly
/// stop instead of killing the process: loops finish their step, save and return, or call check_interrupt().
/// A second signal kills the process. Nested guards do nothing; the outermost one restores the previous
/// handlers, where no others have been set since. Not thread-safe.
class InterruptGuard {
 public:
  /// `notice`: written to the standard error by the handler itself when the first signal arrives, so that it
  /// is acknowledged however long the current step takes; null: nothing. A string literal.
  explicit InterruptGuard(const char* notice = nullptr);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  /// Replaces the notice of the outermost guard, when the work enters a phase that is ended differently.
  static void set_notice(const char* notice);
  /// The signal that arrived since the outermost guard was made, or 0.
  static int signal_received();
};

/// For the lifetime of the scope this thread takes no signals, or none of the given ones, and threads that it
/// starts meanwhile never do: signals are for the program's own threads. They wait for the scope's end.
class WithoutSignals {
 public:
  WithoutSignals();
  explicit WithoutSignals(std::initializer_list<int> signals);
  ~WithoutSignals();
  WithoutSignals(const WithoutSignals&) = delete;
  /// The signals that the thread held back before.
  const sigset_t& before() const { return before_; }

 private:
  sigset_t before_;
};

/// Throws Interrupted if a guard is alive and a signal has arrived. For loops that may take seconds; call it
/// where the state is consistent. Thread-safe.
void check_interrupt(Site site = Site::here());

}  // namespace tessera
