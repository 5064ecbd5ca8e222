#include "bench/step_bench.h"
#include "tests/bench/once.h"

#include <gtest/gtest.h>

#include "bench/bert_bench.h"
#include "bench/compare.h"
#include "bench/op_bench.h"

namespace tessera::bench {
namespace {

/// Steps of other models are other work; two of the same are not.
void expect_own_work(const Record& a, const Record& same, const Record& other, const char* what) {
  EXPECT_EQ(compare({a}, {same}).size(), 1u) << what;
  EXPECT_EQ(compare({a}, {other}).size(), 0u)
      << what << ": " << shape_text(a) << " and " << shape_text(other);
}

TEST(StepBench, AnotherModelIsOtherWork) {
  StepBenchOptions tnp;
  tnp.device = Device::cpu();
  tnp.timer = kOnce;
  tnp.settings.batch = 1, tnp.settings.context = 2, tnp.settings.targets = 2;
  tnp.settings.model.d_model = tnp.settings.model.d_ff = tnp.settings.model.embed_hidden = 8;
  tnp.settings.model.heads = tnp.settings.model.layers = 1;
  const auto of_tnp = [&](auto&& change) {
    StepBenchOptions options = tnp;
    change(options.settings.model);
    return bench_tnp_step(options).at(0);
  };
  const Record plain = of_tnp([](auto&) {});
  expect_own_work(plain, of_tnp([](auto&) {}), of_tnp([](auto& m) { m.d_ff = 9; }), "d_ff");
  expect_own_work(plain, plain, of_tnp([](auto& m) { m.layers = 2; }), "layers");
  expect_own_work(plain, plain, of_tnp([](auto& m) { m.heads = 2; }), "heads");
  expect_own_work(plain, plain, of_tnp([](auto& m) { m.pre_norm = true; }), "pre_norm");

  LanguageStepOptions gpt;
  gpt.device = Device::cpu();
  gpt.timer = kOnce;
  gpt.settings.batch = 1, gpt.settings.length = 4;
  gpt.settings.model = models::GptConfig{.vocabulary = 9, .d_model = 8, .d_ff = 8, .heads = 1, .layers = 1};
  const auto of_gpt = [&](auto&& change) {
    LanguageStepOptions options = gpt;
    change(std::get<models::GptConfig>(options.settings.model));
    return bench_language_step(options).at(0);
  };
  const Record small = of_gpt([](auto&) {});
  expect_own_work(small, of_gpt([](auto&) {}), of_gpt([](auto& m) { m.heads = 2; }), "heads");
  expect_own_work(small, small, of_gpt([](auto& m) { m.d_ff = 9; }), "d_ff");
  expect_own_work(small, small, of_gpt([](auto& m) { m.tied = false; }), "tied");
  const auto of_form = [&](const train::FormSettings& form) {
    LanguageStepOptions options = gpt;
    options.settings.factors = form;
    return bench_language_step(options).at(0).attrs.at("form");
  };
  EXPECT_EQ(of_form({.form = "low_rank", .rank = 2}), "low_rank of rank 2 in attention and 2 in the MLPs");
  EXPECT_TRUE(of_form({.form = "sltrain", .rank = 2, .density = 0.25}).ends_with(", density 0.25"));
  EXPECT_TRUE(of_form({.form = "lost", .rank = 2, .column_share = 0.5, .columns = "random"})
                  .ends_with(", column share 0.5, columns by random"));
  EXPECT_TRUE(of_form({.form = "lost", .rank = 2, .column_share = 0.5, .residual_rank = 1})
                  .ends_with(", column share 0.5, columns by residual of rank 1"));

  BertBenchOptions bert;
  bert.device = Device::cpu();
  bert.timer = kOnce;
  bert.shapes = {{1, 4}};
  bert.model = {.vocabulary = 9, .d_model = 8, .d_ff = 8, .heads = 1, .layers = 1};
  const Record base = bench_bert_step(bert).at(0), again = bench_bert_step(bert).at(0);
  bert.model.layers = 2;
  expect_own_work(base, again, bench_bert_step(bert).at(0), "layers");
}

TEST(StepBench, StatesOfTheSettingsAreNamedAndWeightsWithoutMastersAreSaidToBe) {
  StepBenchOptions options;
  options.device = Device::cpu();
  options.timer = kOnce;
  options.precisions = {Precision(DType::bf16)};
  options.settings.batch = options.settings.context = options.settings.targets = 1;
  const Record usual = bench_tnp_step(options).at(0);
  options.settings.optimizer_states = "bf16";
  const Record record = bench_tnp_step(options).at(0);
  EXPECT_FALSE(usual.attrs.contains("states"));
  EXPECT_EQ(record.attrs.at("states"), "bf16");
  EXPECT_EQ(usual.does.at("weights"), "bf16 with f32 masters");
  EXPECT_EQ(record.does.at("weights"), "bf16 without masters");
  EXPECT_LT(record.planned_bytes, usual.planned_bytes);
}

/// What peers measure has no model in its shape.
TEST(StepBench, TheUsualModelIsNotNamed) {
  StepBenchOptions options;
  options.device = Device::cpu();
  options.timer = kOnce;
  options.settings.batch = options.settings.context = options.settings.targets = 1;
  const Record record = bench_tnp_step(options).at(0);
  EXPECT_EQ(record.shape, (std::map<std::string, int64_t>{{"B", 1}, {"M", 1}, {"N", 1}}));
}

TEST(StepBench, TheModelHasAPlaceForEachTokenOfItsTexts) {
  train::LanguageSettings settings;
  set_length(settings, 2 * settings.length);
  EXPECT_NO_THROW(settings.validate());
}

TEST(OpBench, ACastToTheSameDTypeIsNoWorkAndOtherBytesAreCounted) {
  const ops::OpSpec& op = ops::find_op("cast");
  const auto bench = [&](const char* to) {
    OpBenchOptions options;
    options.device = Device::cpu();
    options.cases = {{.dims = {{"R", 4}, {"C", 8}}, .attrs = {{"to", std::string(to)}}}};
    options.precisions = {DType::f32};
    options.modes = {"fwd", "bwd"};
    options.timer = kOnce;
    return bench_op(op, options);
  };
  EXPECT_TRUE(bench("f32").empty());
  const auto records = bench("bf16");
  ASSERT_EQ(records.size(), 2u);
  for (const Record& record : records) EXPECT_EQ(record.bytes, 32 * (4 + 2));
}

}  // namespace
}  // namespace tessera::bench
