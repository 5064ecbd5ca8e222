#include "gpu/grid.cuh"

#include <gtest/gtest.h>

#include "tests/errors.h"

/// Needs no GPU: what a launch would be.

namespace tessera::gpu {
namespace {

TEST(Grid, TakesWhatAGpuTakesAndRefusesMore) {
  const dim3 most = grid_of(kMostBlocks, kMostBlocksOfY);
  EXPECT_EQ(most.x, 0x7FFFFFFFu);
  EXPECT_EQ(most.y, 65535u);
  EXPECT_EQ(grid_of(0).x, 0u);
  // 2^32 + 1 would be one block in 32 bits, 2^31 none that is launched.
  for (const int64_t blocks : {(int64_t{1} << 32) + 1, int64_t{1} << 31, int64_t{-1}})
    EXPECT_THROW(grid_of(blocks), Error) << blocks;
  EXPECT_THROW(grid_of(1, 65536), Error);
  expect_parts(message_of([] { grid_of(int64_t{1} << 31); }), {"2147483648 x 1 blocks", "split the rows"});
}

}  // namespace
}  // namespace tessera::gpu
