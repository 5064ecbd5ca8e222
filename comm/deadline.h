#pragma once

#include <chrono>

namespace tessera::comm {

/// Seconds that a call of a communicator may wait for other ranks: 600, or what TESSERA_COMM_SECONDS says; 0:
/// no limit. A rank that dies is noticed at once; this is for one that hangs. Throws if the variable is no
/// such number.
double call_timeout();

/// Another limit for this thread while it lives; 0: none. For waits whose length is another rank's work, such
/// as data that one rank prepares for all.
class TimeoutScope {
 public:
  explicit TimeoutScope(double seconds);
  ~TimeoutScope();
  TimeoutScope(const TimeoutScope&) = delete;

 private:
  double outer_;
};

/// A point in time that a wait must not pass.
class Deadline {
 public:
  /// After so many seconds; 0: never.
  explicit Deadline(double seconds = call_timeout());
  double seconds() const { return seconds_; }
  bool passed() const;
  /// For poll(): until the deadline, at most `most`; -1 for no end.
  int milliseconds(int most = -1) const;

 private:
  double seconds_;
  std::chrono::steady_clock::time_point end_;
};

}  // namespace tessera::comm
