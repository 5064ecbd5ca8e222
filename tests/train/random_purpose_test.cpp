#include "train/random_purpose.h"

#include <gtest/gtest.h>

#include <set>

namespace tessera::train {
namespace {

TEST(RandomPurpose, EachHasStreamsOfItsOwn) {
  std::set<uint64_t> seeds;
  constexpr RandomPurpose kAll[] = {RandomPurpose::initialisation, RandomPurpose::dropout,
                                    RandomPurpose::sequence_order, RandomPurpose::text_order,
                                    RandomPurpose::evaluation};
  for (uint64_t seed = 0; seed < 1000; ++seed)
    for (const RandomPurpose purpose : kAll) seeds.insert(seed_for(purpose, seed));
  EXPECT_EQ(seeds.size(), 5000u);
  Rng rng(7);
  rng.reserve(Device::cpu());
  use_for(RandomPurpose::dropout, 7, rng);
  EXPECT_EQ(rng.state(), (Rng::State{seed_for(RandomPurpose::dropout, 7), 0}));
}

}  // namespace
}  // namespace tessera::train
