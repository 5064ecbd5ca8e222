#include "bench/collective_bench.h"

#include <gtest/gtest.h>

#include "comm/dry.h"
#include "tests/tensors.h"

namespace tessera::bench {
namespace {

std::vector<Record> measured(const comm::DryRun& dry, const CollectiveOptions& options) {
  return bench_collectives(dist::World(dry.communicator(), dry.communicator()), kCpu, options);
}

// It made 11 calls of each size, whatever the time: minutes for 1 GiB on a busy CPU.
TEST(CollectiveBench, MakesThreeCallsWhereTheTimeAllowsNoMore) {
  const comm::DryRun dry(0, 2);
  const auto records = measured(
      dry, {.names = {"all_reduce", "broadcast"}, .least = 8, .most = 64, .factor = 8, .seconds = 1e-9});
  ASSERT_EQ(records.size(), 4u);
  EXPECT_GT(records[0].ms.p50, 0);
  EXPECT_EQ(dry.counts()["all_reduce"].calls, 2 * 3);
  EXPECT_EQ(dry.counts()["broadcast"].calls, 2 * 3);
}

TEST(CollectiveBench, TheLargestSizeFollowsTheDeviceAndTheSmallest) {
  const comm::DryRun dry(0, 2);
  CollectiveOptions options{.names = {"broadcast"}, .least = 1 << 20, .factor = 8, .seconds = 1e-9};
  const auto sizes = [&] {
    std::vector<int64_t> all;
    for (const Record& record : measured(dry, options)) all.push_back(record.shape.at("bytes"));
    return all;
  };
  EXPECT_EQ(sizes(), (std::vector<int64_t>{1 << 20, 1 << 23, 1 << 26}));
  options.least = (1 << 26) + 4;
  EXPECT_EQ(sizes(), (std::vector<int64_t>{(1 << 26) + 4}));
}

}  // namespace
}  // namespace tessera::bench
