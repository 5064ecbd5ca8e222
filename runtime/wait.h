#pragma once

#include <functional>
#include <string_view>

namespace tessera {

/// The clock and the sleep function of a wait: those of the machine, or of a test.
struct WaitClock {
  std::function<double()> seconds;   // since some fixed point
  std::function<void(double)> rest;  // lets other threads run; for this many seconds; 0: only yields
  static const WaitClock& machine();
};

/// All waits of the host for a device use this function: it returns when `ready()` is true. Throws Error,
/// naming `what`, after wait_limit() seconds. It polls continuously for the first 20 ms, so that short waits
/// end within a microsecond; after that it sleeps between polls, for a thousandth of the time waited so far
/// and at most 0.1 s.
void wait_until(const std::function<bool()>& ready, std::string_view what,
                const WaitClock& clock = WaitClock::machine());

/// Timeout of a wait in seconds: 3600, or the environment variable TESSERA_WAIT_SECONDS; 0: none. Throws if
/// the variable is invalid.
double wait_limit();
/// For all threads, from now on. Throws if `seconds` is negative or not finite.
void set_wait_limit(double seconds);

}  // namespace tessera
