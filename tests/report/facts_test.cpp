#include "report/facts.h"

#include <gtest/gtest.h>

namespace tessera::report {
namespace {

TEST(UtcNow, IsTheOrderOfTime) {
  const std::string now = utc_now();
  EXPECT_EQ(now.size(), 20u);
  EXPECT_EQ(now[10], 'T');
  EXPECT_EQ(now[19], 'Z');
  EXPECT_GE(utc_now(), now);
}

}  // namespace
}  // namespace tessera::report
