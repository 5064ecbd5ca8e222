#include "ops/gemm/plan_cache_internal.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>

namespace tessera::ops {
namespace {

TEST(PlanCache, KeepsTheMostRecentlyUsed) {
  LruCache<int, int> cache(3);
  int made = 0;
  const auto get = [&](int key) { return cache.get(key, [&] { return ++made, 10 * key; }); };
  for (const int key : {1, 2, 3}) EXPECT_EQ(get(key), 10 * key);
  EXPECT_EQ(get(1), 10);  // now 2 is the least recently used
  EXPECT_EQ(made, 3);
  EXPECT_EQ(get(4), 40);
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_FALSE(cache.contains(2));
  EXPECT_TRUE(cache.contains(1));
  EXPECT_EQ(get(2), 20);  // recomputed, in the place of 3
  EXPECT_EQ(made, 5);
  EXPECT_FALSE(cache.contains(3));
}

TEST(PlanCache, StaysBoundedAndFreesWhatItDrops) {
  const auto alive = std::make_shared<int>(0);
  LruCache<int, std::shared_ptr<int>> cache(16);
  for (int key = 0; key < 1000; ++key) cache.get(key, [&] { return alive; });
  EXPECT_EQ(cache.size(), 16u);
  EXPECT_EQ(alive.use_count(), 1 + 16);
}

TEST(PlanCache, AFailedMakeLeavesItAsItWas) {
  LruCache<int, int> cache(2);
  cache.get(1, [] { return 1; });
  cache.get(2, [] { return 2; });
  EXPECT_THROW(cache.get(3, []() -> int { throw std::runtime_error("no plan"); }), std::runtime_error);
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_TRUE(cache.contains(1) && cache.contains(2) && !cache.contains(3));
}

}  // namespace
}  // namespace tessera::ops
