#pragma once

namespace tessera::train {

/// While it lives, SIGINT, SIGTERM and, unless it was ignored (nohup), SIGHUP ask for an orderly end instead
/// of killing the process: the loop finishes its step, saves and leaves. A second signal ends the process at
/// once. One at a time; the former handlers come back at the end.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  /// The signal that came, or 0.
  static int signal_received();
};

}  // namespace tessera::train
