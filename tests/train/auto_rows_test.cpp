#include "train/auto_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "ops/select/select.h"
#include "tests/errors.h"
#include "tests/json_lines.h"
#include "tests/train/small_glue.h"
#include "train/gradient_probe.h"

/// `--rows auto`: the arithmetic, the estimate, and a run.

namespace tessera::train {
namespace {

// ---- the arithmetic ----

TEST(RowShares, TheVarianceIsThatOfTheProbabilities) {
  // k = 2 of four rows: 8 is certain, the others share one row: p = 1/2, 1/4, 1/4.
  const RowNorms rows{.norms = {8, 2, 1, 1}, .squares = {64, 4, 1, 1}};
  EXPECT_DOUBLE_EQ(sampling_variance(rows, 2), (2 - 1) * 4 + (4 - 1) * 1 + (4 - 1) * 1);
  // k = 1: p = norm / 12.
  EXPECT_NEAR(sampling_variance(rows, 1), (1.5 - 1) * 64 + (6 - 1) * 4 + 2 * (12 - 1) * 1, 1e-12);
  EXPECT_EQ(sampling_variance(rows, 4), 0);
  EXPECT_EQ(sampling_variance({.norms = {3, 0, 0}, .squares = {9, 0, 0}}, 1), 0) << "one row is all there is";
  EXPECT_EQ(sampling_variance({.norms = {0, 0}, .squares = {0, 0}}, 1), 0);
  EXPECT_NEAR(sampling_variance({.norms = {1, 1, 1, 1}, .squares = {1, 1, 1, 1}}, 1), 4 * 3, 1e-12);
  EXPECT_THROW(sampling_variance(rows, 0), Error);
}

/// The formula next to draws of the operator, of one column each, so that the sum is a number: systematic
/// sampling is not independent, but of rows in random order nearly so.
TEST(RowShares, TheVarianceIsNearThatOfDraws) {
  constexpr int64_t kRows = 200, kChosen = 20;
  constexpr int kDraws = 4000;
  RowNorms rows;
  std::vector<double> signed_values;
  for (int64_t i = 0; i < kRows; ++i) {
    const double value =
        std::exp(std::sin(double(i) * 12.9898) * 1.5) * (std::sin(double(i * i)) < 0 ? -1 : 1);
    signed_values.push_back(value);
    rows.norms.push_back(std::abs(value)), rows.squares.push_back(value * value);
  }
  const Tensor norms = Tensor::from(rows.norms, {kRows}).to(DType::f32);
  Rng rng(5);
  double sum = 0, squares = 0;
  for (int draw = 0; draw < kDraws; ++draw) {
    const ops::Selection chosen = ops::Selection::importance(norms, kChosen, rng);
    const auto indices = chosen.indices.to_vector<int32_t>();
    const auto scales = chosen.scales.to_vector<float>();
    double total = 0;
    for (size_t i = 0; i < indices.size(); ++i)
      total += signed_values[size_t(indices[i])] * double(scales[i]);
    sum += total, squares += total * total;
  }
  const double variance = squares / kDraws - std::pow(sum / kDraws, 2);
  const double formula = sampling_variance(rows, kChosen);
  EXPECT_GT(variance, 0.25 * formula);
  EXPECT_LT(variance, 4.0 * formula);
}

TEST(RowShares, OptionsTakeLeastTimeWithinTheBound) {
  // All rows, half, a quarter: group 0 saves more time per variance.
  const std::vector<std::vector<ShareOption>> groups{
      {{1, 0, 10}, {0.5, 1, 6}, {0.25, 4, 4}},
      {{1, 0, 10}, {0.5, 2, 7}, {0.25, 8, 5}},
  };
  using Chosen = std::vector<size_t>;
  EXPECT_EQ(choose_options(groups, 0), (Chosen{0, 0}));
  EXPECT_EQ(choose_options(groups, 0.99), (Chosen{0, 0}));
  EXPECT_EQ(choose_options(groups, 1), (Chosen{1, 0}));
  EXPECT_EQ(choose_options(groups, 3), (Chosen{1, 1}));
  EXPECT_EQ(choose_options(groups, 6), (Chosen{2, 1}));
  EXPECT_EQ(choose_options(groups, 12), (Chosen{2, 2}));
  EXPECT_EQ(choose_options(groups, INFINITY), (Chosen{2, 2}));
  // A step that does not fit ends its own group alone.
  EXPECT_EQ(choose_options({{{1, 0, 10}, {0.5, 5, 1}}, {{1, 0, 10}, {0.5, 1, 9.5}}}, 2), (Chosen{0, 1}));
  // What saves no time is not taken, whatever the bound; nor what another option beats in both.
  EXPECT_EQ(choose_options({{{1, 0, 10}, {0.5, 1, 10}, {0.25, 2, 12}}}, 100), (Chosen{0}));
  EXPECT_EQ(choose_options({{{1, 0, 10}, {0.5, 0, 12}}}, 100), (Chosen{0})) << "though it adds none";
  EXPECT_EQ(choose_options({{{1, 0, 10}, {0.5, 3, 8}, {0.25, 2, 6}}}, 100), (Chosen{2}));
  // Rows without a gradient cost no variance.
  EXPECT_EQ(choose_options({{{1, 0, 10}, {0.5, 0, 6}, {0.25, 0, 4}}}, 0), (Chosen{2}));
  // Between two others, above the line that joins them: skipped where the last one fits.
  EXPECT_EQ(choose_options({{{1, 0, 10}, {0.5, 2, 9}, {0.25, 4, 2}}}, 4), (Chosen{2}));
  EXPECT_THROW(choose_options({{{1, 1, 10}}}, 1), Error);
}

TEST(RowShares, AChoiceThatCostsMoreThanItSavesIsNotFaster) {
  const double flops = 4 * 2 * 768.0 * 3072.0;
  const auto seconds = [&](double rows, double share, bool gpu) {
    return backward_seconds(rows, rows * flops, 768, share, gpu);
  };
  // docs/sparse_backward.md: BERT-base's feed-forward network, importance, next to the dense backward pass.
  EXPECT_NEAR(seconds(2048, 0.1, true) / seconds(2048, 1, true), 0.79, 0.06);
  EXPECT_NEAR(seconds(8192, 0.1, true) / seconds(8192, 1, true), 0.49, 0.08);
  EXPECT_NEAR(seconds(36096, 0.1, true) / seconds(36096, 1, true), 0.25, 0.04);
  EXPECT_GT(seconds(512, 0.1, true), seconds(512, 1, true)) << "launches outweigh a short GEMM";
  EXPECT_LT(seconds(512, 0.5, false), seconds(512, 1, false));
  EXPECT_GT(seconds(512, 0.97, false), seconds(512, 1, false));
  const std::vector<double> shares = share_steps();
  EXPECT_EQ(shares.front(), 1);
  EXPECT_EQ(shares.back(), 1.0 / 64);
  EXPECT_TRUE(std::ranges::is_sorted(shares, std::greater()));
}

// ---- the estimate ----

struct AutoMade : MadeSst2 {
  AutoMade() : MadeSst2(160) {}
  GlueSettings job() const {
    GlueSettings own = MadeSst2::job(8);
    own.slice = {.mode = "importance", .rows = "auto", .estimate_every = 4};
    return own;
  }
};

std::vector<double> shares_of(const GlueJob& job) {
  return job.auto_rows()->shares.to_vector<double>();
}

TEST(AutoRows, GroupsAreNetworksAndSingleLayersAndStartWithAllRows) {
  const AutoMade made;
  GlueSettings settings = made.job();
  const auto groups = [&](const char* layers) {
    settings.slice.layers = layers;
    GlueJob job(settings, Device::cpu(), &made.examples);
    EXPECT_EQ(shares_of(job), std::vector<double>(job.auto_rows()->groups().size(), 1));
    return job.auto_rows()->groups();
  };
  EXPECT_EQ(groups("encoder.layer.*.intermediate.dense,encoder.layer.*.output.dense"),
            (std::vector<std::string>{"blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"}));
  EXPECT_EQ(groups("encoder.layer.1.output.dense,encoder.layer.*.attention.output.dense"),
            (std::vector<std::string>{"blocks.0.attention.out", "blocks.1.attention.out", "blocks.1.mlp.down",
                                      "blocks.2.attention.out"}));
}

/// Measured with other random numbers than those of the estimate, many more draws, and the variance over many
/// batches.
double added_variance(GlueJob& job, const AutoMade& made, int64_t batches, int draws) {
  const auto modules = pretrained::layer_parts(pretrained::linear_modules(job.model()));
  std::vector<pretrained::LayerParts> sliced;
  for (const pretrained::LayerParts& layer : modules)
    if (std::holds_alternative<nn::SlicedBackward>(layer.layer->form)) sliced.push_back(layer);
  EXPECT_FALSE(sliced.empty());
  const auto backward = [&] {
    Tape tape;
    tape.backward(job.loss());
  };
  nn::set_training(job.model(), false);  // the same masks, none, in all passes
  datasets::Loader<datasets::GlueItems> loader(
      made.examples.train, {.size = job.settings().batch, .drop_last = true, .device = Device::cpu()});
  std::vector<std::vector<Tensor>> dense;
  double added = 0;
  for (int64_t i = 0; i < batches; ++i) {
    job.load(loader.next());
    {
      const DenseScope scope(sliced);
      dense.push_back(copy_gradients(job.optimizer(), backward));
    }
    for (int draw = 0; draw < draws; ++draw)
      added +=
          squared_distance(copy_gradients(job.optimizer(), backward), dense.back()) / double(batches * draws);
  }
  double between = 0;
  for (int64_t i = 0; i < batches; ++i)
    for (int64_t j = 0; j < i; ++j) between += squared_distance(dense[size_t(i)], dense[size_t(j)]);
  nn::set_training(job.model(), true);
  return added / (between / double(batches * (batches - 1)));
}

TEST(AutoRows, WhatTheChoiceOfRowsAddsKeepsToTheBound) {
  const AutoMade made;
  for (const double bound : {0.025, 0.2}) {
    GlueSettings settings = made.job();
    settings.slice.variance = bound;
    settings.bert.hidden_dropout = settings.bert.attention_dropout = 0;
    double sum = 0, least = 1;
    int count = 0;
    for (const uint64_t seed : {0, 1, 2}) {
      settings.seed = seed;
      GlueJob job(settings, Device::cpu(), &made.examples);
      job.batch(0);
      for (const double share : shares_of(job)) least = std::min(least, share);
      sum += added_variance(job, made, 12, 8), count += 1;
    }
    EXPECT_LE(sum / count, bound) << "mean over three models, at " << bound;
    EXPECT_GT(sum / count, 0) << bound;
    EXPECT_LT(least, 1) << "rows are left out at " << bound;
  }
}

TEST(AutoRows, ATighterBoundTakesMoreRows) {
  const AutoMade made;
  const auto rows = [&](double bound) {
    GlueSettings settings = made.job();
    settings.slice.variance = bound;
    GlueJob job(settings, Device::cpu(), &made.examples);
    job.batch(0);
    const std::vector<double> shares = shares_of(job);
    return std::accumulate(shares.begin(), shares.end(), 0.0);
  };
  const double tight = rows(1e-6), usual = rows(1e-4), loose = rows(0.025);
  EXPECT_GE(tight, usual);
  EXPECT_GE(usual, loose);
  EXPECT_GT(tight, loose);
  EXPECT_EQ(rows(1e-30), 3) << "all rows where nothing else keeps to the bound";
}

TEST(AutoRows, EstimatesLeaveBatchMasksAndRandomStreamsAlone) {
  const AutoMade made;
  const GlueSettings settings = made.job();
  GlueSettings dense = settings;
  dense.slice = {};
  GlueJob job(settings, Device::cpu(), &made.examples), plain(dense, Device::cpu(), &made.examples);
  job.batch(0), plain.batch(0);
  for (const pretrained::LayerParts& layer : pretrained::layer_parts(pretrained::linear_modules(job.model())))
    layer.layer->form = nn::Dense{};
  const auto gradients = [](GlueJob& of) {
    return copy_gradients(of.optimizer(), [&] {
      Tape tape;
      tape.backward(of.loss());
    });
  };
  EXPECT_EQ(squared_distance(gradients(job), gradients(plain)), 0);
}

TEST(AutoRows, RanksThatShareAStepFindTheSameShares) {
  const AutoMade made;
  GlueSettings settings = made.job();
  settings.slice.variance = 0.2, settings.accumulate = 2;
  GlueJob alone(settings, Device::cpu(), &made.examples), first(settings, Device::cpu(), &made.examples),
      second(settings, Device::cpu(), &made.examples);
  first.divide({0, 1}), second.divide({1, 1});
  alone.batch(0), first.batch(0), second.batch(1);
  EXPECT_EQ(shares_of(alone), shares_of(first));
  EXPECT_EQ(shares_of(alone), shares_of(second));
  EXPECT_NE(shares_of(alone), std::vector<double>(3, 1));
}

// ---- a run ----

/// The lines of a log, without the time that each took.
std::vector<nlohmann::json> timeless(const std::string& log) {
  std::vector<nlohmann::json> lines = json_lines(log);
  for (nlohmann::json& line : lines) EXPECT_EQ(line.erase("seconds"), 1u);
  return lines;
}

TEST(AutoRows, ARunThatStopsGoesOnToTheSameBytesAndLog) {
  const AutoMade made;
  GlueSettings settings = made.job();
  settings.slice.variance = 0.2;
  const RunFiles whole = files_of_run(made, settings);
  const std::vector<nlohmann::json> whole_log = timeless(whole.rows);
  EXPECT_EQ(files_of_run(made, settings).checkpoint, whole.checkpoint) << "deterministic";
  for (const int64_t stop : {1, 4, 6}) {
    const RunFiles run = files_of_run(made, settings, stop);
    EXPECT_EQ(run.checkpoint, whole.checkpoint) << stop;
    EXPECT_EQ(timeless(run.rows), whole_log) << stop;
  }
  ASSERT_EQ(whole_log.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const nlohmann::json& line = whole_log[i];
    EXPECT_EQ(line.at("step"), 4 * i);
    EXPECT_EQ(line.at("shares").size(), 3u);
    EXPECT_TRUE(line.contains("held"));
    EXPECT_LE(line.at("added_variance").get<double>(), 0.2);
    EXPECT_GT(line.at("batch_variance").get<double>(), 0);
    // Two dense passes, and four draws per round; the first estimate does not know the factor yet.
    EXPECT_GE(line.at("passes").get<int>(), i == 0 ? 10 : 2);
    EXPECT_EQ((line.at("passes").get<int>() - 2) % 4, 0);
    EXPECT_LE(line.at("modelled_time").get<double>(), 1);
  }
}

TEST(AutoRows, PaddingRowsDoNotCount) {
  const AutoMade made;
  GlueSettings settings = made.job();
  settings.slice.variance = 0.2;
  settings.bert.hidden_dropout = settings.bert.attention_dropout = 0;
  GlueJob packed(settings, Device::cpu(), &made.examples);
  settings.batches = "padded";
  GlueJob padded(settings, Device::cpu(), &made.examples);
  packed.batch(0), padded.batch(0);
  EXPECT_EQ(shares_of(packed), shares_of(padded));
}

TEST(AutoRows, ProbesCompareTheSharesAsTheyAre) {
  const AutoMade made;
  GlueSettings settings = made.job();
  settings.slice.variance = 0.2;
  GlueSettings probed = settings;
  probed.slice.probe_every = 3;
  const auto tail = [](const std::string& bytes) { return bytes.substr(bytes.size() - 4096); };
  EXPECT_EQ(tail(files_of_run(made, settings).checkpoint), tail(files_of_run(made, probed).checkpoint));
}

TEST(AutoRows, SaysWhatIsWrong) {
  const auto refused = [](const SliceSettings& slice) { return message_of([&] { slice.validate(); }); };
  const SliceSettings good{.mode = "importance", .rows = "auto"};
  EXPECT_EQ(refused(good), "");
  for (const char* mode : {"random", "first", "top_norm"}) {
    SliceSettings slice = good;
    slice.mode = mode;
    EXPECT_NE(refused(slice).find("--slice importance"), std::string::npos) << mode;
  }
  SliceSettings slice = good;
  slice.mode = "threshold", slice.threshold = 1;
  EXPECT_NE(refused(slice).find("--rows"), std::string::npos);
  slice = good, slice.weight_grad = "none";
  EXPECT_NE(refused(slice).find("--weight-grad none"), std::string::npos);
  EXPECT_NE(message_of([&] { good.refuse_auto(); }).find("--rows auto"), std::string::npos);
  slice = good, slice.rows = "10%";
  for (const char* flag : {"--variance", "--estimate-every"})
    EXPECT_NE(message_of([&] { slice.check_given({flag}); }).find("--rows auto"), std::string::npos) << flag;
  EXPECT_EQ(message_of([&] { good.check_given({"--variance", "--estimate-every", "--rows"}); }), "");
  const AutoMade made;
  GlueSettings settings = made.job();
  settings.drop.share = 0.5;
  EXPECT_NE(message_of([&] { settings.validate(); }).find("--dropbp"), std::string::npos);
  settings = made.job(), settings.slice.variance = 0;
  EXPECT_NE(message_of([&] { settings.validate(); }).find("--variance"), std::string::npos);
  settings = made.job(), settings.slice.estimate_every = 0;
  EXPECT_NE(message_of([&] { settings.validate(); }).find("--estimate-every"), std::string::npos);
  settings = made.job();
  GlueJob job(settings, Device::cpu(), &made.examples);
  const TemporaryFolder root;
  job.checkpoint(0).save(root / "a");
  settings.slice.variance = 0.5;
  GlueJob other(settings, Device::cpu(), &made.examples);
  EXPECT_NE(message_of([&] { other.restore(root / "a"); }).find("variance"), std::string::npos);
}

}  // namespace
}  // namespace tessera::train
