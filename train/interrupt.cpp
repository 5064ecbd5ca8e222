#include "train/interrupt.h"

#include <unistd.h>
#include <csignal>

namespace tessera::train {
namespace {

volatile std::sig_atomic_t g_signal = 0;
struct sigaction g_former[2];
constexpr int kSignals[2] = {SIGINT, SIGTERM};

void on_signal(int signal) {
  if (g_signal) _exit(128 + signal);
  g_signal = signal;
}

}  // namespace

InterruptGuard::InterruptGuard() {
  g_signal = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &action, &g_former[i]);
}

InterruptGuard::~InterruptGuard() {
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &g_former[i], nullptr);
}

int InterruptGuard::signal_received() {
  return g_signal;
}

}  // namespace tessera::train
