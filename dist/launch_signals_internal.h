#pragma once

#include <array>
#include <atomic>
#include <csignal>

#include "comm/socket.h"

/// What a launcher sets for the time of a launch: its handlers of signals, and whose children orphans become.

namespace tessera::dist {

/// Makes SIGINT, SIGTERM and SIGHUP readable while it lives, whichever thread of the process receives them.
/// One that was ignored stays so, as nohup asks.
class LaunchSignals {
 public:
  LaunchSignals();
  ~LaunchSignals() { restore(); }
  LaunchSignals(const LaunchSignals&) = delete;
  int file() const { return arrivals_.number(); }
  /// The next signal that has arrived, or 0.
  int take() const;
  void restore() const;

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  static inline std::atomic<int> g_notes{-1};  // the pipe's end for the handler
  std::array<struct sigaction, kSignals.size()> former_{};
  comm::File arrivals_, notes_;
};

/// While it lives, processes whose parents have ended become children of this one, which can then tell
/// whether any is left of a rank that was a script.
class OrphanReaper {
 public:
  OrphanReaper();
  ~OrphanReaper();
  OrphanReaper(const OrphanReaper&) = delete;

 private:
  int former_ = 0;
};

}  // namespace tessera::dist
