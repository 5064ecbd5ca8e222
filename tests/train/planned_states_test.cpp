#include <gtest/gtest.h>

#include "plan/plan.h"
#include "tests/errors.h"
#include "train/language_job.h"
#include "train/tnp_job.h"

namespace tessera::train {
namespace {

/// Bytes of the gradients, states, masters and scratch of an optimizer that has been made, and of its plan.
template <class Job, class Settings>
void expect_planned(const Settings& settings, const std::string& what) {
  Job job(settings, Device::cpu());
  const plan::Memory planned = settings.planned(Device::cpu());
  // A few counters in addition.
  EXPECT_NEAR(double(job.optimizer().bytes()), planned.gradients + planned.optimizer, 64) << what;
}

/// Sizes that the arenas do not pad.
LanguageSettings even_job(bool llama) {
  LanguageSettings job;
  if (llama)
    job.model = models::LlamaConfig{.vocabulary = 256,
                                    .positions = 16,
                                    .d_model = 128,
                                    .d_ff = 192,
                                    .heads = 2,
                                    .kv_heads = 1,
                                    .layers = 2};
  else
    job.model = models::GptConfig{
        .vocabulary = 256, .positions = 16, .d_model = 128, .d_ff = 192, .heads = 2, .layers = 2};
  job.length = 16, job.batch = 2, job.galore_rank = 32;
  return job;
}

TEST(PlannedStates, AreWhatTheOptimizerTakes) {
  for (const bool llama : {false, true})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const char* const optimizer : {"adamw", "sgd", "muon", "galore"})
        for (const double momentum : {0.0, 0.9})
          for (const char* const states : {"f32", "bf16"})
            for (const char* const form : {"dense", "low_rank", "sltrain", "lost"}) {
              LanguageSettings job = even_job(llama);
              job.set_precision({dtype});
              job.optimizer = optimizer, job.momentum = momentum, job.optimizer_states = states;
              job.factors.form = form, job.factors.rank = 32;
              job.factors.column_share = 0.25, job.factors.density = 0.125;
              const bool elementwise = job.optimizer == "adamw" || job.optimizer == "sgd";
              if (!elementwise && (momentum > 0 || job.optimizer_states == "bf16")) continue;
              if (elementwise && job.factors.factorizes()) continue;
              expect_planned<LanguageJob>(job, std::string(optimizer) + " " + form + ", momentum " +
                                                   std::to_string(momentum) + ", " + name_of(dtype) +
                                                   ", states " + states);
            }
  for (const char* const side : {"reverse_std", "right", "left", "full"}) {
    LanguageSettings job = even_job(true);
    job.optimizer = "galore", job.galore_projection = side;
    expect_planned<LanguageJob>(job, side);
  }
  LanguageSettings factors = even_job(true);
  factors.optimizer = "loro", factors.factors.form = "low_rank", factors.factors.rank = 32;
  expect_planned<LanguageJob>(factors, "loro");
  TnpSettings tnp;
  tnp.model = {.features = 3,
               .d_model = 64,
               .d_ff = 128,
               .heads = 2,
               .layers = 2,
               .components = 2,
               .embed_hidden = 64,
               .dtype = DType::f64};
  tnp.optimizer = "muon";
  expect_planned<TnpJob>(tnp, "tnp");
}

TEST(PlannedStates, HaveTheAveragesAndRefuseARankThatIsTooLarge) {
  LanguageSettings job = even_job(false);
  const plan::Memory without = job.planned(Device::cpu());
  job.ema = 0.9;
  EXPECT_EQ(job.planned(Device::cpu()).total(), without.total() + without.gradients);
  job.optimizer = "galore", job.galore_rank = 129;
  expect_error([&] { job.planned(Device::cpu()); }, {"--galore-rank", "129", "384 x 128", "at most 128"});
}

}  // namespace
}  // namespace tessera::train
