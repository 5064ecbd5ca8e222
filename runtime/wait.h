#pragma once

#include <functional>
#include <memory>
#include <string_view>

namespace tessera {

/// The clock and the sleep function of a wait: those of the machine, or of a test.
struct WaitClock {
  std::function<double()> seconds;   // since some fixed point
  std::function<void(double)> rest;  // lets other threads run; for this many seconds; 0: only yields
  static const WaitClock& machine();
};

/// How the host waits for a device: returns when `ready()` is true. Throws Error,
/// naming `what`, after wait_limit() seconds. It polls continuously for the first 20 ms, so that short waits
/// end within a microsecond; after that it sleeps between polls, for a thousandth of the time waited so far
/// and at most 0.1 s.
void wait_until(const std::function<bool()>& ready, std::string_view what,
                const WaitClock& clock = WaitClock::machine());

/// Sees the waits of the host for a device before it reads what was computed there (Device::synchronize,
/// Event::wait), on the thread that waits. For work whose validity the host learns later than it issues the
/// work (comm/nccl.h).
class WaitObserver {
 public:
  virtual ~WaitObserver() = default;
  virtual void begins() noexcept {}
  /// The device has finished. Throws if what it computed must not be read.
  virtual void ended() = 0;
};

/// From now on, or no longer; any thread.
void add_wait_observer(std::shared_ptr<WaitObserver> observer);
void remove_wait_observer(const WaitObserver* observer);
/// Calls wait() between begins() and ended() of all observers.
void observed_wait(const std::function<void()>& wait);

/// Timeout of a wait in seconds: 3600, or the environment variable TESSERA_WAIT_SECONDS; 0: none. Throws if
/// the variable is invalid.
double wait_limit();
/// For all threads, from now on. Throws if `seconds` is negative or not finite.
void set_wait_limit(double seconds);

}  // namespace tessera
