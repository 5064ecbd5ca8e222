#pragma once

#include <chrono>

#include "runtime/override.h"

namespace tessera::comm {

/// Timeout in seconds of a call that waits for other ranks: TESSERA_COMM_SECONDS, by default 600; 0: none. A
/// rank that dies is noticed at once; the timeout is for one that hangs. Throws if the variable is not a
/// valid number.
double call_timeout();

/// Overrides call_timeout() on this thread for the lifetime of the scope; 0: none. For waits that last as
/// long as another rank works, such as on data that one rank prepares for all.
class TimeoutScope {
 public:
  explicit TimeoutScope(double seconds);

 private:
  Override<double> scope_;
};

/// A point in time that a wait must not pass.
class Deadline {
 public:
  /// After so many seconds; 0: never.
  explicit Deadline(double seconds = call_timeout());
  double seconds() const { return seconds_; }
  bool passed() const;
  /// Timeout for poll(): milliseconds until the deadline, at most `most`; -1: infinite.
  int milliseconds(int most = -1) const;

 private:
  double seconds_;
  std::chrono::steady_clock::time_point end_;
};

}  // namespace tessera::comm
