#include "report/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::report {
namespace {

TEST(FormatDuration, HoursMinutesSeconds) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(7), "0:07");
  EXPECT_EQ(format_duration(59.4), "0:59");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(3599.9), "1:00:00");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(360000), "100:00:00");
  for (const double unknown : {-1.0, 1e9, std::numeric_limits<double>::infinity(), std::nan("")})
    EXPECT_EQ(format_duration(unknown), "?");
}

TEST(FormatCount, ThreeDigitsOrSo) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(12), "12");
  EXPECT_EQ(format_count(9999), "9999");
  EXPECT_EQ(format_count(10000), "10k");
  EXPECT_EQ(format_count(456000), "456k");
  EXPECT_EQ(format_count(1.23e6), "1.23M");
  EXPECT_EQ(format_count(7.5e9), "7.50G");
}

/// What `act` prints on standard error, which is a file: no terminal.
template <class F>
std::string printed(F&& act) {
  testing::internal::CaptureStderr();
  act();
  return testing::internal::GetCapturedStderr();
}

TEST(Progress, WithoutATerminalPrintsPlainLines) {
  const std::string text = printed([] {
    Progress progress(Progress::Mode::automatic, 0);
    progress.show({.step = 1, .steps = 3, .loss = 2.5});
    progress.show({.step = 3,
                   .steps = 3,
                   .loss = 1.25,
                   .lr = 1e-3,
                   .grad_norm = 0.5,
                   .tokens_per_s = 12000,
                   .ms_per_step = 3.25,
                   .memory_gib = 1,
                   .peak_gib = 2,
                   .data_wait = 0.25});
    progress.say("saved");
    progress.finish();
  });
  EXPECT_EQ(text.substr(0, text.find('\n')), "step 1/3  loss 2.5000");  // what is not known is left out
  for (const char* part : {"step 3/3  loss 1.2500", "lr 1.00e-03", "|g| 0.500", "12k tok/s", "3.2 ms/step",
                           "ETA 0:00", "1.00/2.00 GiB", "data 25%", "\nsaved\n"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  EXPECT_EQ(text.find_first_of("\r\033"), std::string::npos);
}

TEST(Progress, LinesHaveTheirDistanceButTheLastIsThere) {
  const std::string text = printed([] {
    Progress progress(Progress::Mode::automatic, std::numeric_limits<double>::infinity());
    for (int step = 1; step <= 50; ++step) progress.show({.step = step, .steps = 50});
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
  EXPECT_NE(text.find("step 1/50"), std::string::npos);
  EXPECT_NE(text.find("step 50/50"), std::string::npos);
}

TEST(Progress, ShowsANormThatIsNone) {
  const std::string text = printed([] {
    Progress(Progress::Mode::automatic, 0)
        .show({.step = 1, .steps = 1, .loss = std::nan(""), .grad_norm = std::nan("")});
  });
  EXPECT_NE(text.find("loss nan"), std::string::npos) << text;
  EXPECT_NE(text.find("|g| nan"), std::string::npos) << text;
}

TEST(Progress, QuietPrintsNothing) {
  EXPECT_EQ(printed([] {
              Progress progress(Progress::Mode::quiet, 0);
              progress.show({.step = 1, .steps = 1});
              progress.say("saved");
              progress.finish();
            }),
            "");
}

}  // namespace
}  // namespace tessera::report
