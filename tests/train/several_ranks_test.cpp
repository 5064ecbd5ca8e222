#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include "comm/threads.h"
#include "nn/linear.h"
#include "ops/dropout/dropout.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "report/progress.h"
#include "runtime/interrupt.h"
#include "tests/errors.h"
#include "tests/train/on_ranks.h"
#include "tests/train/small_glue.h"
#include "train/glue_run.h"
#include "train/mlm_job.h"
#include "train/step.h"

/// Jobs of BERT on several ranks, here threads: the files of one rank, byte for byte.

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

struct RankData : MadeSst2 {
  RankData() : MadeSst2(40) {}
  GlueSettings settings() const {
    GlueSettings own = job(2);
    own.accumulate = 4, own.order = "global";
    return own;
  }
};

using MakeJob = std::function<std::unique_ptr<Job>(const optim::Sharding&)>;

struct RanksEnd {
  std::string checkpoint, probes;  // of rank 0
  Values evaluation;
  int others_probes = 0;  // ranks besides it that wrote such a file
};

/// A run of so many steps on so many ranks, each with a folder of its own, in the global order.
RanksEnd trained_on(int ranks, const MakeJob& make, const TrainingSettings& settings, int zero = 0) {
  const InterruptGuard outermost;
  const TemporaryFolder root;
  RanksEnd end;
  std::atomic<int> others = 0;
  const auto train_rank = [&](const dist::World* world, int rank) {
    const auto job = make(zero > 0 ? optim::Sharding{rank, ranks, 0.001, zero > 1} : optim::Sharding());
    const RunFolder run = RunFolder::create(root.path(), "rank-" + std::to_string(rank));
    report::Progress quiet(report::Progress::Mode::quiet);
    const TrainResult result = train(*job, run,
                                     {.steps = settings.steps,
                                      .log_every = 1,
                                      .schedule = settings.make_schedule(),
                                      .bucket_mb = 0.001,
                                      .world = world,
                                      .global_order = true},
                                     0, quiet);
    const bool probed = fs::exists(run.path() / "probes.jsonl");
    if (rank > 0) {
      others += probed;
      return;
    }
    end.evaluation = result.evaluation;
    end.checkpoint = get(run.checkpoints() / fmt::format("step-{:06}.safetensors", settings.steps));
    if (probed) end.probes = get(run.path() / "probes.jsonl");
  };
  on_ranks(ranks, train_rank);
  end.others_probes = others;
  return end;
}

MakeJob glue_maker(const RankData& data, const GlueSettings& settings) {
  return [&data, settings](const optim::Sharding& sharding) {
    GlueSettings own = settings;
    own.sharding = sharding;
    return std::make_unique<GlueJob>(own, Device::cpu(), &data.examples);
  };
}

struct RankCase {
  const char* name;
  void (*change)(GlueSettings&);
};
const RankCase kRankCases[] = {
    {"Dense", [](GlueSettings&) {}},
    {"Padded", [](GlueSettings& job) { job.batches = "padded"; }},
    {"RandomRows", [](GlueSettings& job) { job.slice = {.mode = "random", .rows = "25%"}; }},
    {"RowsByImportance", [](GlueSettings& job) { job.slice = {.mode = "importance", .rows = "25%"}; }},
    {"NoWeightGradients",
     [](GlueSettings& job) { job.slice = {.mode = "first", .rows = "9", .weight_grad = "none"}; }},
    {"DroppedBranches", [](GlueSettings& job) { job.drop = {.share = 0.5}; }},
    {"DroppedBySensitivity", [](GlueSettings& job) { job.drop = {.share = 0.5, .rates = "sensitivity"}; }},
    {"SlicedAndDroppedAndProbed",
     [](GlueSettings& job) {
       job.slice = {.mode = "random", .rows = "10%", .probe_every = 5};
       job.drop = {.share = 0.4, .rates = "sensitivity"};
     }},
};

class GlueRanks : public ::testing::TestWithParam<RankCase> {};

TEST_P(GlueRanks, EndWithTheBytesOfOne) {
  const RankData data;
  GlueSettings settings = data.settings();
  GetParam().change(settings);
  const MakeJob make = glue_maker(data, settings);
  const RanksEnd alone = trained_on(1, make, settings);
  ASSERT_FALSE(alone.checkpoint.empty());
  ASSERT_TRUE(alone.evaluation.contains("eval_score"));
  EXPECT_EQ(alone.probes.empty(), settings.slice.probe_every == 0);
  // Probes and sensitivities measure whole gradients.
  const int of_two = settings.drop.calibrates() || settings.slice.probe_every > 0 ? 0 : 2;
  for (const int ranks : {2, 4}) {
    const RanksEnd end = trained_on(ranks, make, settings, ranks == 4 ? 1 : of_two);
    EXPECT_TRUE(end.checkpoint == alone.checkpoint) << ranks;
    EXPECT_EQ(end.evaluation, alone.evaluation) << ranks;
    EXPECT_EQ(end.probes, alone.probes) << ranks;
    EXPECT_EQ(end.others_probes, 0) << ranks;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, GlueRanks, ::testing::ValuesIn(kRankCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(MlmRanks, EndWithTheBytesOfOne) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 600; ++i) text += "word" + std::to_string(i * i % 97) + (i % 11 == 0 ? ".\n" : " ");
  put(folder / "text", text);
  const std::string shards = folder / "data";
  write_language_data({.files = {folder / "text"}, .kind = "bert", .vocab_size = 300, .validation = 0.1},
                      shards);
  const LanguageData data(shards, shards, 14, false, 14);
  MlmSettings settings;
  settings.bert = {.vocabulary = data.tokenizer().vocab_size(),
                   .positions = 32,
                   .d_model = 16,
                   .d_ff = 32,
                   .heads = 2,
                   .layers = 1,
                   .hidden_dropout = 0.1,
                   .attention_dropout = 0.1,
                   .head = models::BertHead::masked_lm};
  settings.fingerprint = data.tokenizer().fingerprint();
  settings.batch = 2, settings.max_length = 16, settings.steps = 6, settings.warmup = 0, settings.lr = 3e-3;
  settings.accumulate = 4, settings.order = "global";
  const MakeJob make = [&](const optim::Sharding& sharding) {
    MlmSettings own = settings;
    own.sharding = sharding;
    return std::make_unique<MlmJob>(own, Device::cpu(), data, 1 << 10, "");
  };
  EXPECT_EQ(make({})->info().tokens_per_step, 4 * 2 * 16);
  const RanksEnd alone = trained_on(1, make, settings);
  ASSERT_FALSE(alone.checkpoint.empty());
  ASSERT_TRUE(alone.evaluation.contains("eval_nll"));
  for (const int ranks : {2, 4}) {
    const RanksEnd end = trained_on(ranks, make, settings, ranks == 2 ? 2 : 1);
    EXPECT_TRUE(end.checkpoint == alone.checkpoint) << ranks;
    EXPECT_EQ(end.evaluation, alone.evaluation) << ranks;
  }
}

/// One weight, and ones that dropout scales or drops: `masks` has what each micro-batch of this rank drew.
struct DropoutJob : Job {
  explicit DropoutJob(int micro_batches) : Job(Device::cpu()), micro_batches_(micro_batches) {
    keep("model", layer), train_with(optimizer), draws_from("rng", rng);
  }
  JobInfo info() const override { return {.micro_batches = micro_batches_}; }
  void batch(uint64_t) override {}
  Tensor loss() override {
    const Tensor dropped = ops::dropout(Tensor::full({1, 64}, 1.0, DType::f32, Device::cpu()), 0.5, rng);
    masks.push_back(dropped.to_vector<float>());
    return ops::mean(layer(dropped));
  }
  Rng rng{11};
  nn::Linear layer{64, 1, rng, Device::cpu()};
  optim::AdamW optimizer{nn::parameters(layer), {}};
  std::vector<std::vector<float>> masks;

 private:
  int micro_batches_;
};

TEST(SeveralRanks, NoTwoMicroBatchesOfAStepDropTheSameInAnyOrder) {
  for (const bool global : {false, true}) {
    std::set<std::vector<float>> drawn;
    std::mutex mutex;
    comm::run_threads(2, [&](comm::Communicator& c) {
      const TemporaryFolder root;
      const dist::World world(c, c);
      DropoutJob job(4);
      report::Progress quiet(report::Progress::Mode::quiet);
      train(job, RunFolder::create(root.path(), "r"),
            {.steps = 3, .bucket_mb = 0, .world = &world, .global_order = global}, 0, quiet);
      const std::lock_guard lock(mutex);
      drawn.insert(job.masks.begin(), job.masks.end());
    });
    EXPECT_EQ(drawn.size(), 12u) << (global ? "global" : "world");
  }
}

/// Which gradients arrived how often, after some steps of micro-batches that are added in place.
std::vector<int64_t> arrivals_of(const RankData& data, int64_t accumulate) {
  GlueSettings settings = data.settings();
  settings.accumulate = accumulate, settings.order = "world", settings.missing_grad = "skip";
  settings.drop = {.share = 0.5};
  GlueJob job(settings, Device::cpu(), &data.examples);
  Step step(job, {});
  for (uint64_t number = 0; number < 6; ++number)
    step([&](int micro) { job.batch(number * uint64_t(accumulate) + uint64_t(micro)); });
  std::vector<int64_t> arrived;
  for_each_field(job.optimizer(), [&](const std::string& name, const auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Tensor>)
      if (name == "parameter_steps") arrived = field.template to_vector<int64_t>();
  });
  return arrived;
}

TEST(GlueMicroBatches, OfAStepDropTheSameBranches) {
  const RankData data;
  const std::vector<int64_t> one = arrivals_of(data, 1);
  ASSERT_FALSE(one.empty());
  EXPECT_LT(std::ranges::min(one), 6) << "some gradients are missing";
  EXPECT_EQ(std::ranges::max(one), 6);
  EXPECT_EQ(arrivals_of(data, 2), one);
}

TEST(GlueMicroBatches, CountInTokensAndEpochs) {
  const RankData data;
  GlueSettings settings = data.settings();
  const double four = GlueJob(settings, Device::cpu(), &data.examples).info().tokens_per_step;
  settings.accumulate = 1;
  const JobInfo one = GlueJob(settings, Device::cpu(), &data.examples).info();
  EXPECT_DOUBLE_EQ(four, 4 * one.tokens_per_step);
  EXPECT_EQ(one.micro_batches, 1);
  const auto group_of = [&](int64_t accumulate, const TemporaryFolder& runs, RunRequest& request) {
    GlueStart start;
    start.settings.task = "sst2", start.settings.data = data.folder.path();
    start.settings.batch = 2, start.settings.accumulate = accumulate;
    start.scratch = true, start.layers = 1, start.d_model = 16, start.vocab_size = 500, start.epochs = 2;
    request.runs = runs.path(), request.given = {"--accumulate"};
    const GlueGroup group = GlueGroup::open(start, {}, request);
    return std::pair(group.settings().steps, request.options.eval_every);
  };
  const TemporaryFolder a, b;
  RunRequest first, second;
  EXPECT_EQ(group_of(1, a, first), std::pair(int64_t{40}, int64_t{20}));
  EXPECT_EQ(group_of(4, b, second), std::pair(int64_t{10}, int64_t{5}));
}

TEST(GlueMicroBatches, WithSkippedGradientsAreOfOneRankAlone) {
  const RankData data;
  GlueSettings settings = data.settings();
  settings.missing_grad = "skip";
  const auto refused = [&](int ranks, const char* order, const Given& given) {
    GlueSettings own = settings;
    own.order = order;
    return message_of([&] { own.set_ranks(ranks, given, false); });
  };
  expect_parts(refused(2, "world", {"--accumulate"}),
               {"--missing-grad skip on 2 ranks", "--missing-grad zero"});
  expect_parts(refused(2, "world", {"--accumulate", "--order"}), {"--missing-grad skip on 2 ranks"});
  expect_parts(refused(1, "global", {"--accumulate", "--order"}),
               {"--missing-grad skip with --order global"});
  EXPECT_EQ(refused(1, "world", {"--accumulate", "--order"}), "");
  GlueJob job(settings, Device::cpu(), &data.examples);
  expect_parts(message_of([&] { Step(job, {.global_order = true}); }), {"take missing gradients as zero"});
}

}  // namespace
}  // namespace tessera::train
