#include "train/seeds.h"

#include <cmath>
#include <exception>

#include "comm/threads.h"
#include "dist/world.h"
#include "nn/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "tests/errors.h"
#include "tests/folder.h"

// Several seeds in one folder, of which some diverge.

namespace tessera::train {
namespace {

/// Fits zeros; its loss is NaN if it is to diverge.
struct ZeroFit : Job {
  explicit ZeroFit(bool diverges)
      : Job(Device::cpu()),
        rng(1),
        layer(2, 1, rng, Device::cpu()),
        optimizer(nn::parameters(layer), {.lr = 1e-2}),
        factor(diverges ? std::nan("") : 1.0) {
    keep("model", layer), train_with(optimizer);
  }
  JobInfo info() const override { return {.evaluates = true, .micro_batches = 2}; }  // one or two ranks
  void batch(uint64_t) override {}
  Tensor loss() override {
    const Tensor y = layer(Tensor::full({3, 2}, 1.0, DType::f32, Device::cpu()));
    return ops::scale(ops::mean(ops::mul(y, y)), factor);
  }
  Values evaluate() override { return {{"eval_score", 0.5}}; }

  Rng rng;
  nn::Linear layer;
  optim::AdamW optimizer;
  double factor;
};

struct ZeroFitRecipe : SeedRecipe {
  ZeroFitRecipe(bool diverges, int64_t steps) : diverges(diverges) { settings.steps = steps; }
  const char* name() const override { return "zero-fit"; }
  void begin(const Given&, Device) override {}
  void resume(const std::string&, const nlohmann::json&, const Given&) override {}
  void set_ranks(int, const Given&, bool) override {}
  void spread(const optim::Sharding&) override {}
  std::string default_name() const override { return "zero-fit"; }
  void prepare(const RunFolder&, Device, bool) override { made.emplace(diverges); }
  Job& job() override { return *made; }
  const TrainingSettings& training() const override { return settings; }
  DType dtype() const override { return DType::f32; }
  std::string header(const RunFolder&, bool, int64_t) override { return "begins\n"; }
  void report(const RunFolder& run, const TrainResult&) override { put(run.path() / "report.html", "x"); }
  nlohmann::json throughput(const TrainResult&) const override { return nlohmann::json::object(); }
  std::string conclusion(const RunFolder&, const TrainResult&) const override { return ""; }
  bool lacks(const RunFolder&) const override { return false; }
  void complete(const RunFolder&) override {}

  const bool diverges;
  TrainingSettings settings;
  std::optional<ZeroFit> made;
};

SeedGroup group_in(const TemporaryFolder& root, std::vector<uint64_t> diverging) {
  std::error_code ignored;
  const bool there = std::filesystem::exists(root / "g", ignored);
  SeedGroup group{.folder = there ? RunFolder::open(root / "g") : RunFolder::create(root.path(), "g"),
                  .first_seed = 4,
                  .count = 3,
                  .steps = 8,
                  .make = {}};
  if (!there) group.folder.write_settings({{"model", "zero-fit"}});
  group.make = [diverging](uint64_t seed) {
    return std::make_unique<ZeroFitRecipe>(std::ranges::find(diverging, seed) != diverging.end(), 8);
  };
  return group;
}

RunRequest quiet_request() {
  RunRequest request;
  request.quiet = true;
  request.options.loss_scale = request.options.loss_scale_interval = 1;
  return request;
}

// The second of three: the third was never begun, also where the group was resumed.
TEST(Seeds, OneThatDivergesDoesNotKeepTheLaterOnesFromRunning) {
  const TemporaryFolder root;
  for (const int trained : {2, 0}) {
    const SeedsEnd end = run_seeds(group_in(root, {5}), quiet_request());
    EXPECT_EQ(end.signal, 0);
    EXPECT_EQ(end.trained.size(), size_t(trained));
    EXPECT_EQ(end.results.diverged, std::vector<std::string>{"seed-5"});
    ASSERT_EQ(end.results.runs.size(), 2u);
    EXPECT_EQ(end.results.runs[1].path().filename(), "seed-6");
    EXPECT_NE(format_seeds(end.results).find("seed-5 diverged, and is in no mean"), std::string::npos);
    write_seeds_report(root / "page.html", "Seeds", end.results, {});
    EXPECT_NE(get(root / "page.html").find("seed-5 diverged, and is in no mean."), std::string::npos);
  }
}

TEST(Seeds, OneThatDivergesOnSeveralRanksDoesNotKeepTheLaterOnesFromRunning) {
  const TemporaryFolder root;
  const SeedGroup group = group_in(root, {5});
  comm::run_threads(2, [&](comm::Communicator& c) {
    const dist::World world(c, c);
    RunRequest request = quiet_request();
    request.world = &world;
    const SeedsEnd end = run_seeds(group, request);
    EXPECT_EQ(end.signal, 0);
    if (!world.leads()) return;
    EXPECT_EQ(end.results.diverged, std::vector<std::string>{"seed-5"});
    ASSERT_EQ(end.results.runs.size(), 2u);
    EXPECT_EQ(end.results.runs[1].path().filename(), "seed-6");
  });
}

/// Meets the other ranks when it ends, as what GPUs share does (comm/peer_memory.h), unless it is unwound.
struct SharedRecipe : ZeroFitRecipe {
  SharedRecipe(bool diverges, const comm::Communicator& ranks) : ZeroFitRecipe(diverges, 8), ranks(ranks) {}
  ~SharedRecipe() override {
    if (std::uncaught_exceptions() > 0) return;
    EXPECT_EQ(message_of([&] { ranks.barrier(); }), "");
  }
  const comm::Communicator ranks;
};

TEST(Seeds, WhatTheRanksOfASeedThatDivergesShareEndsOnAllTogether) {
  const TemporaryFolder root;
  const SeedGroup given = group_in(root, {});
  comm::run_threads(2, [&](comm::Communicator& c) {
    SeedGroup group = given;
    group.make = [&](uint64_t seed) { return std::make_unique<SharedRecipe>(seed == 5, c); };
    const dist::World world(c, c);
    RunRequest request = quiet_request();
    request.world = &world;
    const SeedsEnd end = run_seeds(group, request);
    if (world.leads()) EXPECT_EQ(end.results.runs.size(), 2u);
  });
}

// Resumed when its gradients are finite again: its values are those of a run that skipped steps.
TEST(Seeds, OneThatDivergedAndWentOnIsNamed) {
  const TemporaryFolder root;
  const SeedsEnd before = run_seeds(group_in(root, {5}), quiet_request());
  EXPECT_EQ(before.results.diverged, std::vector<std::string>{"seed-5"});
  EXPECT_TRUE(before.results.resumed.empty());
  SeedGroup group = group_in(root, {});
  group.steps = 12;
  group.make = [](uint64_t) { return std::make_unique<ZeroFitRecipe>(false, 12); };
  const SeedsEnd end = run_seeds(group, quiet_request());
  EXPECT_TRUE(end.results.diverged.empty());
  ASSERT_EQ(end.results.runs.size(), 3u);
  EXPECT_EQ(end.results.resumed, std::vector<std::string>{"seed-5"});
  const char* const said = "seed-5 had diverged and went on from its last checkpoint when it was resumed";
  EXPECT_NE(format_seeds(end.results).find(said), std::string::npos) << format_seeds(end.results);
  write_seeds_report(root / "page.html", "Seeds", end.results, {});
  EXPECT_NE(get(root / "page.html").find(said), std::string::npos);
}

TEST(Seeds, WhereAllDivergeIsTheFirstOnesError) {
  const TemporaryFolder root;
  const SeedGroup group = group_in(root, {4, 5, 6});
  try {
    run_seeds(group, quiet_request());
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Diverged& error) {
    EXPECT_NE(error.message().find("not finite"), std::string::npos) << error.message();
  }
  EXPECT_TRUE(std::filesystem::exists(group.folder_of(6) / "run.json"));
}

}  // namespace
}  // namespace tessera::train
