#include "comm/deadline.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kDefault = 600;

thread_local double t_timeout = -1;  // negative: the environment's

}  // namespace

double call_timeout() {
  if (t_timeout >= 0) return t_timeout;
  static const double of_environment = seconds_of_environment("TESSERA_COMM_SECONDS", kDefault);
  return of_environment;
}

TimeoutScope::TimeoutScope(double seconds) : scope_(t_timeout, seconds) {
  check(std::isfinite(seconds) && seconds >= 0, "comm: a timeout of ", seconds, " s; expected 0 or more");
}

Deadline::Deadline(double seconds)
    : seconds_(seconds),
      end_(Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}

bool Deadline::passed() const {
  return seconds_ > 0 && Clock::now() >= end_;
}

int Deadline::milliseconds(int most) const {
  if (seconds_ == 0) return most;
  const double left = std::chrono::duration<double, std::milli>(end_ - Clock::now()).count();
  const double rounded = std::clamp(std::ceil(left), 0.0, double(std::numeric_limits<int>::max()));
  return most < 0 ? int(rounded) : std::min(most, int(rounded));
}

}  // namespace tessera::comm
