#include <gtest/gtest.h>

#include <cmath>

#include "tests/errors.h"
#include "tests/json_lines.h"
#include "tests/train/small_glue.h"
#include "train/drop_settings.h"
#include "train/gradient_probe.h"

/// DropBP and comparisons with the dense gradient, as `train bert` has them.

namespace tessera::train {
namespace {

using nlohmann::json;

TEST(DropSettings, ARunThatStopsGoesOnToTheSameBytes) {
  const MadeSst2 made(24);
  GlueSettings job = made.job(4);
  const std::string dense = files_of_run(made, job).checkpoint;
  for (const char* rates : {"fixed", "sensitivity"}) {
    job.drop = {.share = 0.5, .rates = rates};
    const std::string whole = files_of_run(made, job).checkpoint;
    EXPECT_NE(whole, dense);
    for (const int64_t stop : {1, 2, 7})
      EXPECT_EQ(files_of_run(made, job, stop).checkpoint, whole) << rates << " " << stop;
  }
}

TEST(DropSettings, CalibrationGivesTheRatesThatTheSensitivitiesSayAndLeavesTheRestAlone) {
  const MadeSst2 made(24);
  GlueSettings settings = made.job(4);
  settings.drop = {.share = 0.4, .rates = "sensitivity"};
  GlueJob job(settings, Device::cpu(), &made.examples);
  ASSERT_NE(job.drops(), nullptr);
  job.batch(0);
  job.loss();
  EXPECT_EQ(job.drops()->rates(), std::vector<double>(6, 0.4)) << "until a tenth of the steps";
  job.batch(1);
  job.loss();
  double kept = 0, all = 0, least = 1, most = 0;
  for (size_t i = 0; i < 6; ++i) {
    const double rate = job.drops()->rates()[i], flops = job.drops()->branches()[i].flops;
    EXPECT_NEAR(rate * 10, std::round(rate * 10), 1e-9) << "tenths";
    kept += flops * (1 - rate), all += flops;
    least = std::min(least, rate), most = std::max(most, rate);
  }
  EXPECT_LE(kept, 0.6 * all + 1e-9);
  EXPECT_LT(least, most) << "branches differ";
  EXPECT_GE(job.drops()->dropped_share(), 0.4 - 1e-9);
}

TEST(DropSettings, SensitivitiesAreThoseOfNormsByHand) {
  const MadeSst2 made(24);
  GlueSettings settings = made.job(4);
  settings.bert.hidden_dropout = settings.bert.attention_dropout = 0;
  GlueJob job(settings, Device::cpu(), &made.examples);
  job.batch(0);
  nn::DropBP drops(job.model(), 48);
  const auto backward = [&] {
    Tape tape;
    tape.backward(job.loss());
  };
  const auto norms = [&](size_t dropped) {
    std::vector<bool> which(drops.size(), false);
    if (dropped < which.size()) which[dropped] = true;
    drops.set_dropped(which);
    nn::zero_grad(job.model());
    backward();
    std::vector<double> norms;
    for (const nn::NamedParameter& parameter : nn::parameters(job.model())) {
      double sum = 0;
      if (const Tensor g = grad(parameter.tensor); g.defined())
        for (const double value : g.to_vector<double>()) sum += value * value;
      norms.push_back(std::sqrt(sum));
    }
    nn::zero_grad(job.model());
    return norms;
  };
  const std::vector<double> got = drop_sensitivities(drops, job.optimizer(), backward);
  const std::vector<double> whole = norms(99);
  ASSERT_EQ(got.size(), drops.size());
  for (size_t branch = 0; branch < drops.size(); ++branch) {
    const std::vector<double> without = norms(branch);
    double expected = 0;
    for (size_t i = 0; i < whole.size(); ++i) expected += std::pow(whole[i] - without[i], 2);
    EXPECT_NEAR(got[branch], expected, 1e-5 * expected) << branch;
    EXPECT_GT(expected, 0);
  }
}

TEST(DropSettings, SaysWhatIsWrong) {
  const auto refused = [](DropSettings drop) { return message_of([&] { drop.validate(); }); };
  EXPECT_EQ(refused({}), "");
  EXPECT_EQ(refused({.share = 0.95}), "");
  EXPECT_NE(refused({.share = 1}).find("0 to below 1"), std::string::npos);
  EXPECT_NE(refused({.share = -0.1}).find("--dropbp"), std::string::npos);
  EXPECT_NE(refused({.share = NAN}).find("--dropbp"), std::string::npos);
  EXPECT_NE(refused({.share = 0.95, .rates = "sensitivity"}).find("at most 0.9"), std::string::npos);
  EXPECT_NE(refused({.rates = "sensitivity"}).find("add --dropbp P"), std::string::npos);
  EXPECT_NE(message_of([] { DropSettings().check_given({"--dropbp-rates"}); }).find("add --dropbp P"),
            std::string::npos);
  const MadeSst2 made(24);
  GlueSettings settings = made.job(4);
  settings.drop.share = 0.5;
  GlueJob job(settings, Device::cpu(), &made.examples);
  const TemporaryFolder root;
  job.checkpoint(0).save(root / "a");
  settings.drop.share = 0.25;
  GlueJob other(settings, Device::cpu(), &made.examples);
  EXPECT_NE(message_of([&] { other.restore(root / "a"); }).find("dropbp"), std::string::npos);
  settings.optimizer = "galore";
  EXPECT_NE(message_of([&] { settings.validate(); }).find("subspace"), std::string::npos);
}

// ---- comparisons with the dense gradient ----

GradientDistance named(const std::vector<GradientDistance>& all, const std::string& name) {
  for (const GradientDistance& each : all)
    if (each.name == name) return each;
  ADD_FAILURE() << name;
  return {};
}

std::vector<GradientDistance> probe(const MadeSst2& made, const nn::SlicedBackward& slice, int draws) {
  GlueSettings settings = made.job(4);
  settings.bert.hidden_dropout = settings.bert.attention_dropout = 0;
  GlueJob job(settings, Device::cpu(), &made.examples);
  job.batch(0);
  const pretrained::LinearModules modules = pretrained::linear_modules(job.model());
  const std::string layers = SliceSettings().layers;
  pretrained::set_form(modules, layers, slice);
  std::vector<pretrained::LayerParts> sliced = layer_parts(modules);
  std::erase_if(sliced, [](const pretrained::LayerParts& layer) {
    return std::holds_alternative<nn::Dense>(layer.layer->form);
  });
  const auto distances = probe_gradient(sliced, job.optimizer(), draws, [&] {
    Tape tape;
    tape.backward(job.loss());
  });
  EXPECT_EQ(std::get<nn::SlicedBackward>(job.model().blocks[0].mlp.up.form), slice) << "as before";
  return distances;
}

TEST(GradientProbe, AllRowsAreTheDenseGradientAndFewOnesAreUnbiasedButNoisy) {
  const MadeSst2 made(24);
  Rng rows(3);
  const auto all = probe(made, {.rows = ops::SelectMode::random, .share = 1.0, .rng = rows}, 2);
  ASSERT_EQ(all.size(), 7u) << "two layers in each of three blocks, and all parameters";
  for (const GradientDistance& each : all) {
    EXPECT_NEAR(each.cosine, 1, 1e-6) << each.name;
    EXPECT_NEAR(each.bias, 0, 1e-6) << each.name;
    EXPECT_NEAR(each.variance, 0, 1e-6) << each.name;
  }
  constexpr int kDraws = 200;
  const auto random = probe(made, {.rows = ops::SelectMode::random, .share = 0.25, .rng = rows}, kDraws);
  for (const GradientDistance& each : random) {
    EXPECT_GT(each.variance, each.name == "all" ? 0 : 0.01) << each.name;
    EXPECT_LT(each.bias, 3 * std::sqrt(each.variance / kDraws)) << each.name;
  }
  // The classifier reads the first tokens, whose rows hold nearly all of the gradient: importance takes them.
  const auto norms = probe(made, {.rows = ops::SelectMode::importance, .share = 0.25, .rng = rows}, kDraws);
  for (const GradientDistance& each : norms) {
    EXPECT_GT(each.variance, 0) << each.name;
    // In the last block these are the only rows, and nothing is gained.
    if (each.name.starts_with("blocks.0") || each.name.starts_with("blocks.1"))
      EXPECT_LT(each.variance, 0.5 * named(random, each.name).variance) << each.name;
    EXPECT_LT(each.bias, 3 * std::sqrt(each.variance / kDraws)) << each.name;
  }
  const auto biased = probe(made, {.rows = ops::SelectMode::first, .share = 0.25}, 3);
  EXPECT_GT(named(biased, "blocks.0.mlp.up.weight").bias, 0.3);
  EXPECT_NEAR(named(biased, "blocks.0.mlp.up.weight").variance, 0, 1e-9);
  const auto none =
      probe(made, {.rows = ops::SelectMode::first, .share = 0.25, .weight_grad = ops::WeightGrad::none}, 1);
  EXPECT_EQ(named(none, "blocks.1.mlp.down.weight").cosine, 0);
  EXPECT_NEAR(named(none, "blocks.1.mlp.down.weight").bias, 1, 1e-6);
}

TEST(GradientProbe, ChangesNothingOfTheTrainingAndIsWrittenOncePerStep) {
  const MadeSst2 made(24);
  GlueSettings job = made.job(4);
  job.slice = {.mode = "importance", .rows = "25%"};
  GlueSettings probed = job;
  probed.slice.probe_every = 4;
  // The settings in the checkpoints differ, nothing else.
  const RunFiles plain = files_of_run(made, job), with = files_of_run(made, probed);
  const auto tail = [](const std::string& bytes) { return bytes.substr(bytes.size() - 4096); };
  EXPECT_EQ(tail(plain.checkpoint), tail(with.checkpoint));
  EXPECT_EQ(files_of_run(made, probed, 6).probes, with.probes);
  std::vector<int> steps;
  for (const json& parsed : json_lines(with.probes)) {
    steps.push_back(parsed["step"]);
    EXPECT_GT(parsed["gradients"]["all"]["cosine"].get<double>(), 0.1);
    EXPECT_EQ(parsed["gradients"].size(), 7u);
  }
  EXPECT_EQ(steps, (std::vector<int>{0, 4, 8}));
}

}  // namespace
}  // namespace tessera::train
