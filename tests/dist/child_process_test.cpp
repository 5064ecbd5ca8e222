#include "dist/child_process.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <csignal>

#include "runtime/interrupt.h"
#include "tests/folder.h"

namespace tessera::dist {
namespace {

ChildEnd end_of_shell(const TemporaryFolder& root, const std::string& script) {
  ChildProcess child("/bin/sh", {"-c", script}, root / "log");
  return collect(child);
}

TEST(ChildProcess, TellsHowItEnded) {
  const TemporaryFolder root;
  EXPECT_EQ(end_of_shell(root, "exit 3").code, 3);
  EXPECT_EQ(end_of_shell(root, "kill -KILL $$").signal, SIGKILL);
  EXPECT_EQ(end_of_shell(root, "kill -TERM $$").code, 128 + SIGTERM);
}

// As some launchers leave it to the programs that they start.
TEST(ChildProcess, TellsHowItEndedWhereTheEndsOfProcessesAreIgnored) {
  const TemporaryFolder root;
  struct sigaction before {};
  ::sigaction(SIGCHLD, nullptr, &before);
  ::signal(SIGCHLD, SIG_IGN);
  const auto code = [&]() -> int {
    try {
      return end_of_shell(root, "exit 3").code;
    } catch (const Error&) {
      return -1;
    }
  };
  EXPECT_EQ(code(), 3);
  ::sigaction(SIGCHLD, &before, nullptr);
}

bool g_signal_after_fork = false;
void send_after_fork() {
  if (g_signal_after_fork) ::raise(SIGTERM);
}

// One that comes before the program has begun must not be taken by the handler of this process.
TEST(ChildProcess, ASignalBetweenForkAndProgramEndsIt) {
  const TemporaryFolder root;
  ASSERT_EQ(::pthread_atfork(nullptr, nullptr, send_after_fork), 0);
  const InterruptGuard interrupts;
  g_signal_after_fork = true;
  const ChildEnd end = end_of_shell(root, "exit 0");
  g_signal_after_fork = false;
  EXPECT_EQ(end.signal, SIGTERM);
  EXPECT_EQ(InterruptGuard::signal_received(), 0);
}

// What a user ignores, as by nohup, the program ignores too.
TEST(ChildProcess, KeepsIgnoredSignals) {
  const TemporaryFolder root;
  struct sigaction before {};
  ::sigaction(SIGHUP, nullptr, &before);
  ::signal(SIGHUP, SIG_IGN);
  EXPECT_EQ(end_of_shell(root, "kill -HUP $$; exit 4").code, 4);
  ::sigaction(SIGHUP, &before, nullptr);
}

}  // namespace
}  // namespace tessera::dist
