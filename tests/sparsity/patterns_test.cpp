#include "sparsity/patterns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/npy.h"
#include "ops/bits/bits.h"
#include "report/database.h"
#include "report/run_table.h"
#include "runtime/parallel.h"
#include "sparsity/pattern_bytes.h"
#include "sparsity/pattern_page.h"
#include "sparsity/pattern_report.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/sparsity/page_driver.h"

/// Expectations with many digits are what tests/parity/patterns_golden.py prints (numpy, scipy,
/// scikit-learn), of masks and values made from the same hash.

namespace tessera::sparsity {
namespace {

uint32_t hashed(uint32_t i, uint32_t seed) {
  uint32_t x = i * 2654435761u + seed * 40503u;
  x = (x ^ x >> 16) * 2246822519u;
  x = (x ^ x >> 13) * 3266489917u;
  return x ^ x >> 16;
}

constexpr int64_t kCount = 60, kLength = 96;

/// Values 0 and 1 of n features; with `clusters`, each copies one of so many prototypes and flips an eighth
/// of it.
Tensor ones(uint32_t seed, uint32_t clusters = 0) {
  std::vector<double> values;
  for (uint32_t i = 0; i < kCount; ++i)
    for (uint32_t j = 0; j < kLength; ++j) {
      uint32_t bit = hashed(i * kLength + j, seed) & 1;
      if (clusters > 0)
        bit = (hashed(i % clusters * kLength + j, seed) & 1) ^ (hashed(i * kLength + j, seed + 1) % 8 == 0);
      values.push_back(bit);
    }
  return Tensor::from(values, {kCount, kLength});
}
Features features(const Tensor& x) {
  return {ops::pack_bits(x), x.size(1)};
}
Tensor values_at(const Tensor& mask, uint32_t seed) {
  std::vector<double> values = mask.to_vector<double>();
  for (size_t i = 0; i < values.size(); ++i) values[i] *= hashed(uint32_t(i), seed) % 1000 / 500.0 - 1;
  return Tensor::from(values, mask.shape());
}
InnerProducts<int32_t> products(const Tensor& overlaps) {
  return {{overlaps.data<int32_t>(), size_t(overlaps.count())}, overlaps.size(0)};
}
double mean(const std::vector<double>& values) {
  return summarise(values).mean;
}
double figure(const Figures& figures, const std::string& name) {
  for (const auto& [own, value] : figures)
    if (own == name) return value;
  ADD_FAILURE() << "no figure " << name;
  return 0;
}

// ---- metrics ----

TEST(PatternMetrics, AgreeWithNumpyAndScipy) {
  const Tensor a = ones(1), b = ones(2);
  const PairMetrics metrics = compare_features(features(a), features(b));
  EXPECT_NEAR(mean(metrics.jaccard), 0.336320154723, 1e-11);
  EXPECT_NEAR(summarise(metrics.jaccard).sd, 0.0514109150178, 1e-12);
  EXPECT_NEAR(mean(metrics.cosine), 0.502580706187, 1e-11);
  EXPECT_NEAR(mean(metrics.hamming), 0.493055555556, 1e-11);
  EXPECT_NEAR(mean(value_cosine(values_at(a, 7), values_at(b, 8))), -0.00556297244103, 1e-12);
  PatternOptions options;
  options.clusters = {4};
  const Figures figures = figures_of(features(a), Tensor(), options);
  EXPECT_NEAR(figure(figures, "hamming_mean"), 0.499882297552, 1e-11);
  EXPECT_NEAR(figure(figures, "hamming_sd"), 0.0505526764763, 1e-12);
  EXPECT_NEAR(figure(figures, "hamming_max"), 0.65625, 1e-15);
  EXPECT_NEAR(figure(figures, "jaccard_mean"), 0.326971630315, 1e-11);
}

TEST(PatternMetrics, EmptyFeaturesAreAlike) {
  const Tensor x = Tensor::from(std::vector<float>{0, 0, 0, 0, 1, 1}, {3, 2});
  const Tensor y = Tensor::from(std::vector<float>{0, 0, 1, 0, 1, 0}, {3, 2});
  const PairMetrics metrics = compare_features(features(x), features(y));
  EXPECT_EQ(metrics.jaccard, (std::vector<double>{1, 0, 0.5}));
  EXPECT_EQ(metrics.cosine, (std::vector<double>{1, 0, 1 / std::sqrt(2.0)}));
  EXPECT_EQ(metrics.hamming, (std::vector<double>{0, 0.5, 0.5}));
}

TEST(PatternMetrics, TheCensusCountsZeroFullDuplicateAndUniqueFeatures) {
  const Tensor x = Tensor::from(std::vector<float>{0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 1, 0}, {7, 2});
  const Census census = census_of(features(x));
  EXPECT_EQ(census.zero, 2);
  EXPECT_EQ(census.one, 1);
  EXPECT_EQ(census.duplicate, 3);  // 00 again, 10 twice again
  EXPECT_EQ(census.unique, 2);     // 11 and 01
}

TEST(PatternMetrics, CoherenceIsTheShareOfPositionsWhereAWholeGroupIsPruned) {
  const Tensor x = Tensor::from(std::vector<float>{0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0}, {4, 4});
  const std::vector<int64_t> order{0, 1, 2, 3}, mixed{0, 3, 1, 2};
  EXPECT_EQ(coherence_of(features(x), order, 2), (std::vector<double>{0.5, 0}));
  EXPECT_EQ(coherence_of(features(x), mixed, 2), (std::vector<double>{0.75, 0}));
  EXPECT_EQ(coherence_of(features(x), order, 3).size(), 1u);  // what is left over is no group
  // Independent features: (1 - p)^8, which is 0.39 % at one half; five standard deviations.
  std::vector<float> half(8 * 40000);
  for (size_t i = 0; i < half.size(); i += 2) half[i] = 1;
  const Features drawn = draw_null(features(Tensor::from(half, {8, 40000})), NullModel::independent, 1, 0);
  EXPECT_NEAR(coherence_of(drawn, std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}, 8)[0], 1 / 256.0, 0.0016);
}

TEST(PatternMetrics, FeaturesAreColumnsButRowsOfASecondProjection) {
  EXPECT_EQ(axis_of("model.layers.1.mlp.down_proj"), Axis::row);
  EXPECT_EQ(axis_of("model.decoder.layers.0.fc2"), Axis::row);
  EXPECT_EQ(axis_of("model.layers.1.self_attn.o_proj"), Axis::column);
  const Tensor x = ones(4).slice(0, 0, 20);
  const Mask mask = mask_of(x);
  EXPECT_EQ(features_of(mask, Axis::row).count(), 20);
  const Features columns = features_of(mask, Axis::column);
  EXPECT_EQ(columns.count(), kLength);
  EXPECT_EQ(columns.bits.to_vector<int32_t>(), ops::pack_bits(x.transpose(0, 1)).to_vector<int32_t>());
}

TEST(PatternMetrics, GroupingIsAPermutationThatFindsThePrototypes) {
  const Features clustered = features(ones(3, 4));
  const Tensor overlaps = overlaps_of(clustered);
  std::vector<int64_t> order = exhaustive_order(overlaps.data<int32_t>(), kCount, 15);
  for (int64_t group = 0; group < 4; ++group)
    for (int64_t i = 0; i < 15; ++i)
      EXPECT_EQ(order[size_t(15 * group + i)] % 4, order[size_t(15 * group)] % 4) << group;
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < kCount; ++i) EXPECT_EQ(order[size_t(i)], i);
  const std::vector<int64_t> nearest = nearest_order(overlaps.data<int32_t>(), kCount, 7);
  EXPECT_EQ(nearest.front(), 7);
  for (size_t i = 0; i < 15; ++i) EXPECT_EQ(nearest[i] % 4, 3);
}

// ---- what a pattern buys ----

TEST(PatternBytes, AreThoseOfEachFormat) {
  // 2 rows of 40: row 0 keeps columns 0 and 20 (19 skipped: one filler), row 1 columns 3 and 39 (35: two).
  std::vector<float> values(80);
  values[0] = values[20] = values[43] = values[79] = 1;
  const auto of = [](const std::vector<float>& x) {
    std::vector<std::pair<std::string, int64_t>> bytes;
    for (const FormatBytes& one : format_bytes(mask_of(Tensor::from(x, {2, 40})))) {
      bytes.emplace_back(one.format, one.bytes);
      EXPECT_EQ(one.of_dense, double(one.bytes) / 160);
      EXPECT_EQ(one.bound, 160 / double(one.bytes));
    }
    return bytes;
  };
  using Bytes = std::vector<std::pair<std::string, int64_t>>;
  EXPECT_EQ(of(values), (Bytes{{"dense", 160},
                               {"csr", 8 + 8 + 12},
                               {"bitmap", 8 + 10},
                               {"column_tiles", 8 + 40 * 36},
                               {"gaps", 7 * 2 + 4},
                               {"2:4", 80 + 10}}));
  values[1] = values[2] = 1;  // three of a group of four
  EXPECT_EQ(of(values).back().first, "gaps");
}

TEST(PatternBytes, BlocksAreSkippedWhereAllOfTheirFeaturesArePruned) {
  // Features 0 and 2 are alike, and so are 1 and 3: the permutation brings them together.
  const Features found =
      features(Tensor::from(std::vector<float>{1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1}, {4, 4}));
  const std::vector<SkippedBlocks> blocks = skipped_blocks(found, overlaps_of(found), 2);
  ASSERT_EQ(blocks.size(), 3u);
  EXPECT_EQ(blocks[0].share, 0.5);
  EXPECT_EQ(blocks[1].share, 0);
  EXPECT_EQ(blocks[1].bound, 1);
  EXPECT_EQ(blocks[2].order, "exhaustive");
  EXPECT_EQ(blocks[2].share, 0.5);
  EXPECT_EQ(blocks[2].bound, 2);
}

// ---- clusters ----

TEST(PatternClusters, EqualCentresGiveTheLabelsOfScikitLearn) {
  const Tensor overlaps = overlaps_of(features(ones(3, 4)));
  const std::vector<int64_t> centres{0, 13, 26, 39, 52};
  const Clusters found = k_means_from(products(overlaps), centres, 300);
  std::vector<int32_t> expected;
  for (int32_t i = 0; i < kCount; ++i) expected.push_back(i == 52 ? 4 : i % 4);
  EXPECT_EQ(found.labels, expected);
  EXPECT_NEAR(found.inertia, 591.971428571, 1e-8);
}

TEST(PatternClusters, OwnStartsAreAsGoodAsThoseOfScikitLearn) {
  const Tensor a = overlaps_of(features(ones(1))), c = overlaps_of(features(ones(3, 4)));
  EXPECT_LE(k_means(products(a), {.k = 8}).inertia, 1.01 * 1168.18055556);
  EXPECT_NEAR(k_means(products(c), {.k = 4}).inertia, 604.8, 1e-9);
  const std::vector<double> values = inner_products(values_at(ones(1), 7));
  EXPECT_LE(k_means(InnerProducts<double>{values, kCount}, {.k = 4}).inertia, 1.01 * 834.804028577);
}

TEST(PatternClusters, AClusterWithoutPointsGetsTheFarthestOne) {
  // Two equal centres: the second gets no point, and then the one that is farthest from its mean.
  const Tensor x = Tensor::from(std::vector<float>{1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1}, {3, 4});
  const Tensor overlaps = overlaps_of(features(x));
  const std::vector<int64_t> centres{0, 1};
  EXPECT_EQ(k_means_from(products(overlaps), centres, 100).labels, (std::vector<int32_t>{0, 0, 1}));
  EXPECT_EQ(k_means_from(products(overlaps), centres, 100).inertia, 0);
}

TEST(PatternClusters, SingletonsInflateTheRatioAndCanBeLeftOut) {
  // Features 0, 1 are alike but for one position; 2 stands alone.
  const Tensor x = Tensor::from(std::vector<float>{1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1}, {3, 4});
  const Tensor overlaps = overlaps_of(features(x));
  const std::vector<int32_t> labels{0, 0, 1};
  const Separation found = separation_of(products(overlaps), labels, 2, Draws(1, DrawFor::cross_pairs));
  EXPECT_EQ(found.singletons, 1);
  EXPECT_EQ(found.sizes, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(found.balance, 0.5);
  EXPECT_EQ(found.within_pairs, 0.5);   // (1 + 0) / 2
  EXPECT_EQ(found.between_pairs, 3.5);  // 4 and 3
  EXPECT_EQ(found.ratio_pairs, 7);
  EXPECT_TRUE(std::isnan(found.ratio_pairs_without_singletons));  // one larger cluster: nothing lies between
  EXPECT_NEAR(found.within_means, 2 * 0.5 / 3, 1e-15);
  EXPECT_NEAR(found.between_means, std::sqrt(1 + 0.25 + 2), 1e-15);
}

TEST(PatternClusters, TheMapIsAsGoodAsThatOfScikitLearn) {
  for (const auto& [x, divergence] : {std::pair{ones(1), 0.786384328731}, {ones(3, 4), 0.043211644324}}) {
    const Tensor overlaps = overlaps_of(features(x));
    std::vector<double> squared;
    for (int64_t i = 0; i < kCount; ++i)
      for (int64_t j = 0; j < kCount; ++j)
        squared.push_back(double(hamming_from(overlaps.data<int32_t>(), kCount, i, j)));
    EXPECT_LE(tsne(squared, kCount, {.perplexity = 15}).divergence, 1.02 * divergence);
  }
}

// ---- chance ----

TEST(PatternChance, EachNullModelKeepsWhatItSays) {
  const Features observed = features(ones(3, 4));
  const auto counts = [](const Features& f) { return ops::count_bits(f.bits).to_vector<int32_t>(); };
  for (const NullModel model : kNullModels) {
    const Features drawn = draw_null(observed, model, 5, 3), again = draw_null(observed, model, 5, 3),
                   other = draw_null(observed, model, 5, 4);
    EXPECT_EQ(drawn.bits.to_vector<int32_t>(), again.bits.to_vector<int32_t>());
    EXPECT_NE(drawn.bits.to_vector<int32_t>(), other.bits.to_vector<int32_t>());
    EXPECT_NE(drawn.bits.to_vector<int32_t>(), observed.bits.to_vector<int32_t>());
    EXPECT_NEAR(drawn.density(), observed.density(), 0.03) << name_of(model);  // five standard deviations
    EXPECT_EQ(counts(drawn) == counts(observed), model != NullModel::independent) << name_of(model);
    EXPECT_EQ(position_counts(drawn) == position_counts(observed), model == NullModel::sums_kept)
        << name_of(model);
  }
}

TEST(PatternChance, ADrawOfEveryDensityIsNearIt) {
  for (const double share : {0.0, 0.1, 0.5, 0.9, 1.0}) {
    std::vector<float> values(100000);
    std::fill_n(values.begin(), size_t(share * 100000), 1.0f);
    const Features drawn =
        draw_null(features(Tensor::from(values, {10, 10000})), NullModel::independent, 1, 0);
    EXPECT_NEAR(drawn.density(), share, 0.01);
  }
}

TEST(PatternChance, RandomMasksAreWithinChanceAndPrototypesBeyond) {
  PatternOptions options;
  options.draws = 60, options.clusters = {4}, options.starts = 2;
  for (const uint32_t prototypes : {0u, 4u}) {
    const Features pool = features(ones(3, prototypes));
    const Figures observed = figures_of(pool, Tensor(), options);
    const auto levels = chance_levels(pool, Tensor(), observed, options);
    for (size_t f = 0; f < observed.size(); ++f)
      if (observed[f].first == "nearest_distance")
        for (const ChanceLevel& level : levels[f]) {
          EXPECT_EQ(level.draws, 60);
          EXPECT_EQ(level.p > 0.05, prototypes == 0) << level.p;
        }
  }
}

TEST(PatternChance, ALevelCountsDrawsAsFarFromTheirMean) {
  const ChanceLevel level = chance_level(5, {1, 2, 3, 4, 5});
  EXPECT_EQ(level.mean, 3);
  EXPECT_NEAR(level.effect, 2 / std::sqrt(2.5), 1e-15);
  EXPECT_NEAR(level.p, 3.0 / 6, 1e-15);  // 1 and 5 are as far
  EXPECT_NEAR(level.low, 1.1, 1e-15);
  EXPECT_NEAR(level.high, 4.9, 1e-15);
  EXPECT_EQ(chance_level(2, {2, 2}).effect, 0);
  EXPECT_TRUE(std::isnan(chance_level(3, {2, 2}).effect));
  EXPECT_TRUE(std::isnan(chance_level(NAN, {2, 2}).p));
}

TEST(PatternChance, ABootstrapIntervalHoldsTheMean) {
  const std::vector<double> values{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const Interval interval = bootstrap_mean(values, 2000, Draws(1, DrawFor::bootstrap));
  EXPECT_NEAR(interval.low, 5.5 - 1.96 * 2.8723 / std::sqrt(10.0), 0.15);
  EXPECT_NEAR(interval.high, 5.5 + 1.96 * 2.8723 / std::sqrt(10.0), 0.15);
}

TEST(PatternChance, MovedValuesStandWhereTheMaskKeepsAPosition) {
  const Tensor values = Tensor::from(std::vector<double>{5, 0, 7, 0, 0, 0, 0, 0}, {2, 4});
  const Tensor places = Tensor::from(std::vector<double>{0, 1, 1, 1, 1, 0, 0, 0}, {2, 4});
  EXPECT_EQ(move_values(values, features(places)).to_vector<double>(),
            (std::vector<double>{0, 5, 7, 5, 0, 0, 0, 0}));
}

// ---- the store and the page ----

AnalyzeOptions small_options() {
  AnalyzeOptions options;
  options.patterns.draws = 5, options.patterns.executions = 3, options.patterns.starts = 2;
  options.patterns.clusters = {4, 8}, options.patterns.pool = 40, options.patterns.nearest = 24;
  return options;
}
void put_masks(const std::string& path, uint32_t seed, const std::string& method) {
  save_masks(path, {.info = {.fingerprint = "",
                             .model = "",
                             .method = method,
                             .pattern = "unstructured",
                             .sparsity = "0.5",
                             .seed = ""},
                    .layers = {{"model.layers.0.mlp.up_proj", mask_of(ones(seed))},
                               {"model.layers.1.mlp.down_proj", mask_of(ones(seed + 1, 4))}}});
}
void no_lines(const std::string&) {}

TEST(Patterns, TheDatabaseHoldsEveryTableAndIsTheSameAgain) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "wanda"), put_masks(folder / "b.safetensors", 2, "sparsegpt");
  const std::vector<std::string> inputs{folder / "a.safetensors", folder / "b.safetensors"};
  analyze(inputs, folder / "r1", small_options(), no_lines);
  const int before = cpu_threads();
  set_cpu_threads(3);
  analyze(inputs, folder / "r2", small_options(), no_lines);
  set_cpu_threads(before);
  const auto bytes = [&](const char* name) {
    return io::read_file((folder / name) + "/sparsity.sqlite", 64 << 20);
  };
  EXPECT_EQ(bytes("r1"), bytes("r2"));
  report::Database found =
      report::Database::read_only((folder / "r1") + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
  const auto one = [&](const std::string& sql) { return std::get<int64_t>(found.run(sql).rows.at(0).at(0)); };
  EXPECT_EQ(one("SELECT count(*) FROM matrices"), 4);
  EXPECT_EQ(one("SELECT count(*) FROM features"), 160);
  EXPECT_EQ(one("SELECT count(*) FROM nearest_neighbor_metrics"), 160 * 8);
  EXPECT_EQ(one("SELECT sum(pairs) FROM distances WHERE matrix_id = 1"), 40 * 39 / 2);
  EXPECT_EQ(one("SELECT count(*) FROM clusters"),
            4 * 2 * 3);  // matrices, k, executions; masks have no values
  EXPECT_EQ(one("SELECT count(*) FROM pairs"), 2 * 3);
  EXPECT_EQ(one("SELECT count(*) FROM nulls WHERE subject = 'pair'"), 6 * 3);
  EXPECT_EQ(one("SELECT count(*) FROM nulls WHERE p_corrected IS NULL AND p IS NOT NULL"), 0);
  EXPECT_EQ(one("SELECT count(*) FROM wanda_0_5_down_proj"), 40);
  EXPECT_EQ(one("SELECT count(*) FROM cluster_stability WHERE executions = 3"), 8);
  // Overlapping masks of the same bits are wholly alike; these are not.
  EXPECT_EQ(one("SELECT count(*) FROM pairs WHERE metric = 'jaccard' AND low <= mean AND mean <= high"), 2);
}

TEST(Patterns, InputsOfOneMethodAndSparsityHaveViewsOfTheirOwn) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  put_masks(folder / "seed-1.safetensors", 1, "wanda"), put_masks(folder / "seed-2.safetensors", 2, "wanda");
  Masks pairs{.info = {.fingerprint = "",
                       .model = "",
                       .method = "wanda",
                       .pattern = "2:4",
                       .sparsity = "0.5",
                       .seed = ""},
              .layers = {{"model.layers.0.mlp.up_proj", mask_of(ones(1))},
                         {"model.layers.1.mlp.down_proj", mask_of(ones(2, 4))}}};
  save_masks(folder / "pairs.safetensors", pairs);
  analyze({folder / "seed-1.safetensors", folder / "seed-2.safetensors", folder / "pairs.safetensors"},
          folder / "r", small_options(), no_lines);
  report::Database found =
      report::Database::read_only((folder / "r") + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
  for (const char* view : {"wanda_0_5_unstructured_seed_1_safetensors_down_proj",
                           "wanda_0_5_unstructured_seed_2_safetensors_down_proj", "wanda_0_5_2_4_down_proj"})
    EXPECT_EQ(std::get<int64_t>(found.run(std::string("SELECT count(*) FROM ") + view).rows.at(0).at(0)), 40);
}

TEST(Patterns, NumbersOfClustersThatAreLeftOutAreSaid) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "wanda");
  AnalyzeOptions options = small_options();
  options.patterns.clusters = {4, 24, 25, 64};  // of the 24 nearest features
  std::string lines;
  analyze({folder / "a.safetensors"}, folder / "r", options, [&](const std::string& line) { lines += line; });
  EXPECT_NE(lines.find("up_proj: sparsity 0."), std::string::npos) << lines;
  EXPECT_NE(lines.find("; no 25,64 clusters of 24 features"), std::string::npos) << lines;
}

TEST(Patterns, TheReportPutsExecutionsAndChanceNextToEachOther) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  EXPECT_STREQ(stability_of(29.9), "stable");
  EXPECT_STREQ(stability_of(30), "moderate");
  EXPECT_STREQ(stability_of(50), "unstable");
  EXPECT_STREQ(stability_of(std::nan("")), "");
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "wanda"), put_masks(folder / "b.safetensors", 2, "sparsegpt");
  analyze({folder / "a.safetensors", folder / "b.safetensors"}, folder / "r", small_options(), no_lines);
  report::Database found =
      report::Database::read_only((folder / "r") + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
  const std::vector<ReportSection> sections = report_sections(found);
  std::map<std::string, nlohmann::json> tables;
  for (const ReportSection& section : sections) tables[section.table.name] = report::to_json(section.table);
  // Masks alone: no perplexities, and no clusters of values.
  ASSERT_EQ(tables.size(), 5u);
  ASSERT_EQ(tables["clusters"].size(), 2u * 2 * 2);  // inputs, projections, k
  const nlohmann::json& first = tables["clusters"][0];
  EXPECT_EQ(first["input"], "a.safetensors");
  EXPECT_EQ(first["projection"], "down_proj");
  EXPECT_EQ(first["executions"], 3);
  std::vector<double> ratios;
  for (const auto& row : found
                             .run("SELECT ratio_means FROM clusters WHERE k = 4 AND matrix_id = (SELECT id "
                                  "FROM matrices WHERE input = 'a.safetensors' AND projection = 'down_proj')")
                             .rows)
    ratios.push_back(report::number_in(row[0]));
  const Summary ratio = summarise(ratios);
  EXPECT_NEAR(first["separation_ratio"], ratio.mean, 1e-12);
  EXPECT_NEAR(first["separation_ratio_sd"], ratio.sd, 1e-12);
  EXPECT_NEAR(first["coefficient_of_variation"], 100 * ratio.sd / ratio.mean, 1e-9);
  EXPECT_EQ(first["stability"], stability_of(first["coefficient_of_variation"]));
  EXPECT_EQ(first["hamming_range"], first["hamming_max"].get<double>() - first["hamming_min"].get<double>());
  const report::Table distances = found.run(
      "SELECT min(distance), max(distance) FROM distances d JOIN matrices m ON m.id = d.matrix_id WHERE "
      "m.input = 'a.safetensors' AND m.projection = 'down_proj'");
  EXPECT_EQ(first["hamming_min"], report::number_in(distances.rows[0][0]));
  EXPECT_EQ(first["hamming_max"], report::number_in(distances.rows[0][1]));
  for (const auto& row : tables["coherence"]) {
    const double observed = row["observed"], chance = row["independent"], kept = row["sums_kept"];
    if (observed > chance) EXPECT_NEAR(row["explained"], (kept - chance) / (observed - chance), 1e-9);
    if (observed <= chance) EXPECT_TRUE(row["explained"].is_null());
  }
  EXPECT_EQ(tables["pairs"].size(), 2u * 3);  // projections, metrics
  for (const auto& row : tables["chance"]) {
    EXPECT_EQ(row["matrices"], 2);
    EXPECT_LE(row["beyond_sums_kept"], 2);
  }
  const std::string text = markdown_of(sections);
  for (const char* part :
       {"# Sparsity patterns\n", "## Ratios and singletons\n", "| a.safetensors | down_proj |"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Patterns, TheReportOfOneExecutionSaysNothingOfStability) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "wanda");
  AnalyzeOptions options = small_options();
  options.patterns.executions = 1;
  analyze({folder / "a.safetensors"}, folder / "r", options, no_lines);
  report::Database found =
      report::Database::read_only((folder / "r") + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
  const nlohmann::json rows = report::to_json(report_sections(found).front().table);
  EXPECT_TRUE(rows[0]["separation_ratio_sd"].is_null());
  EXPECT_EQ(rows[0]["stability"], "");
}

TEST(Patterns, ThePageHoldsWhatTheDatabaseHolds) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "<script>"), put_masks(folder / "b.safetensors", 2, "sparsegpt");
  analyze({folder / "a.safetensors", folder / "b.safetensors"}, folder / "r", small_options(), no_lines);
  report::Database found =
      report::Database::read_only((folder / "r") + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
  const std::string page = page_of(found);
  EXPECT_EQ(page, page_of(found));
  EXPECT_LT(page.size(), size_t{8} << 20);
  const std::string begin = "id=\"data\">", end = "</script>";
  const size_t first = page.find(begin) + begin.size();
  const auto data = nlohmann::json::parse(page.substr(first, page.find(end, first) - first));
  ASSERT_EQ(data["last_figures"], 4);
  ASSERT_EQ(data["last_heavy"], 4);
  for (const auto& [figure, sql] : data["sql"].items()) {
    const report::Table rows = found.query(sql, 60, 1 << 20);
    const auto& table = data[figure];
    ASSERT_EQ(table["columns"].get<std::vector<std::string>>(), rows.columns) << figure;
    ASSERT_EQ(table["rows"].size(), rows.rows.size()) << figure;
    for (size_t r = 0; r < rows.rows.size(); ++r)
      for (size_t c = 0; c < rows.columns.size(); ++c) {
        const report::TableCell& value = rows.rows[r][c];
        const auto& shown = table["rows"][r][c];
        const auto* const number = std::get_if<double>(&value);
        const auto* const integer = std::get_if<int64_t>(&value);
        const auto* const text = std::get_if<std::string>(&value);
        const bool same = number    ? shown.get<double>() == *number
                          : integer ? shown.get<int64_t>() == *integer
                          : text    ? shown.get<std::string>() == *text
                                    : shown.is_null();
        ASSERT_TRUE(same) << figure << " " << rows.columns[c] << " of row " << r;
      }
  }
}

TEST(Patterns, ThePageOfManyMatricesStaysSmall) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "wanda"), put_masks(folder / "b.safetensors", 2, "sparsegpt");
  analyze({folder / "a.safetensors", folder / "b.safetensors"}, folder / "r", small_options(), no_lines);
  report::Database found = report::Database::open(std::filesystem::path(folder / "r") / "sparsity.sqlite");
  const std::string times =
      " FROM (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) "
      "SELECT i FROM n), ";
  found.run(
      "INSERT INTO nulls SELECT subject, subject_id + 4 * i, statistic, model, observed, draws, mean, sd, "
      "low, "
      "high, effect, p, p_corrected, within_chance" +
      times + "nulls WHERE subject = 'matrix'");
  found.run(
      "INSERT INTO matrices (id, input, matrix, layer, projection) SELECT id + 4 * i, input, matrix, i, "
      "projection" +
      times + "matrices");
  const std::string text = page_data(found);
  EXPECT_LT(text.size(), size_t{8} << 20);
  EXPECT_GT(text.size(), size_t{2} << 20);
  const auto data = nlohmann::json::parse(text);
  EXPECT_EQ(data["matrices"]["rows"].size(), 4004u);
  const int64_t figures = data["last_figures"];
  EXPECT_GT(figures, 10);
  EXPECT_LT(figures, 4004);
  for (const auto& row : data["nulls"]["rows"])
    if (row[0] == "matrix") ASSERT_LE(row[1], figures);
  EXPECT_GE(data["last_heavy"], 4);
}

TEST(SlowPatterns, EveryControlOfThePageWorksInABrowser) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  if (std::system("command -v chromium > /dev/null 2>&1") != 0) GTEST_SKIP() << "skipped: no Chromium";
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "wanda"), put_masks(folder / "b.safetensors", 2, "sparsegpt");
  analyze({folder / "a.safetensors", folder / "b.safetensors"}, folder / "r", small_options(), no_lines);
  report::Database found =
      report::Database::read_only((folder / "r") + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
  std::string page = page_of(found);
  page.replace(page.rfind("</body>"), 7, kPageDriver);
  io::write_file(folder / "page.html", page);
  const std::string command =
      "chromium --headless --no-sandbox --disable-gpu --enable-logging=stderr "
      "--user-data-dir=" +
      (folder / "profile") +
      " --host-resolver-rules='MAP * ~NOTFOUND' "
      "--virtual-time-budget=5000 --dump-dom file://" +
      (folder / "page.html") + " > " + (folder / "dom.html") + " 2> " + (folder / "log");
  ASSERT_EQ(std::system(command.c_str()), 0);
  const auto text_of = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string dom = text_of(folder / "dom.html"), log = text_of(folder / "log");
  const size_t title = dom.find("<title>");
  EXPECT_NE(dom.find(" problems 0."), std::string::npos) << dom.substr(title, 600);
  EXPECT_EQ(log.find("CONSOLE"), std::string::npos) << log;
}

TEST(Patterns, TwoInputsAreComparedMatrixByMatrix) {
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "wanda"), put_masks(folder / "b.safetensors", 2, "sparsegpt");
  const auto all = compare(folder / "a.safetensors", folder / "b.safetensors", {});
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].axis, Axis::column);
  EXPECT_EQ(all[1].axis, Axis::row);
  EXPECT_NEAR(all[0].hamming.mean, 0.493055555556, 1e-11);  // the mean over columns is that over rows
  AnalyzeOptions only;
  only.only = {"layers.1."};
  EXPECT_EQ(compare(folder / "a.safetensors", folder / "b.safetensors", only).size(), 1u);
}

TEST(Patterns, ErrorsSayWhatToDoAndLeaveNothing) {
  const TemporaryFolder folder;
  put_masks(folder / "a.safetensors", 1, "wanda");
  save_masks(folder / "c.safetensors",
             {.info = {}, .layers = {{"model.layers.0.mlp.up_proj", mask_of(ones(5))}}});
  const std::string a = folder / "a.safetensors", out = folder / "r";
  const auto fails = [&](const std::vector<std::string>& inputs, const AnalyzeOptions& options,
                         std::initializer_list<const char*> parts) {
    expect_error([&] { analyze(inputs, out, options, no_lines); }, parts);
  };
  fails({}, {}, {"no input"});
  fails({a, a}, {}, {"is given twice", "expected different inputs"});
  fails({folder / "none"}, {}, {"none"});
  fails({a, folder / "c.safetensors"}, {}, {"model.layers.1.mlp.down_proj"});
  AnalyzeOptions options;
  options.only = {"q_proj"};
  fails({a}, options, {"--only leaves none of the 2 matrices"});
  const auto with = [&](auto change, const char* says) {
    AnalyzeOptions wrong;
    change(wrong.patterns);
    fails({a}, wrong, {says});
  };
  with([](PatternOptions& o) { o.pool = 1; }, "--pool is 1; expected 2 or more");
  with([](PatternOptions& o) { o.nearest = 0; }, "--nearest is 0");
  with([](PatternOptions& o) { o.starts = 0; }, "--starts is 0");
  with([](PatternOptions& o) { o.executions = 0; }, "--executions is 0");
  with([](PatternOptions& o) { o.draws = 0; }, "--draws is 0");
  with([](PatternOptions& o) { o.resamples = 0; }, "--resamples is 0");
  with([](PatternOptions& o) { o.group = 1; }, "--group is 1");
  with([](PatternOptions& o) { o.clusters = {}; }, "--k is empty");
  with([](PatternOptions& o) { o.clusters = {4, 0}; }, "--k is 0");
  with([](PatternOptions& o) { o.perplexity = 0.5; }, "--perplexity is 0.5");
  io::save_npy(folder / "row.npy", Tensor::full({1, 1}, 1, DType::f32, Device::cpu()));
  fails({folder / "row.npy"}, {}, {"expected two features or more"});
  EXPECT_FALSE(std::filesystem::exists(out));
  // Neither a folder that cannot be made nor the measurements of a sweep are found after the work.
  const auto fails_at_once = [&](const std::string& to, const char* says) {
    int64_t lines = 0;
    expect_error([&] { analyze({a}, to, {}, [&](const std::string&) { ++lines; }); }, {says});
    EXPECT_EQ(lines, 0) << to;
  };
  fails_at_once(folder / "row.npy", "is a file; name a folder");
  std::filesystem::create_directory(folder / "sweep");
  io::write_file(folder / "sweep/sparsity.sqlite", "measured for a day");
  fails_at_once(folder / "sweep", "sparsity.sqlite is not sparsity.sqlite of tessera sparsity analyze");
  EXPECT_EQ(io::read_file(folder / "sweep/sparsity.sqlite", 100), "measured for a day");
  expect_error([&] { k_means(products(overlaps_of(features(ones(1)))), {.k = 61}); },
               {"k = 61 of 60 points"});
  expect_error([&] { compare_features(features(ones(1)), features(ones(1).slice(0, 0, 9))); },
               {"60 features", "9"});
  expect_error([] { tsne(std::vector<double>(9), 3, {}); }, {"3 points; expected 4 or more"});
}

}  // namespace
}  // namespace tessera::sparsity
