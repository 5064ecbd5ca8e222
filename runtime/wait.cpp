#include "runtime/wait.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera {
namespace {

constexpr double kPolling = 0.02;     // seconds before a wait begins to sleep
constexpr double kShare = 1e-3;       // of the time that has passed: what a sleep may add to the wait
constexpr double kLongestRest = 0.1;  // seconds: how late a limit is noticed
constexpr double kDefaultLimit = 3600;

/// Negative: not determined yet.
std::atomic<double> limit = -1;

struct Observers {
  std::mutex mutex;
  std::vector<std::shared_ptr<WaitObserver>> all;
  std::atomic<bool> any = false;
};

Observers& observers() {
  static auto& made = *new Observers;  // threads may wait while the program ends
  return made;
}

}  // namespace

const WaitClock& WaitClock::machine() {
  static const auto& clock = *new WaitClock{
      [] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
      },
      [](double seconds) {
        if (seconds > 0)
          std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        else
          std::this_thread::yield();
      }};
  return clock;
}

double wait_limit() {
  double seconds = limit.load(std::memory_order_relaxed);
  if (seconds < 0) {
    const double found = seconds_of_environment("TESSERA_WAIT_SECONDS", kDefaultLimit);
    if (limit.compare_exchange_strong(seconds, found)) seconds = found;
  }
  return seconds;
}

void set_wait_limit(double seconds) {
  check(std::isfinite(seconds) && seconds >= 0, "set_wait_limit: ", seconds,
        " seconds; expected 0 (no limit) or more");
  limit = seconds;
}

void add_wait_observer(std::shared_ptr<WaitObserver> observer) {
  Observers& here = observers();
  const std::lock_guard lock(here.mutex);
  here.all.push_back(std::move(observer));
  here.any = true;
}

void remove_wait_observer(const WaitObserver* observer) {
  Observers& here = observers();
  const std::lock_guard lock(here.mutex);
  std::erase_if(here.all, [&](const auto& one) { return one.get() == observer; });
  here.any = !here.all.empty();
}

void observed_wait(const std::function<void()>& wait) {
  Observers& here = observers();
  if (!here.any) return wait();
  std::vector<std::shared_ptr<WaitObserver>> all;
  {
    const std::lock_guard lock(here.mutex);
    all = here.all;
  }
  for (const auto& observer : all) observer->begins();
  wait();
  for (const auto& observer : all) observer->ended();
}

void wait_until(const std::function<bool()>& ready, std::string_view what, const WaitClock& clock) {
  if (ready()) return;
  const double most = wait_limit(), begin = clock.seconds();
  while (!ready()) {
    const double passed = clock.seconds() - begin;
    check(most == 0 || passed < most, what, ": not done after ", most,
          " s; the device may hang, or wait for work that is never issued (TESSERA_WAIT_SECONDS or "
          "set_wait_limit allow more; 0 sets no limit)");
    clock.rest(passed < kPolling ? 0 : std::min(passed * kShare, kLongestRest));
  }
}

}  // namespace tessera
