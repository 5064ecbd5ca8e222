#include "runtime/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/errors.h"

namespace tessera {
namespace {

TEST(Statistics, CorrelationsAreThoseOfTheDefinition) {
  const std::vector<double> x{1, 2, 2, 3}, y{1, 2, 3, 4}, cubes{1, 8, 27, 64}, down{4, 3, 2, 1},
      same{5, 5, 5, 5};
  EXPECT_DOUBLE_EQ(pearson(y, y), 1);
  EXPECT_DOUBLE_EQ(pearson(y, down), -1);
  EXPECT_NEAR(pearson(y, cubes), 0.951369855792, 1e-11);  // 104 / sqrt(5 * 2390)
  EXPECT_DOUBLE_EQ(spearman(y, cubes), 1);
  EXPECT_NEAR(spearman(x, y), 4.5 / std::sqrt(4.5 * 5), 1e-14);  // equal values share their rank
  EXPECT_TRUE(std::isnan(pearson(y, same)));
  EXPECT_TRUE(std::isnan(spearman(std::vector<double>{1}, std::vector<double>{1})));
  // The mean of ten times 0.1 is not 0.1.
  const std::vector<double> tenths(10, 0.1), nans(10, std::nan(""));
  EXPECT_TRUE(std::isnan(pearson(tenths, tenths)));
  std::vector<double> some = tenths, counted(10);
  for (size_t i = 0; i < counted.size(); ++i) counted[i] = double(i), some[i] = i % 3 ? 1 : std::nan("");
  for (const std::vector<double>& undefined : {nans, some}) {
    EXPECT_TRUE(std::isnan(pearson(undefined, counted)));
    EXPECT_TRUE(std::isnan(spearman(undefined, counted)));
  }
  expect_error([&] { pearson(x, std::vector<double>{1}); }, {"4 and 1 values"});
}

}  // namespace
}  // namespace tessera
