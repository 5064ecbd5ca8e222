#include "plan/ranks.h"

#include <gtest/gtest.h>

#include <numeric>

#include "models/tnp.h"

// What several ranks hold and send, and what a step of theirs is expected to take.

namespace tessera::plan {
namespace {

const LanguageConfig kGpt = models::GptConfig{.dtype = DType::bf16};

RankPlan of(const RankOptions& options, const LanguageConfig& config = kGpt) {
  return plan_ranks(count_memory(config, 32, 1024), count_flops(config, 32, 1024).step(), arena_sizes(config),
                    options);
}

RankOptions ranks(int64_t count, int64_t zero, int64_t micro_batches = 1) {
  return {.ranks = count, .zero = zero, .micro_batches = micro_batches, .rate = measured_rate(kGpt)};
}

TEST(PlanRanks, OneRankIsWhatItWas) {
  const Memory memory = count_memory(kGpt, 32, 1024);
  const RankPlan plan = of(ranks(1, 0));
  EXPECT_EQ(plan.memory.total(), memory.total());
  EXPECT_EQ(plan.sent, 0);
  EXPECT_EQ(plan.exposed, 0);
  EXPECT_EQ(plan.efficiency, 1);
  // Half the batch that was measured in 100.1 ms.
  EXPECT_NEAR(plan.step() * 1e3, 50.05, 0.01);
}

TEST(PlanRanks, TheArenaIsThatOfTheModel) {
  for (const LanguageConfig& config : {kGpt, LanguageConfig(models::LlamaConfig{.dtype = DType::bf16})}) {
    const ArenaSizes sizes = arena_sizes(config);
    const double sum = std::accumulate(sizes.elements.begin(), sizes.elements.end(), 0.0);
    EXPECT_NEAR(sum / double(count_parameters(config)), 1, 0.002);  // norms and biases are left out
  }
  EXPECT_TRUE(arena_sizes(kGpt).tied);
  const models::TnpConfig tnp;
  const ArenaSizes sizes = arena_sizes(tnp);
  const double sum = std::accumulate(sizes.elements.begin(), sizes.elements.end(), 0.0);
  EXPECT_NEAR(sum / double(count_parameters(tnp)), 1, 0.002);
}

TEST(PlanRanks, EachStageHoldsLess) {
  const Memory whole = count_memory(kGpt, 32, 1024);
  const RankPlan none = of(ranks(128, 0)), states = of(ranks(128, 1)), all = of(ranks(128, 2));
  EXPECT_EQ(none.memory.gradients, whole.gradients);
  EXPECT_EQ(none.memory.optimizer, whole.optimizer);
  EXPECT_EQ(states.memory.optimizer, whole.optimizer / 128);
  EXPECT_EQ(states.memory.gradients, whole.gradients);
  EXPECT_EQ(all.memory.optimizer, whole.optimizer / 128);
  // Three slots of some 32 MiB, of which one also fits the last bucket, and the tied table's bucket.
  EXPECT_GT(all.memory.gradients, whole.gradients / 128 + 4 * 50257 * 768);
  EXPECT_LT(all.memory.gradients, 0.9 * whole.gradients);
  // Both directions of a ring carry 127/128 of the gradients; spread ones once, and weights of 16 bits.
  EXPECT_DOUBLE_EQ(none.sent, 2 * whole.gradients * 127 / 128);
  EXPECT_DOUBLE_EQ(states.sent, (whole.gradients + whole.parameters) * 127 / 128);
  EXPECT_DOUBLE_EQ(all.sent, states.sent);
}

TEST(PlanRanks, CopiesBetweenGpusTakeABuffer) {
  const double alone = of(ranks(1, 0)).memory.transient;
  for (const int64_t zero : {0, 1}) EXPECT_EQ(of(ranks(2, zero)).memory.transient, alone + (64 << 20));
  EXPECT_EQ(of(ranks(2, 2)).memory.transient, alone);  // spread gradients are NCCL's
  RankOptions communicator = ranks(2, 0);
  communicator.copies = false;
  EXPECT_EQ(of(communicator).memory.transient, alone);
}

TEST(PlanRanks, MicroBatchesCostSumsThatWaitOrWhatTheySend) {
  const double whole = count_memory(kGpt, 32, 1024).gradients;
  EXPECT_EQ(of(ranks(2, 0, 8)).memory.gradients, 4 * whole);  // a binary counter of 8
  RankOptions in_place = ranks(2, 0, 8);
  in_place.global_order = false;
  EXPECT_EQ(of(in_place).memory.gradients, whole);
  EXPECT_LT(of(ranks(64, 2, 8)).memory.gradients, whole);
  EXPECT_GT(of(ranks(64, 2, 8)).sent, 7 * of(ranks(64, 2)).sent * 0.7);  // gradients of each, weights once
}

TEST(PlanRanks, BucketsHideWhatOneSumExposes) {
  RankOptions buckets = ranks(2, 0), one = ranks(2, 0);
  one.bucket_mb = 0;
  const RankPlan hidden = of(buckets), open = of(one);
  EXPECT_EQ(open.exposed, open.communicate);
  EXPECT_NEAR(open.communicate * 1e3, 498e6 / 327e9 * 1e3, 0.01);  // half of 2 x 498 MB at 327 GB/s
  EXPECT_LT(hidden.exposed, open.exposed);
  EXPECT_GT(hidden.exposed * 1e3, 154e6 / 327e9 * 1e3);  // the tied table comes last
  EXPECT_GT(hidden.efficiency, open.efficiency);
  // A measured step takes the place of the modelled one.
  buckets.compute = 40e-3;
  EXPECT_NEAR(of(buckets).step() * 1e3, 40 + of(buckets).exposed * 1e3, 1e-9);
  // Slow links hide nothing.
  buckets.bus = 1e9;
  EXPECT_GT(of(buckets).exposed, 0.4);
}

}  // namespace
}  // namespace tessera::plan
