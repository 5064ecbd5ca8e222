#include <fmt/format.h>
#include <gtest/gtest.h>

#include "pretrained/config.h"
#include "tests/train/measured_peak.h"
#include "train/glue_job.h"

/// What `tessera plan bert` says of a step's memory, next to what the step's tensors took. Activations are
/// multiples of 2 MiB: of others the allocator counts what it cannot split off.

namespace tessera::train {
namespace {

struct Sizes {
  int64_t layers, d, d_ff, batch, length, vocabulary;
};
constexpr Sizes kWide = {2, 128, 512, 64, 64, 2000}, kNarrow = {3, 128, 192, 64, 64, 500},
                kDeep = {4, 64, 256, 32, 256, 1000}, kOne = {1, 128, 512, 32, 128, 20000},
                kSmall = {2, 64, 256, 32, 256, 100};

GlueSettings settings_of(const Sizes& sizes, double dropout = 0.1) {
  models::BertConfig config{.vocabulary = sizes.vocabulary,
                            .positions = 256,
                            .d_model = sizes.d,
                            .d_ff = sizes.d_ff,
                            .heads = sizes.d / 32,
                            .layers = sizes.layers};
  config.hidden_dropout = config.attention_dropout = config.classifier_dropout = dropout;
  config.head = models::BertHead::classify;
  GlueSettings settings;
  settings.bert = bert_config("c", pretrained::config_text(config), datasets::GlueTask::sst2);
  settings.batch = sizes.batch, settings.max_length = sizes.length, settings.steps = 10, settings.warmup = 0;
  return settings;
}

datasets::GlueBatch batch_of(const GlueSettings& settings) {
  const int64_t count = settings.batch, length = settings.max_length;
  std::vector<int64_t> tokens, types, classes;
  std::vector<int32_t> ends{0};
  for (int64_t i = 0; i < count * length; ++i)
    tokens.push_back(i * 37 % settings.bert.vocabulary), types.push_back(i % length * 2 / length);
  for (int64_t i = 0; i < count; ++i) classes.push_back(i % 2), ends.push_back(int32_t((i + 1) * length));
  const Shape flat{count * length};
  return {Tensor::from(tokens, flat), Tensor::from(types, flat),
          Tensor::zeros({0}, DType::boolean, Device::cpu()), Tensor::from(ends, {count + 1}),
          Tensor::from(classes, {count})};
}

double measured(const GlueSettings& settings) {
  const size_t before = Device::cpu().allocator().stats().allocated;
  GlueJob job(settings, Device::cpu());
  job.load(batch_of(settings));
  return measured_peak(job, before);
}

void expect_planned(const GlueSettings& settings, const std::string& what) {
  settings.validate();
  const double planned = settings.planned(Device::cpu()).total(), took = measured(settings);
  EXPECT_NEAR(planned / took, 1, 0.05) << what << ": planned " << planned << ", took " << took;
}

TEST(BertPlan, AStepTakesWhatWasPlanned) {
  for (const Sizes& sizes : {kWide, kNarrow, kDeep, kOne})
    for (const double dropout : {0.1, 0.0})
      expect_planned(settings_of(sizes, dropout),
                     fmt::format("{} blocks of {}, dropout {}", sizes.layers, sizes.d_ff, dropout));
}

TEST(BertPlan, AStepThatTrainsLessTakesWhatWasPlanned) {
  for (const char* const trained : {"biases", "head"}) {
    GlueSettings settings = settings_of(kWide);
    settings.trained = trained;
    expect_planned(settings, trained);
  }
}

TEST(BertPlan, ASlicedStepTakesWhatWasPlanned) {
  const auto expect_sliced = [](const char* mode, const char* weight_grad, const char* layers) {
    GlueSettings settings = settings_of(kSmall);
    settings.slice.mode = mode, settings.slice.rows = "10%", settings.slice.weight_grad = weight_grad;
    if (*layers) settings.slice.layers = layers;
    expect_planned(settings, fmt::format("{} {} of {}", mode, weight_grad, settings.slice.layers));
  };
  for (const char* const layers : {"", "all"})
    for (const char* const mode : {"random", "importance"})
      for (const char* const weight_grad : {"slice", "full", "none"})
        expect_sliced(mode, weight_grad, layers);
  for (const char* const layers :
       {"encoder.layer.*.intermediate.dense", "encoder.layer.*.output.dense", "encoder.layer.0.**"})
    expect_sliced("random", "slice", layers);
}

TEST(BertPlan, AStepThatDropsBranchesTakesTheMeanOfMany) {
  GlueSettings settings = settings_of(kSmall);
  const plan::Memory dense = settings.planned(Device::cpu());
  settings.drop.share = 0.5;
  const plan::Memory planned = settings.planned(Device::cpu());
  const size_t before = Device::cpu().allocator().stats().allocated;
  GlueJob job(settings, Device::cpu());
  job.load(batch_of(settings));
  double sum = 0;
  constexpr int kSteps = 12;
  for (int i = 0; i < kSteps; ++i) sum += measured_peak(job, before);
  // The mean of so few peaks has a standard error of some 2 %; the draws are the seed's.
  EXPECT_NEAR(planned.total() / (sum / kSteps), 1, 0.06);
  EXPECT_LT(planned.saved, 0.6 * dense.saved);
}

}  // namespace
}  // namespace tessera::train
