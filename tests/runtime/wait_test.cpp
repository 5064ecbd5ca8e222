#include "runtime/wait.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/text.h"
#include "tests/comma_locale.h"
#include "tests/errors.h"

namespace tessera {
namespace {

/// A clock that goes on only while a wait rests; a turn takes a millisecond.
struct TestClock {
  double now = 100;
  std::vector<double> rests;

  WaitClock clock() {
    return {[this] { return now; },
            [this](double seconds) {
              rests.push_back(seconds);
              now += std::max(seconds, 1e-3);
            }};
  }
};

/// Restores the limit.
struct Limit {
  double before = wait_limit();
  explicit Limit(double seconds) { set_wait_limit(seconds); }
  ~Limit() { set_wait_limit(before); }
};

TEST(Wait, ReturnsAtOnceForWhatIsDone) {
  TestClock time;
  wait_until([] { return true; }, "nothing", time.clock());
  EXPECT_TRUE(time.rests.empty());
}

TEST(Wait, PollsFirstAndSleepsLater) {
  TestClock time;
  wait_until([&] { return time.now >= 105; }, "five seconds", time.clock());
  ASSERT_GT(time.rests.size(), 20u);
  EXPECT_EQ(time.rests.front(), 0) << "a short wait is not made longer by a sleep";
  for (const double rest : time.rests) EXPECT_LE(rest, 5e-3) << "a thousandth of what has passed";
  EXPECT_GT(time.rests.back(), 4e-3) << "a long wait leaves the core to others";
}

TEST(Wait, ThrowsAfterItsLimitAndNamesWhatItWaitedFor) {
  const Limit limit(30);
  TestClock time;
  const std::string said =
      message_of([&] { wait_until([] { return false; }, "the compute stream of cuda:0", time.clock()); });
  EXPECT_NE(said.find("the compute stream of cuda:0: not done after 30 s"), std::string::npos) << said;
  EXPECT_NE(said.find("TESSERA_WAIT_SECONDS"), std::string::npos) << said;
  EXPECT_GE(time.now, 130);
  EXPECT_LE(time.now, 130.2);
}

TEST(Wait, HasNoLimitIfThatIsZero) {
  const Limit limit(0);
  TestClock time;
  wait_until([&] { return time.now > 1e4; }, "hours", time.clock());
  EXPECT_GT(time.now, 1e4);
}

TEST(Wait, RefusesALimitThatIsNone) {
  EXPECT_THROW(set_wait_limit(-1), Error);
  EXPECT_THROW(set_wait_limit(NAN), Error);
}

TEST(Wait, SecondsOfTheEnvironmentHaveAPointInEveryLocale) {
  const char* const name = "TESSERA_SECONDS_OF_A_TEST";
  const auto seconds = [&](const char* text) {
    ::setenv(name, text, 1);
    return seconds_of_environment(name, 7);
  };
  const CommaLocale comma;
  EXPECT_EQ(seconds("0.5"), 0.5);
  EXPECT_EQ(seconds("1e3"), 1000);
  EXPECT_EQ(seconds(""), 7);
  for (const char* const text : {"0,5", "-1", "inf", "nan", "1s", " 1"})
    expect_error([&] { seconds(text); }, {name, text, "expected seconds, 0 for no limit"});
  ::unsetenv(name);
  EXPECT_EQ(seconds_of_environment(name, 7), 7);
}

/// Notes what happens, and throws from the end of a wait.
struct Notes : WaitObserver {
  explicit Notes(std::string& all, bool throws = false) : all(all), throws(throws) {}
  void begins() noexcept override { all += "begins "; }
  void ended() override {
    all += "ended ";
    check(!throws, "what the device computed is not valid");
  }
  std::string& all;
  bool throws;
};

TEST(Wait, ObserversSeeItBeginAndEndAndMayThrow) {
  std::string all;
  const auto wait = [&] { all += "waits "; };
  observed_wait(wait);
  EXPECT_EQ(std::exchange(all, ""), "waits ");
  const auto notes = std::make_shared<Notes>(all), fails = std::make_shared<Notes>(all, true);
  add_wait_observer(notes);
  observed_wait(wait);
  EXPECT_EQ(std::exchange(all, ""), "begins waits ended ");
  add_wait_observer(fails);
  for (int i = 0; i < 2; ++i) expect_error([&] { observed_wait(wait); }, {"not valid"});
  EXPECT_EQ(std::exchange(all, ""), "begins begins waits ended ended begins begins waits ended ended ");
  remove_wait_observer(fails.get());
  observed_wait(wait);
  EXPECT_EQ(std::exchange(all, ""), "begins waits ended ");
  // An observer that ends during the wait still sees its end.
  observed_wait([&] { remove_wait_observer(notes.get()); });
  EXPECT_EQ(std::exchange(all, ""), "begins ended ");
  observed_wait(wait);
  EXPECT_EQ(all, "waits ");
}

}  // namespace
}  // namespace tessera
