#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/file.h"
#include "tests/folder.h"
#include "tests/train/token_batch.h"
#include "train/language_job.h"
#include "train/step.h"

// A penalty on hidden activations in a job's steps; the command is tested in tests/cli/sparse24_test.cpp.

namespace tessera::train {
namespace {

LanguageSettings arcee_job(double lambda, bool sparse) {
  LanguageSettings job;
  job.model = models::LlamaConfig{.family = models::LlamaFamily::arcee,
                                  .vocabulary = 50,
                                  .positions = 8,
                                  .d_model = 16,
                                  .d_ff = 32,
                                  .heads = 2,
                                  .kv_heads = 2,
                                  .layers = 2,
                                  .activation = ops::Activation::relu_squared,
                                  .gated = false,
                                  .init_deviation = 0.3};
  job.length = 8, job.batch = 2, job.steps = 8, job.warmup = 1, job.lr = 0.01;
  job.activation_l1 = lambda;
  if (sparse) job.sparse24.method = "naive";
  return job;
}

struct Curve {
  std::vector<double> losses, penalties;
};
Curve run(LanguageJob& job, int64_t first, int64_t last, bool global_order = false) {
  Curve curve;
  Step step(job, {.graph = false, .global_order = global_order});
  const int64_t micro_batches = job.settings().accumulate;
  for (int64_t at = first; at < last; ++at) {
    step([&](int micro) { job.load(batch_number(at * micro_batches + micro)); });
    curve.losses.push_back(step.mean_loss());
    if (!job.info().penalties.empty()) curve.penalties.push_back(step.mean_penalty(0));
  }
  return curve;
}

TEST(ActivationL1Job, MakesActivationsSmallerAndKeepsTheLossApart) {
  for (const bool sparse : {false, true}) {
    LanguageJob none(arcee_job(0, sparse), Device::cpu()), weak(arcee_job(1e-6, sparse), Device::cpu()),
        strong(arcee_job(1, sparse), Device::cpu());
    const Curve plain = run(none, 0, 8), small = run(weak, 0, 8), large = run(strong, 0, 8);
    EXPECT_TRUE(plain.penalties.empty());
    EXPECT_NEAR(large.losses[0], plain.losses[0], 1e-5);  // without the penalty, which is not small
    EXPECT_GT(large.penalties[0], 0.05);
    EXPECT_NEAR(large.penalties[0], 1e6 * small.penalties[0], 1e-4 * large.penalties[0]);
    EXPECT_LT(large.penalties[7], 0.7e6 * small.penalties[7]);
  }
}

TEST(ActivationL1Job, IsTheMeanOverMicroBatchesInEitherOrder) {
  LanguageSettings settings = arcee_job(1, false);
  LanguageJob first(settings, Device::cpu()), second(settings, Device::cpu());
  first.load(batch_number(0)), second.load(batch_number(1));
  Step one(first, {.graph = false}), two(second, {.graph = false});
  one(), two();
  settings.accumulate = 2;
  for (const bool global_order : {false, true}) {
    LanguageJob both(settings, Device::cpu());
    const Curve curve = run(both, 0, 1, global_order);
    EXPECT_NEAR(curve.penalties[0], (one.mean_penalty(0) + two.mean_penalty(0)) / 2, 1e-6);
    EXPECT_NEAR(curve.losses[0], (one.mean_loss() + two.mean_loss()) / 2, 1e-5);
  }
}

TEST(ActivationL1Job, GoesOnToTheSameBitsAndIsPartOfTheCheckpoint) {
  const TemporaryFolder folder;
  const std::string file = folder / "c.safetensors";
  const LanguageSettings settings = arcee_job(0.1, true);
  LanguageJob whole(settings, Device::cpu()), other(settings, Device::cpu());
  run(whole, 0, 3);
  whole.checkpoint(3).save(file);
  EXPECT_EQ(other.restore(file), 3);
  EXPECT_EQ(run(whole, 3, 6).losses, run(other, 3, 6).losses);
  LanguageJob changed(arcee_job(0.2, true), Device::cpu());
  EXPECT_THROW(changed.restore(file), Error);
}

}  // namespace
}  // namespace tessera::train
