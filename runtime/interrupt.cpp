#include "runtime/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iterator>

namespace tessera {
namespace {

// Lock-free atomics are what a signal handler may share with the threads of the process.
std::atomic<int> g_signal{0}, g_guards{0};
std::atomic<const char*> g_notice{nullptr};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<const char*>::is_always_lock_free);

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
struct sigaction g_former[std::size(kSignals)];

void on_signal(int signal) {
  if (g_signal.exchange(signal) != 0) _exit(128 + signal);
  const int error = errno;
  // What cannot be written is lost: a signal handler cannot report an error.
  if (const char* const notice = g_notice)
    if (::write(STDERR_FILENO, notice, std::strlen(notice)) < 0) errno = error;
  errno = error;
}

}  // namespace

Interrupted::Interrupted(int signal, const char* file, int line)
    : Error(std::string("interrupted by ") + (signal == SIGINT    ? "Ctrl-C"
                                              : signal == SIGTERM ? "SIGTERM"
                                              : signal == SIGHUP  ? "a hangup"
                                                                  : "a signal"),
            file, line),
      signal_(signal) {}

InterruptGuard::InterruptGuard(const char* notice) {
  if (g_guards++ > 0) return;
  g_signal = 0;
  g_notice = notice;
  struct sigaction action {};
  action.sa_handler = on_signal;
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    sigaction(kSignals[i], &action, &g_former[i]);
    // As nohup asks: the run outlives its terminal.
    if (kSignals[i] == SIGHUP && g_former[i].sa_handler == SIG_IGN) sigaction(SIGHUP, &g_former[i], nullptr);
  }
}

InterruptGuard::~InterruptGuard() {
  if (--g_guards > 0) return;
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    struct sigaction now {};
    sigaction(kSignals[i], nullptr, &now);
    if (now.sa_handler == on_signal) sigaction(kSignals[i], &g_former[i], nullptr);
  }
}

void InterruptGuard::set_notice(const char* notice) {
  if (g_guards > 0) g_notice = notice;
}

int InterruptGuard::signal_received() {
  return g_signal;
}

WithoutSignals::WithoutSignals() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before_);
}

WithoutSignals::WithoutSignals(std::initializer_list<int> signals) {
  sigset_t some;
  ::sigemptyset(&some);
  for (const int signal : signals) ::sigaddset(&some, signal);
  ::pthread_sigmask(SIG_BLOCK, &some, &before_);
}

WithoutSignals::~WithoutSignals() {
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void check_interrupt(Site site) {
  if (g_guards > 0 && g_signal != 0) throw Interrupted(g_signal, site.file, site.line);
}

}  // namespace tessera
