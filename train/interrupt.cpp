#include "train/interrupt.h"

#include <unistd.h>

#include <csignal>
#include <iterator>

namespace tessera::train {
namespace {

volatile std::sig_atomic_t g_signal = 0;
constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
struct sigaction g_former[std::size(kSignals)];

void on_signal(int signal) {
  if (g_signal) _exit(128 + signal);
  g_signal = signal;
}

}  // namespace

InterruptGuard::InterruptGuard() {
  g_signal = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    sigaction(kSignals[i], &action, &g_former[i]);
    // As nohup asks: the run outlives its terminal.
    if (kSignals[i] == SIGHUP && g_former[i].sa_handler == SIG_IGN) sigaction(SIGHUP, &g_former[i], nullptr);
  }
}

InterruptGuard::~InterruptGuard() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &g_former[i], nullptr);
}

int InterruptGuard::signal_received() {
  return g_signal;
}

}  // namespace tessera::train
