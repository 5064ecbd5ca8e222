#include "comm/ending_internal.h"

#include <chrono>
#include <exception>
#include <future>
#include <thread>
#include <utility>

#include "comm/deadline.h"

namespace tessera::comm {

bool all_end(const Communicator& host) noexcept {
  try {
    if (std::uncaught_exceptions() > 0) {
      // Else the others would wait for this rank. A failure that is known already stays the cause.
      host.fail("it ended with an exception");
      return false;
    }
    const TimeoutScope patience(0);  // rank 0 may still be writing its results; a death is noticed anyway
    host.barrier();
    return true;
  } catch (const std::exception&) {  // a rank has failed; the program finds out in another call
    return false;
  }
}

bool returns_in_time(std::function<void()> f) {
  std::packaged_task<void()> task(std::move(f));
  const std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  const double seconds = call_timeout();
  if (seconds > 0) return done.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
  done.wait();
  return true;
}

}  // namespace tessera::comm
