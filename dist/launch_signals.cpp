#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "dist/launch_signals_internal.h"
#include "runtime/error.h"

namespace tessera::dist {

LaunchSignals::LaunchSignals() {
  int ends[2];
  check(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "launch: pipe: ", std::strerror(errno));
  arrivals_ = comm::File(ends[0]), notes_ = comm::File(ends[1]);
  g_notes = notes_.number();
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = [](int signal) {
    const int error = errno;
    const auto note = static_cast<unsigned char>(signal);
    // What cannot be written is lost: then the pipe is full, and enough signals wait in it.
    [[maybe_unused]] const ssize_t written = ::write(g_notes, &note, 1);
    errno = error;
  };
  for (size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &action, &former_[i]);
    if (former_[i].sa_handler == SIG_IGN) ::sigaction(kSignals[i], &former_[i], nullptr);
  }
}

int LaunchSignals::take() const {
  unsigned char signal = 0;
  return ::read(arrivals_.number(), &signal, 1) == 1 ? signal : 0;
}

void LaunchSignals::restore() const {
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &former_[i], nullptr);
}

OrphanReaper::OrphanReaper() {
  ::prctl(PR_GET_CHILD_SUBREAPER, &former_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

OrphanReaper::~OrphanReaper() {
  ::prctl(PR_SET_CHILD_SUBREAPER, former_);
}

}  // namespace tessera::dist
