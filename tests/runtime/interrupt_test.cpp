#include "runtime/interrupt.h"

#include <gtest/gtest.h>

#include <csignal>

#include "tests/errors.h"

namespace tessera {
namespace {

volatile std::sig_atomic_t g_caught = 0;

TEST(InterruptGuard, GivesTheFormerHandlersBack) {
  std::signal(SIGINT, [](int signal) { g_caught = signal; });
  {
    const InterruptGuard guard;
    EXPECT_EQ(InterruptGuard::signal_received(), 0);
    std::raise(SIGINT);
    EXPECT_EQ(InterruptGuard::signal_received(), SIGINT);
    EXPECT_EQ(g_caught, 0);
  }
  std::raise(SIGINT);
  EXPECT_EQ(g_caught, SIGINT);
  std::signal(SIGINT, SIG_DFL);
}

TEST(InterruptGuard, LeavesHandlersThatWereSetSince) {
  {
    const InterruptGuard guard;
    std::signal(SIGINT, SIG_IGN);
  }
  EXPECT_EQ(std::signal(SIGINT, SIG_DFL), SIG_IGN);
  EXPECT_EQ(std::signal(SIGTERM, SIG_DFL), SIG_DFL);
}

TEST(InterruptGuard, OneWithinAnotherChangesNothing) {
  const InterruptGuard outer;
  std::raise(SIGTERM);
  {
    const InterruptGuard inner;
    EXPECT_EQ(InterruptGuard::signal_received(), SIGTERM);
  }
  EXPECT_EQ(InterruptGuard::signal_received(), SIGTERM);
  EXPECT_EQ(message_of([] { check_interrupt(); }), "interrupted by SIGTERM");
}

TEST(InterruptGuard, ChecksThrowOnlyWhileOneLives) {
  {
    const InterruptGuard guard;
    check_interrupt();
    std::raise(SIGINT);
    try {
      check_interrupt();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Interrupted& interrupted) {
      EXPECT_EQ(interrupted.signal(), SIGINT);
    }
  }
  check_interrupt();
}

TEST(InterruptGuardDeathTest, TheFirstSignalIsAcknowledgedByTheHandler) {
  EXPECT_EXIT(
      {
        const InterruptGuard guard("stopping\n");
        std::raise(SIGINT);
        std::_Exit(7);
      },
      testing::ExitedWithCode(7), "^stopping\n$");
}

TEST(InterruptGuardDeathTest, TheNoticeIsThatOfTheStateOfTheWork) {
  EXPECT_EXIT(
      {
        const InterruptGuard guard("waiting\n");
        const InterruptGuard inner("not this one\n");
        InterruptGuard::set_notice("saving\n");
        std::raise(SIGTERM);
        std::_Exit(7);
      },
      testing::ExitedWithCode(7), "^saving\n$");
}

TEST(InterruptGuardDeathTest, ASecondSignalEndsAtOnce) {
  const auto twice = [](int signal) {
    const InterruptGuard guard;
    std::raise(signal);
    std::raise(signal);
  };
  EXPECT_EXIT(twice(SIGINT), testing::ExitedWithCode(130), "");
  EXPECT_EXIT(twice(SIGTERM), testing::ExitedWithCode(143), "");
}

}  // namespace
}  // namespace tessera
