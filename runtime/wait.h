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

/// Every wait of the host for a device is this function: it polls `ready()` and returns when that is true.
/// Throws Error, naming `what`, once wait_limit() seconds have passed. For the first 20 ms it polls all the
/// time, so that a short wait ends within a microsecond; then it sleeps for a thousandth of the time that has
/// passed between two polls.
void wait_until(const std::function<bool()>& ready, std::string_view what,
                const WaitClock& clock = WaitClock::machine());

/// Seconds that a wait may take: 3600, or what the environment variable TESSERA_WAIT_SECONDS says; 0: no
/// limit. Throws if the variable is no such number.
double wait_limit();
/// Of all threads from now on. Throws if `seconds` is negative or no number.
void set_wait_limit(double seconds);

}  // namespace tessera
