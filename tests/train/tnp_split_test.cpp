#include <gtest/gtest.h>

#include <mutex>

#include "comm/threads.h"
#include "report/progress.h"
#include "runtime/interrupt.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "tests/train/on_ranks.h"
#include "train/step.h"
#include "train/tnp_run.h"
#include "train/trainer.h"

// One task on several ranks, here threads: the curve of one rank, the same weights on all of them.

namespace tessera::train {
namespace {

using SplitBy = nn::AttentionSplit::By;

TnpSettings split_job() {
  TnpSettings job;
  job.model = {
      .features = 2, .d_model = 16, .d_ff = 12, .heads = 4, .layers = 2, .components = 2, .embed_hidden = 8};
  job.context = 9, job.targets = 7, job.batch = 2, job.steps = 20, job.warmup = 4, job.lr = 1e-2;
  return job;
}

struct SplitEnd {
  std::vector<double> losses;  // of each step
  Values evaluation;
  std::vector<std::vector<float>> weights;  // of each rank, all in one
};

/// Trains on data x split.ranks ranks.
SplitEnd trained_split(TnpSettings settings, int data, models::TaskSplit split, bool zero = false) {
  const InterruptGuard outermost;
  const TemporaryFolder root;
  const int ranks = data * int(split.ranks);
  settings.split = split;
  if (settings.accumulate == 1) settings.accumulate = data;
  SplitEnd end;
  end.weights.resize(size_t(ranks));
  std::mutex mutex;
  const auto train_rank = [&](const dist::World* world, int rank) {
    TnpSettings own = settings;
    if (zero) own.sharding = {rank, ranks, 0.001};
    TnpJob job(own, Device::cpu(), 5);
    const RunFolder run = RunFolder::create(root.path(), "rank-" + std::to_string(rank));
    report::Progress quiet(report::Progress::Mode::quiet);
    const TrainResult result = train(job, run,
                                     {.steps = settings.steps,
                                      .log_every = 1,
                                      .schedule = settings.make_schedule(),
                                      .bucket_mb = 0,
                                      .world = world},
                                     0, quiet);
    std::vector<float>& weights = end.weights[size_t(rank)];
    for (const auto& [name, tensor] : job.optimizer().parameters()) {
      const std::vector<float> values = tensor.detach().to_vector<float>();
      weights.insert(weights.end(), values.begin(), values.end());
    }
    const std::lock_guard lock(mutex);
    if (end.evaluation.empty()) end.evaluation = result.evaluation;
    EXPECT_EQ(result.evaluation, end.evaluation) << rank;
    if (rank == 0)
      for (const StepRecord& record : run.metrics()) end.losses.push_back(record.values.at("loss"));
  };
  on_ranks(ranks, train_rank);
  return end;
}

struct SplitRun {
  const char* name;
  int data;
  models::TaskSplit split;
  bool zero = false;
  int64_t accumulate = 1;  // of the run on one rank, too
};

class TnpSplitRuns : public ::testing::TestWithParam<SplitRun> {};

TEST_P(TnpSplitRuns, HaveTheCurveOfOneRank) {
  const SplitRun& run = GetParam();
  TnpSettings settings = split_job();
  settings.accumulate = run.accumulate;
  const SplitEnd one = trained_split(settings, 1, {});
  const SplitEnd split = trained_split(settings, run.data, run.split, run.zero);
  ASSERT_EQ(one.losses.size(), 20u);
  ASSERT_EQ(split.losses.size(), 20u);
  // The bound: f32 sums in another order, 20 steps later.
  for (size_t i = 0; i < 20; ++i) EXPECT_NEAR(split.losses[i], one.losses[i], 1e-5) << "step " << i + 1;
  for (const std::vector<float>& weights : split.weights) EXPECT_EQ(weights, split.weights[0]);
  ASSERT_EQ(split.evaluation.size(), one.evaluation.size());
  for (const auto& [name, value] : one.evaluation)
    EXPECT_NEAR(split.evaluation.at(name), value, 1e-4) << name;
  const SplitEnd again = trained_split(settings, run.data, run.split, run.zero);
  EXPECT_EQ(again.losses, split.losses);
  EXPECT_EQ(again.weights, split.weights);
}

INSTANTIATE_TEST_SUITE_P(Of, TnpSplitRuns,
                         ::testing::Values(SplitRun{"TwoByRows", 1, {2, SplitBy::rows}},
                                           SplitRun{"TwoByHeads", 1, {2, SplitBy::heads}},
                                           SplitRun{"FourByRows", 1, {4, SplitBy::rows}},
                                           SplitRun{"FourByHeads", 1, {4, SplitBy::heads}},
                                           SplitRun{"MeshByRows", 2, {2, SplitBy::rows}, false, 2},
                                           SplitRun{"MeshByHeads", 2, {2, SplitBy::heads}, false, 4},
                                           SplitRun{"Spread", 1, {2, SplitBy::rows}, true},
                                           SplitRun{"SpreadMesh", 2, {2, SplitBy::rows}, true, 2},
                                           SplitRun{"MicroBatches", 1, {2, SplitBy::rows}, false, 3}),
                         [](const auto& info) { return std::string(info.param.name); });

/// Spread states change where a weight is updated, not its bits.
TEST(TnpSplit, SpreadStatesHaveTheBitsOfWholeOnes) {
  const SplitEnd whole = trained_split(split_job(), 2, {2, SplitBy::rows}),
                 spread = trained_split(split_job(), 2, {2, SplitBy::rows}, true);
  EXPECT_EQ(spread.losses, whole.losses);
  EXPECT_EQ(spread.weights, whole.weights);
}

TEST(TnpSplit, RanksThatShareATaskMustDrawTheSame) {
  const std::string error = message_of([] {
    comm::run_threads(2, [](comm::Communicator& c) {
      const dist::World world(c, c);
      TnpSettings settings = split_job();
      settings.split.ranks = 2;
      settings.seed = uint64_t(c.rank());
      TnpJob job(settings, Device::cpu());
      Step step(job, {.world = &world});
      step([&](int micro) { job.batch(uint64_t(micro)); });
    });
  });
  expect_parts(error, {"ranks 0 and 1 of the 2", "drew different tasks", "batch 0"});
}

TEST(TnpSplit, AStepRefusesWhatItCannotDo) {
  TnpSettings settings = split_job();
  settings.split.ranks = 2;
  TnpJob alone(settings, Device::cpu());
  expect_parts(message_of([&] { Step(alone, {}); }),
               {"by 2 ranks together", "there is 1", "tessera launch -n 2"});
  const auto refused = [&](int ranks, const StepOptions& options) {
    return message_of([&] {
      comm::run_threads(ranks, [&](comm::Communicator& c) {
        const dist::World world(c, c);
        StepOptions own = options;
        own.world = &world;
        TnpJob job(settings, Device::cpu());
        Step step(job, own);
      });
    });
  };
  expect_parts(refused(3, {}), {"by 2 ranks together", "there are 3"});
  expect_parts(refused(2, {.global_order = true}), {"global order", "2 ranks share each micro-batch"});
  expect_parts(refused(2, {.bucket_mb = 1}), {"next to a backward pass", "2 ranks share each micro-batch"});
  EXPECT_EQ(refused(2, {}), "");
}

class SplitRecipe : public TnpRecipe {
 public:
  void begin(const Given&, Device) override { settings_ = split_job(); }
  const TnpSettings& given_settings() const override { return settings_; }
  TnpSettings& settings() { return settings_; }
};

TEST(TnpSplit, ARunRefusesWhatItCannotDo) {
  const auto settled = [](int ranks, int64_t each, const char* by, const Given& given, bool resumed,
                          const std::function<void(SplitRecipe&)>& change) {
    SplitRecipe recipe;
    recipe.begin({}, Device::cpu());
    recipe.context_parallel = each, recipe.context_split = by;
    if (change) change(recipe);
    return message_of([&] { recipe.set_ranks(ranks, given, resumed); });
  };
  EXPECT_EQ(settled(4, 2, "rows", {}, false, {}), "");
  EXPECT_EQ(settled(4, 4, "heads", {}, false, {}), "");
  EXPECT_EQ(settled(2, 2, "rows", {"--order"}, false, {}), "");
  expect_parts(settled(3, 2, "rows", {}, false, {}), {"--context-parallel 2 on 3 ranks", "must divide"});
  expect_parts(settled(1, 2, "rows", {}, true, {}), {"--context-parallel 2 on 1 rank:"});
  expect_parts(settled(3, 3, "heads", {}, false, {}), {"3 ranks do not divide 4 attention heads"});
  expect_parts(settled(8, 8, "rows", {}, false, {}), {"8 ranks cannot share 7 targets (--n)"});
  expect_parts(settled(2, 2, "rows", {"--bucket-mb"}, false, {}), {"--bucket-mb", "leave"});
  const auto global = [](SplitRecipe& recipe) { recipe.settings().order = "global"; };
  expect_parts(settled(2, 2, "rows", {"--order"}, false, global), {"--order global", "Leave --order out"});
  expect_parts(settled(2, 2, "rows", {}, true, global), {"--order global", "--context-parallel 1"});
  expect_parts(settled(2, 2, "rows", {}, false, [](SplitRecipe& recipe) { recipe.find_max_batch = true; }),
               {"--find-max-batch", "tessera plan tnp --context-parallel 2"});
  expect_parts(settled(4, 2, "rows", {"--accumulate"}, false,
                       [](SplitRecipe& recipe) { recipe.settings().accumulate = 3; }),
               {"--accumulate 3"});
  SplitRecipe recipe;
  recipe.begin({}, Device::cpu());
  recipe.context_parallel = 2;
  recipe.set_ranks(4, {}, false);
  EXPECT_EQ(recipe.training().order, "world");
  EXPECT_EQ(recipe.training().accumulate, 2);  // one micro-batch for each group
  TrainerOptions options;
  recipe.decide(options);
  EXPECT_EQ(options.bucket_mb, 0);
}

}  // namespace
}  // namespace tessera::train
