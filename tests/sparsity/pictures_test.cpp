#include "sparsity/pattern_pictures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "io/file.h"
#include "pretrained/fingerprint.h"
#include "report/run_table.h"
#include "runtime/statistics.h"
#include "sparsity/input_norms.h"
#include "sparsity/pattern_pictures_internal.h"
#include "sparsity/patterns.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/sparsity/small.h"

#if defined(TESSERA_WITH_PNG)
#include <png.h>
#endif

namespace tessera::sparsity {
namespace {

/// Zeros and ones without a pattern.
Tensor scattered(int64_t rows, int64_t columns, uint32_t step) {
  std::vector<float> values;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      values.push_back(float((uint32_t(r * 7919 + c * 104729 + step) * 2654435761u >> 17) % 2));
  return Tensor::from(values, {rows, columns});
}
AnalyzeOptions few_draws() {
  AnalyzeOptions options;
  options.patterns.draws = 5, options.patterns.executions = 2, options.patterns.starts = 2;
  options.patterns.clusters = {4, 8};
  return options;
}
report::Database analyzed(const std::vector<std::string>& inputs, const std::string& out) {
  analyze(inputs, out, few_draws(), [](const std::string&) {});
  return report::Database::read_only(out + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
}
double cell_of(report::Database& database, const std::string& sql) {
  return pictures::number_in(database.run(sql).rows.at(0).at(0));
}

TEST(InputNorms, ColumnsAreCountedAlongBothAxes) {
  const Mask mask = mask_of(Tensor::from(std::vector<float>{1, 0, 1, 1, 0, 0}, {2, 3}));
  for (const Axis axis : {Axis::row, Axis::column})
    EXPECT_EQ(column_counts(features_of(mask, axis), axis), (std::vector<int64_t>{2, 0, 1}));
  const std::vector<double> norms{4, 1, 2};
  const Figures figures = norm_figures(norms, features_of(mask, Axis::column), Axis::column);
  EXPECT_EQ(figures[1].first, "input_norm_spearman");
  EXPECT_DOUBLE_EQ(figures[1].second, 1);
}

TEST(InputNorms, FilesOfAnotherPruningOrDamagedOnesAreRefused) {
  const TemporaryFolder folder;
  Masks masks{.info = {.fingerprint = "f",
                       .model = "",
                       .method = "wanda",
                       .pattern = "2:4",
                       .sparsity = "0.5",
                       .seed = "1"},
              .layers = {{"a", mask_of(scattered(4, 3, 2))}}};
  const auto values = [](std::vector<float> numbers) {
    const auto count = int64_t(numbers.size());
    return Tensor::from(numbers, {count});
  };
  const std::string path = folder / "n.safetensors";
  save_input_norms(path, {{"a", values({1, 0, 2})}}, masks.info);
  EXPECT_EQ(load_input_norms(path, masks).at("a").to_vector<float>(), (std::vector<float>{1, 0, 2}));
  Masks other = masks;
  other.info.method = "ria";
  expect_error([&] { load_input_norms(path, other); },
               {"another pruning", "method is 'wanda', expected 'ria'"});
  save_input_norms(path, {{"a", values({1, 2})}}, masks.info);
  expect_error([&] { load_input_norms(path, masks); }, {"'a'", "expected f32 [3]"});
  save_input_norms(path, {{"a", values({1, -2, 0})}}, masks.info);
  expect_error([&] { load_input_norms(path, masks); }, {"has -2 at 1"});
  io::save_safetensors(path, io::NamedTensors{{"a", values({1, 2, 3})}});
  expect_error([&] { load_input_norms(path, masks); }, {"tessera input norms 1"});
}

TEST(InputNorms, OfAPrunedModelAreInTheDatabase) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  test::SmallLlama small, magnitude;
  const Samples samples = test::small_samples();
  const Pruned pruned = prune(small.model, samples, {});
  save_pruned(small.model, pruned,
              R"({"perplexity": {"length": 16, "windows": 3, "before": 7.5, "after": 8.5}})",
              folder / "wanda");
  save_pruned(magnitude.model, prune(magnitude.model, {}, {.score = Score::magnitude}), "{}\n",
              folder / "magnitude");
  EXPECT_FALSE(std::filesystem::exists(folder / "magnitude/input_norms.safetensors"));
  std::vector<std::string> lines;
  analyze({folder / "wanda", folder / "magnitude"}, folder / "r", few_draws(),
          [&](const std::string& line) { lines.push_back(line); });
  EXPECT_EQ(std::ranges::count_if(lines,
                                  [](const std::string& line) {
                                    return line.find("magnitude: no input_norms.safetensors") == 0;
                                  }),
            1);
  report::Database found =
      report::Database::read_only((folder / "r") + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
  const report::Table perplexities = found.run("SELECT text, value FROM perplexity ORDER BY text");
  ASSERT_EQ(perplexities.rows.size(), 2u);
  EXPECT_EQ(perplexities.rows[0], (std::vector<report::TableCell>{"after", 8.5}));
  EXPECT_EQ(perplexities.rows[1], (std::vector<report::TableCell>{"before", 7.5}));
  for (const PrunedMatrix& matrix : pruned.matrices) {
    const std::string of = " FROM matrices WHERE input = 'wanda' AND matrix = '" + matrix.name + "'";
    const auto id = std::to_string(int64_t(cell_of(found, "SELECT id" + of)));
    const report::Table rows = found.run(
        "SELECT norm, density, kept FROM input_norms WHERE matrix_id = " + id + " ORDER BY column_index");
    const std::vector<double> norms = matrix.input_norms.to_vector<double>();
    ASSERT_EQ(rows.rows.size(), norms.size()) << matrix.name;
    std::vector<double> densities;
    for (size_t j = 0; j < norms.size(); ++j) {
      EXPECT_EQ(pictures::number_in(rows.rows[j][0]), norms[j]);
      densities.push_back(pictures::number_in(rows.rows[j][1]));
    }
    const double expected = spearman(norms, densities),
                 stored = cell_of(found, "SELECT input_norm_spearman" + of);
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(stored) : std::abs(stored - expected) < 1e-12)
        << matrix.name;
    const int64_t levels = axis_of(matrix.name) == Axis::row ? 2 : 1;
    EXPECT_EQ(cell_of(found,
                      "SELECT count(*) FROM nulls WHERE statistic = 'input_norm_pearson' AND subject = "
                      "'matrix' AND subject_id = " +
                          id),
              levels);
  }
  EXPECT_EQ(cell_of(found,
                    "SELECT count(*) FROM matrices WHERE input = 'magnitude' AND input_norm_pearson IS "
                    "NOT NULL"),
            0);
}

TEST(InputNorms, OfTheDenseModelAreMeasuredForMasksWithoutThem) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  test::SmallLlama dense, wanda, magnitude;
  const Samples samples = test::small_samples();
  const DenseNorms norms{.fingerprint = pretrained::fingerprint_of(dense.model),
                         .from = "of a small model",
                         .norms = dense_input_norms(dense.model, samples, 4)};
  // prune's are those of the dense model in the first block, and of the pruned blocks before it in others.
  const Pruned pruned = prune(wanda.model, samples, {});
  ASSERT_EQ(norms.norms.size(), pruned.matrices.size());
  for (const PrunedMatrix& matrix : pruned.matrices) {
    const bool same = matrix.name.find(".0.") != std::string::npos;
    EXPECT_EQ(norms.norms.at(matrix.name).to_vector<float>() == matrix.input_norms.to_vector<float>(), same)
        << matrix.name;
  }
  save_pruned(wanda.model, pruned, "{}\n", folder / "wanda");
  Masks masks = prune(magnitude.model, {}, {.score = Score::magnitude}).masks;
  save_masks(folder / "m.safetensors", masks);
  AnalyzeOptions options = few_draws();
  options.dense_norms = [&] { return norms; };
  std::string lines;
  const auto tell = [&](const std::string& line) { lines += line; };
  analyze({folder / "m.safetensors", folder / "wanda"}, folder / "r", options, tell);
  EXPECT_EQ(lines.find("so nothing is said"), std::string::npos) << lines;
  report::Database found =
      report::Database::read_only((folder / "r") + "/sparsity.sqlite", kPatternsId, kPatternsWhat);
  const auto norms_of = [&](const char* input, const std::string& matrix) {
    std::vector<double> values;
    for (const auto& row : found
                               .run("SELECT norm FROM input_norms n JOIN matrices m ON m.id = n.matrix_id "
                                    "WHERE m.input = ?1 AND m.matrix = ?2 ORDER BY column_index",
                                    {input, matrix})
                               .rows)
      values.push_back(pictures::number_in(row[0]));
    return values;
  };
  for (const PrunedMatrix& matrix : pruned.matrices) {
    EXPECT_EQ(norms_of("m.safetensors", matrix.name), norms.norms.at(matrix.name).to_vector<double>());
    EXPECT_EQ(norms_of("wanda", matrix.name), matrix.input_norms.to_vector<double>());  // its own
  }
  EXPECT_EQ(found.run("SELECT value FROM settings WHERE name = 'input_norms'").rows.at(0).at(0),
            report::TableCell("of a small model"));

  masks.info.fingerprint = "of another";
  save_masks(folder / "other.safetensors", masks);
  expect_error([&] { analyze({folder / "other.safetensors"}, folder / "r", options, tell); },
               {"other.safetensors", norms.fingerprint.c_str(), "--model"});
  masks.info.fingerprint = "", masks.layers[0].first = "layers.0.q";
  save_masks(folder / "names.safetensors", masks);
  expect_error([&] { analyze({folder / "names.safetensors"}, folder / "r", options, tell); },
               {"'layers.0.q'", "tessera sparsity import"});
}

TEST(Pictures, ASpyPlotHasABlockPerKeptBit) {
  // Feature 1 keeps positions 0 and 33, feature 0 position 1.
  const pictures::MatrixBits bits{
      .features = 2, .length = 34, .words = 2, .bits = {2, 0, 1, 2}, .ids = {7, 5}};
  EXPECT_EQ(bits.distance(0, 1), 3);
  EXPECT_EQ(bits.by_index(), (std::vector<int64_t>{1, 0}));
  const report::Colour first{200, 0, 1}, second{0, 200, 1};
  const report::Image image = spy_image(
      bits, {.text = {}, .ranks = {1, 0}, .positions = 34, .colours = {first, second}, .legend = {}});
  std::vector<std::pair<int, int>> of_first, of_second;  // (y, x)
  for (int y = 0; y < image.height; ++y)
    for (int x = 0; x < image.width; ++x) {
      const uint8_t* const rgb = &image.rgb[(size_t(y) * size_t(image.width) + size_t(x)) * 3];
      const report::Colour colour{rgb[0], rgb[1], rgb[2]};
      if (colour == first) of_first.emplace_back(y, x);
      if (colour == second) of_second.emplace_back(y, x);
    }
  ASSERT_EQ(of_first.size(), 64u);  // 8 x 8 pixels per bit
  ASSERT_EQ(of_second.size(), 128u);
  EXPECT_EQ(of_first[0], std::pair(of_second[0].first + 8, of_second[0].second + 8));
  EXPECT_EQ(of_second[8].second, of_second[0].second + 33 * 8);
}

TEST(Pictures, BinsOfDistancesHoldEqualNumbersOfDistances) {
  const auto histogram = pictures::distance_histogram({{0.1, 1}, {0.2, 2}, {0.4, 1}}, {0.1, 0.4}, 0.1);
  EXPECT_EQ(histogram.shares, (std::vector<double>{0.25, 0.5, 0, 0.25}));
  EXPECT_EQ(pictures::distance_histogram({{0, 1}, {0.999, 1}}, {0, 0.999}, 0.001).shares.size(), 59u);
  EXPECT_EQ(pictures::distance_histogram({{0.5, 3}}, {0.5, 0.5}, 0.1).shares, (std::vector<double>{1}));
}

TEST(Pictures, AreTheSameAgainUnderTheNamesOfTheOriginal) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: no SQLite";
  const TemporaryFolder folder;
  for (const uint32_t step : {2u, 3u})
    save_masks(
        folder / (step == 2 ? "wanda" : "sparsegpt"),
        {.info =
             {.fingerprint = "", .model = "", .method = "m", .pattern = "2:4", .sparsity = "0.5", .seed = ""},
         .layers = {{"model.layers.0.mlp.up_proj", mask_of(scattered(40, 24, step))},
                    {"model.layers.1.mlp.down_proj", mask_of(scattered(24, 40, step + 2))}}});
  report::Database found = analyzed({folder / "wanda", folder / "sparsegpt"}, folder / "r");
  const auto none = [](const std::string&) {};
  if (!report::has_png()) {
    expect_error([&] { export_pictures(found, folder / "p", {}, none); }, {"--png, --pdf", "no libpng"});
    EXPECT_FALSE(std::filesystem::exists(folder / "p"));
    return;
  }
  std::vector<std::string> names;
  export_pictures(found, folder / "p", {}, [&](const std::string& name) { names.push_back(name); });
  export_pictures(found, folder / "q", {}, none);
  for (const std::string& name : names)
    EXPECT_EQ(io::read_file((folder / "p") + "/" + name, 8 << 20),
              io::read_file((folder / "q") + "/" + name, 8 << 20))
        << name;
  const std::string one = "wanda-layer0-mlp.up_proj-2-4-0.5-";
  for (const std::string& name :
       {std::string("separation_ratios.png"), std::string("within_vs_between.png"),
        std::string("cluster_sizes_k8.png"), std::string("hamming_distance_distributions.png"),
        std::string("hamming_cdf.png"), std::string("separation_ratios_heatmap.png"),
        std::string("sparsity_patterns_sample.png"), std::string("metrics_bw_wanda_and_sparsegpt.png"),
        std::string("metrics_bw_wanda_and_sparsegpt_means.png"), std::string("heatmap_hamming_mean.png"),
        one + "density.png", one + "spy.png", one + "hamming_gradient_spy.png", one + "k4_spy.png",
        one + "k8_spy.png", one + "tsne.png", one + "hamming_dist.png", one + "hamming_cdf.png"})
    EXPECT_EQ(std::ranges::count(names, name), 1) << name;
  EXPECT_EQ(std::ranges::count(names, one + "input_norms.png"), 0);  // masks alone have none
#if defined(TESSERA_WITH_PNG)
  const std::string bytes = io::read_file((folder / "p") + "/" + one + "density.png", 8 << 20);
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  ASSERT_TRUE(png_image_begin_read_from_memory(&header, bytes.data(), bytes.size()));
  header.format = PNG_FORMAT_RGB;
  std::vector<uint8_t> read(PNG_IMAGE_SIZE(header));
  ASSERT_TRUE(png_image_finish_read(&header, nullptr, read.data(), 0, nullptr));
  // 40 x 24 parts of 9 x 9 pixels, each kept (darkest) or pruned (white).
  const report::Colour dark = report::heat(1);
  int64_t kept = 0;
  for (size_t i = 0; i < read.size(); i += 3)
    kept += report::Colour{read[i], read[i + 1], read[i + 2]} == dark;
  EXPECT_EQ(kept, 81 * mask_of(scattered(40, 24, 2)).ones() + 144);  // and the legend
  EXPECT_GT(header.width, 24u * 9);
  EXPECT_GT(header.height, 40u * 9);
#endif
  expect_error([&] { export_pictures(found, folder / "x", {.only = {"q_proj"}, .feature = {}}, none); },
               {"--only leaves none of the 4 matrices"});
  expect_error([&] { export_pictures(found, folder / "x", {.only = {}, .feature = 99}, none); },
               {"--feature 99", "24 clustered features"});
  EXPECT_FALSE(std::filesystem::exists(folder / "x"));
}

}  // namespace
}  // namespace tessera::sparsity
