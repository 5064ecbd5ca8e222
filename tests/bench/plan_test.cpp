#include <gtest/gtest.h>

#include "bench/step_bench.h"
#include "tests/bench/once.h"
#include "train/language_sizes.h"

/// What `tessera plan` says of a step's memory, next to what the step's tensors took on a GPU. (On a CPU
/// small models are mostly what the allocator rounds up, and large ones take minutes.)

namespace tessera::bench {
namespace {

class PlanCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  }
  static void expect_planned(const Record& record, const std::string& what) {
    ASSERT_GT(record.live_bytes, 0);
    EXPECT_NEAR(record.planned_bytes / record.live_bytes, 1, 0.05)
        << what << ": planned " << record.planned_bytes << ", took " << record.live_bytes;
  }
};

TEST_F(PlanCuda, AStepOfTheTnpTakesWhatWasPlanned) {
  for (const auto& [context, targets, batch] :
       {std::tuple{64, 500, 32}, {10000, 1000, 1}, {30000, 3000, 1}}) {
    StepBenchOptions options;
    options.settings.context = context;
    options.settings.targets = targets;
    options.settings.batch = batch;
    options.device = Device::cuda(0);
    options.graph = {false};
    options.checkpoint = {false, true};
    options.timer = kOnce;
    for (const Record& record : bench_tnp_step(options))
      expect_planned(record, std::to_string(context) + ", checkpoint " + record.attrs.at("checkpoint"));
  }
}

TEST_F(PlanCuda, AStepOfALanguageModelTakesWhatWasPlanned) {
  models::GptConfig gpt, of_36;
  models::LlamaConfig llama, qwen3{.family = models::LlamaFamily::qwen3};
  train::LanguageConfig named[] = {gpt, llama, of_36, qwen3};
  for (train::LanguageConfig& model : named)
    train::apply_size(model, std::holds_alternative<models::GptConfig>(model) ? "small" : "130m");
  // Heads of 36 elements, which are padded in attention.
  std::get<models::GptConfig>(named[2]).d_model = 720;
  std::get<models::GptConfig>(named[2]).heads = 20;
  for (const train::LanguageConfig& model : named)
    for (const auto& [vocabulary, batch] : {std::pair<int64_t, int64_t>{50257, 16}, {4000, 8}}) {
      LanguageStepOptions options;
      options.settings.model = model;
      std::visit([&, size = vocabulary](auto& config) { config.vocabulary = size; }, options.settings.model);
      options.settings.length = 1024;
      options.settings.batch = batch;
      options.device = Device::cuda(0);
      options.graph = {false};
      options.timer = kOnce;
      for (const char* const states : {"f32", "bf16"}) {
        options.settings.optimizer_states = states;
        for (const Record& record : bench_language_step(options))
          expect_planned(record, record.op + " " + std::to_string(vocabulary) + ", model " +
                                     std::to_string(&model - named) + ", states " + states);
      }
    }
}

}  // namespace
}  // namespace tessera::bench
