#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "io/file.h"
#include "models/generate.h"
#include "nn/form.h"
#include "pretrained/load.h"
#include "report/run_table.h"
#include "sparsity/chain.h"
#include "sparsity/modules.h"
#include "sparsity/sparsify.h"
#include "sparsity/split_pruning.h"
#include "sparsity/sweep_pictures.h"
#include "tests/io/files.h"
#include "tests/sparsity/small.h"
#include "train/run_folder.h"

// Splits of a total sparsity: which there are, what they cost, and which are worth having.

namespace tessera::sparsity {
namespace {

using io::test::throws;
using namespace test;

TEST(Splits, AreThoseOfEachTotalAboveTheWeights) {
  SweepOptions options{.totals = {0.5, 0.3}, .weights = {0.4, 0, 0.3}};
  const std::vector<Split> splits = splits_of(options);
  std::vector<std::string> names;
  for (const Split& split : splits) {
    names.push_back(std::to_string(int(split.total * 10 + 0.5)) + "/" +
                    std::to_string(int(split.weights * 10 + 0.5)) + " " + ops::name_of(split.format));
    EXPECT_NEAR((1 - split.weights) * (1 - split.activations), 1 - split.total, 1e-12);
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"3/0 dense-columns", "5/0 dense-columns", "3/3 tiled-cbc",
                                      "3/3 tca-bme", "3/3 sell-delta4", "5/3 tiled-cbc", "5/4 tiled-cbc",
                                      "5/5 tiled-cbc", "5/5 tca-bme", "5/5 sell-delta4"}));
  options.weights_alone = false;
  EXPECT_EQ(splits_of(options).size(), 4u);
  options.weights = {0.6};
  EXPECT_TRUE(throws([&] { splits_of(options); }, "no weight sparsity is below a total one"));
  options.weights = {-0.1};
  EXPECT_TRUE(throws([&] { splits_of(options); }, "-0.1"));
  options.totals = {1};
  EXPECT_TRUE(throws([&] { splits_of(options); }, "less than 1"));
}

TEST(Splits, TheFrontHasNoneThatAnotherBeats) {
  const auto one = [](double ms, double uniform, std::optional<double> greedy) {
    return SplitResult{.uniform_perplexity = uniform, .greedy_perplexity = greedy, .tpot_ms = ms};
  };
  const std::vector<SplitResult> front = pareto_front(
      {one(3, 10, {}), one(1, 30, 20), one(2, 25, {}), one(2, 15, 18), one(4, 10, {}), one(5, 12, 9)});
  ASSERT_EQ(front.size(), 4u);
  EXPECT_EQ(front[0].perplexity(), 20);
  EXPECT_TRUE(front[0].is_greedy());
  EXPECT_EQ(front[1].perplexity(), 15);
  EXPECT_FALSE(front[1].is_greedy());
  EXPECT_EQ(front[2].tpot_ms, 3);
  EXPECT_EQ(front[3].perplexity(), 9);
  EXPECT_EQ(pareto_front({one(1, HUGE_VAL, {}), one(2, NAN, {}), one(3, 10, {})}).size(), 1u);
}

TEST(Splits, UsualWeightsAreSpdpsOperatingPoints) {
  EXPECT_DOUBLE_EQ(usual_weights(0.5), 0.2);
  EXPECT_NEAR(usual_weights(0.3), 0.05, 1e-12);
  EXPECT_NEAR(usual_weights(0.8), 0.45, 1e-12);
  EXPECT_NEAR(usual_weights(0.525), 0.225, 1e-12);
  EXPECT_NEAR(usual_weights(0.05), 0.025, 1e-12);
  for (double total = 0.01; total < 1; total += 0.01) EXPECT_LT(usual_weights(total), total);
}

TEST(Splits, LayersKeepTheirWeightsInEveryFormat) {
  SmallLlama small;
  const Samples samples = small_samples();
  prune(small.model, samples, {.score = Score::magnitude, .sparsity = 0.4});
  std::map<std::string, std::vector<float>> dense;
  for (const auto& module : block_modules(small.model))
    dense[module.name] = weight_of(module).clone().to_vector<float>();
  const LayerBytes before = bytes_of_layers(small.model);
  EXPECT_EQ(before.bytes, before.dense_bytes);
  EXPECT_EQ(before.weight_sparsity, 0);
  for (const ops::SparseFormat format :
       {ops::SparseFormat::tca_bme, ops::SparseFormat::sell_delta4, ops::SparseFormat::mma_delta4,
        ops::SparseFormat::dense_columns, ops::SparseFormat::tiled_cbc}) {
    compress_layers(small.model, format);
    std::map<nn::Linear*, size_t> next;
    for (const auto& module : block_modules(small.model)) {
      const auto& part = std::get<nn::Compressed>(module.layer->form).parts.at(next[module.layer]++);
      EXPECT_EQ(part.weight.format, format);
      EXPECT_EQ(ops::to_dense(part.weight).clone().to_vector<float>(), dense.at(module.name)) << module.name;
    }
    const LayerBytes bytes = bytes_of_layers(small.model);
    EXPECT_EQ(bytes.dense_bytes, before.dense_bytes);
    EXPECT_NEAR(bytes.weight_sparsity, format == ops::SparseFormat::dense_columns ? 0 : 0.4, 0.01);
  }
  const DecodeTimes times =
      time_generation(small.model, std::vector<int64_t>{1, 2, 3}, {.new_tokens = 4, .repeats = 3});
  EXPECT_EQ(times.ttft_ms.size(), 3u);
  EXPECT_EQ(times.tpot_ms.size(), 3u);
  const auto layers = time_layers(small.model, std::vector<int64_t>{1, 2, 3}, 2);
  ASSERT_EQ(layers.size(), 9u);  // with the LM head
  EXPECT_EQ(layers[0].first, "blocks.0.attention.qkv");
  EXPECT_TRUE(
      throws([&] { time_generation(small.model, std::vector<int64_t>(16, 1), {}); }, "the model takes 16"));
}

/// A small model "m" in a folder, and the options of a chain from it; the first half of `text` calibrates.
SparsifyOptions small_chain(const TemporaryFolder& folder, std::span<const int64_t> text) {
  pretrained::save(SmallLlama().model, folder / "m");
  SparsifyOptions options{.total = 0.5, .weights = 0.2};
  options.how.model = folder / "m";
  options.how.calibration = text.first(text.size() / 2),
  options.how.evaluation = text.subspan(text.size() / 2);
  options.how.samples = {.count = 4, .length = 12};
  options.how.window = 12, options.how.prompt = 4;
  options.how.timing = {.new_tokens = 3, .repeats = 1, .warmups = 0};
  options.how.gates = {.step = 0.4, .most = 0.6};
  options.how.device = kCpu;
  options.sample_tokens = 5;
  return options;
}

SparsifyOptions gate_aware_chain(const TemporaryFolder& folder, std::span<const int64_t> text) {
  SparsifyOptions options = small_chain(folder, text);
  options.how.prune = {.score = Score::sparsegpt, .update = Update::obs, .block_size = 8};
  options.how.gate_aware = {true};
  return options;
}

TEST(Splits, SparsifyWritesWhatLoadRuns) {
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  SparsifyOptions options = small_chain(folder, text);
  const Sparsified done = sparsify(options, folder / "s");
  EXPECT_EQ(done.text.size(), 5u);
  EXPECT_TRUE(done.greedy);
  EXPECT_EQ(done.layers.size(), 14u);
  Rng rng(1);
  pretrained::LoadedLanguageModel loaded = load(folder / "s", rng, kCpu, {.activation_sparsity = 0.375});
  EXPECT_EQ(models::generate(loaded.model, done.prompt, {.most_tokens = 5, .sampling = {.temperature = 0}}),
            done.text);
  EXPECT_TRUE(throws([&] { sparsify(options, folder / "s"); }, "has weights"));
  options.format = ops::SparseFormat::tca_bme;
  EXPECT_TRUE(throws([&] { sparsify(options, folder / "t"); }, "gates save nothing"));
  options.most_perplexity = 1;  // only weights alone are in this format
  EXPECT_TRUE(throws([&] { sparsify(options, folder / "t"); }, "no split is in tca-bme"));
  EXPECT_FALSE(std::filesystem::exists(folder / "t"));
}

TEST(Splits, LoadWithoutSparseLayersIsTheDenseModel) {
  const TemporaryFolder folder;
  pretrained::save(SmallLlama().model, folder / "m");
  convert(folder / "m", folder / "s", ops::SparseFormat::tca_bme, {.dtype = DType::f16});
  Rng rng(1);
  const pretrained::SparseOptions off{.mode = pretrained::SparseMode::off};
  pretrained::LoadedLanguageModel loaded =
      load(folder / "s", rng, kCpu, {.sparse = off, .dtype = DType::f32});
  EXPECT_TRUE(loaded.sparse.empty());
  for (const pretrained::LinearModule& module : pretrained::linear_modules(loaded.model).all)
    EXPECT_TRUE(nn::is_dense(module.layer->form)) << module.name;
  const pretrained::SparseOptions gated{.mode = off.mode, .threshold = 0.1};
  for (const char* const model : {"m", "s"})
    EXPECT_TRUE(throws([&] { load(folder / model, rng, kCpu, {.sparse = gated}); }, "in the mode off"));
}

TEST(Splits, LoadTakesGatesFromOnePlace) {
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  const SparsifyOptions options = small_chain(folder, text);
  sparsify(options, folder / "s");
  Rng rng(1);
  LoadOptions both{.activation_sparsity = 0.375, .sparse = {.threshold = 0.1}};
  EXPECT_TRUE(throws([&] { load(folder / "s", rng, kCpu, both); },
                     "load: activation_sparsity 0.375, which takes the gates of a calibration, and "
                     "sparse.threshold for"));
  const Calibration calibration = read_calibration(folder / "s");
  both.sparse = {.gates = calibration.gates(0.25, false)};
  EXPECT_TRUE(throws([&] { load(folder / "s", rng, kCpu, both); }, "sparse.gates for"));
  both.activation_sparsity.reset();
  EXPECT_EQ(load(folder / "s", rng, kCpu, both).sparse.size(), 14u);
  EXPECT_TRUE(throws([&] { load(folder / "s", rng, kCpu, {.calibration = folder / "s"}); },
                     "without activation_sparsity; say which share"));
}

TEST(Splits, LoadTakesThePrefillThatIsAskedFor) {
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  sparsify(small_chain(folder, text), folder / "s");
  Rng rng(1);
  const auto prefill = [&](const LoadOptions& options) {
    const pretrained::LoadedLanguageModel loaded = load(folder / "s", rng, kCpu, options);
    return std::get<nn::Compressed>(loaded.model.get_if<models::Llama>()->blocks.at(0).mlp.down.form).prefill;
  };
  const double calibrated = read_calibration(folder / "s").prefill;
  EXPECT_NE(calibrated, 0.75);
  EXPECT_EQ(prefill({.activation_sparsity = 0.375}), calibrated);
  EXPECT_EQ(prefill({.activation_sparsity = 0.375, .sparse = {.prefill = 0.75}}), 0.75);
  EXPECT_EQ(prefill({.activation_sparsity = 0.375, .sparse = {.prefill = 1}}), 1);
  EXPECT_EQ(prefill({.sparse = {.threshold = 0.1}}), 1);
  EXPECT_TRUE(throws([&] { load(folder / "s", rng, kCpu, {.sparse = {.prefill = 0.75}}); },
                     "load: sparse.prefill 0.75 for"));
  pretrained::LoadedLanguageModel open = load(folder / "s", rng, kCpu);
  EXPECT_TRUE(throws([&] { pretrained::make_sparse(open.model, {.prefill = 0.75}, folder / "s"); },
                     "make_sparse: a prefill of 0.75 without gates"));
}

TEST(Splits, GateAwareOnesHaveZerosAndGates) {
  SweepOptions options{.totals = {0.5, 0.3}, .weights = {0, 0.2}, .weights_alone = false};
  options.prune = {.score = Score::sparsegpt, .update = Update::obs};
  options.gate_aware = {true, false};
  std::vector<std::string> names;
  for (const Split& split : splits_of(options))
    names.push_back(std::to_string(int(split.total * 10 + 0.5)) + "/" +
                    std::to_string(int(split.weights * 10 + 0.5)) + " " + pruning_of(split, options.prune));
  EXPECT_EQ(names, (std::vector<std::string>{"3/0 none", "5/0 none", "3/2 sparsegpt", "5/2 sparsegpt",
                                             "3/2 gate-aware sparsegpt", "5/2 gate-aware sparsegpt"}));
  EXPECT_TRUE(is_gate_aware("gate-aware sparsegpt"));
  EXPECT_FALSE(is_gate_aware("sparsegpt"));
  options.gate_aware = {true};
  EXPECT_EQ(splits_of(options).size(), 4u);
  options.weights_alone = true;  // three formats each, pruned with their own inputs
  for (const Split& split : splits_of(options))
    EXPECT_EQ(split.gate_aware, split.weights > 0 && split.activations > 0);
  options.weights = {0};
  EXPECT_TRUE(throws([&] { splits_of(options); }, "no split has both zeros and gates"));
}

TEST(Splits, TheGateAwareChainIsTheOneByHand) {
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  SparsifyOptions options = gate_aware_chain(folder, text);
  const Sparsified done = sparsify(options, folder / "s");
  EXPECT_TRUE(done.split.gate_aware);
  EXPECT_EQ(done.pruning, "gate-aware sparsegpt");

  SmallLlama by_hand;
  const Samples samples = choose_samples(options.how.calibration, options.how.samples);
  const Calibration dense = calibrate(by_hand.model, samples, options.how.gates);
  PruneOptions prune_options = options.how.prune;
  prune_options.sparsity = 0.2;
  prune_options.gates = PruneGates{.gates = dense.gates(0.375, true), .prefill = dense.prefill};
  const Pruned pruned = prune(by_hand.model, samples, prune_options);
  EXPECT_EQ(done.conversion.fingerprint, pruned.fingerprint);  // of all weights, with their zeros
  // The gates that go along are calibrated on the pruned model.
  const Calibration expected = calibrate(by_hand.model, samples, options.how.gates),
                    written = read_calibration(folder / "s");
  EXPECT_EQ(written.fingerprint, pruned.fingerprint);
  ASSERT_EQ(written.layers.size(), expected.layers.size());
  bool differs = false;
  for (size_t i = 0; i < written.layers.size(); ++i) {
    EXPECT_EQ(written.layers[i].thresholds, expected.layers[i].thresholds) << written.layers[i].name;
    differs = differs || expected.layers[i].thresholds != dense.layers[i].thresholds;
  }
  EXPECT_TRUE(differs);

  options.how.gate_aware = {false};
  const Sparsified plain = sparsify(options, folder / "plain");
  EXPECT_EQ(plain.pruning, "sparsegpt");
  EXPECT_NE(plain.conversion.fingerprint, pruned.fingerprint);
}

TEST(Splits, GateAwareIsRefusedWhereItMakesNoSense) {
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  const SparsifyOptions good = gate_aware_chain(folder, text);
  const auto refused = [&](auto&& change, const char* says) {
    SparsifyOptions options = good;
    change(options);
    EXPECT_TRUE(throws([&] { sparsify(options, folder / "t"); }, says));
    EXPECT_FALSE(std::filesystem::exists(folder / "t"));
  };
  refused([](SparsifyOptions& o) { o.weights = 0.5; }, "above 0 and below the total one");
  refused([](SparsifyOptions& o) { o.weights = 0; }, "above 0 and below the total one");
  refused([](SparsifyOptions& o) { o.how.gate_aware = {false, true}; }, "only a search (--max-ppl)");
  refused([](SparsifyOptions& o) { o.how.gate_aware = {}; }, "gate_aware is empty");
  refused([](SparsifyOptions& o) { o.how.prune = {.score = Score::wanda}; }, "--method sparsegpt");
  refused([](SparsifyOptions& o) { o.how.prune.sequential = true; }, "leave out sequential pruning");
  refused([](SparsifyOptions& o) { o.how.prune.gates.emplace(); }, "leave out those of the pruning options");
}

TEST(Splits, SweepsMeasureBothKindsOfPruning) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: this build has no SQLite";
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  SparsifyOptions options = gate_aware_chain(folder, text);
  SweepOptions sweep = options.how;
  sweep.totals = {0.3, 0.5}, sweep.weights = {0.2}, sweep.weights_alone = false;
  sweep.gate_aware = {false, true};
  const SweepResult whole = sweep_splits(sweep, "");
  ASSERT_EQ(whole.splits.size(), 4u);
  // The same models as the chain's, each with gates of its own: plain and gate-aware at a total of 0.5.
  std::map<bool, std::string> fingerprints;
  for (const size_t i : {size_t{1}, size_t{3}}) {
    options.how.gate_aware = {whole.splits[i].split.gate_aware};
    const Sparsified one = sparsify(options, folder / ("s" + std::to_string(i)));
    ASSERT_EQ(one.split.total, whole.splits[i].split.total);
    // Equal weights and gates; only the order of f32 sums could differ.
    EXPECT_NEAR(whole.splits[i].greedy_perplexity.value(), one.perplexity, 1e-5 * one.perplexity);
    fingerprints[one.split.gate_aware] = one.conversion.fingerprint;
  }
  EXPECT_NE(whole.splits[1].greedy_perplexity, whole.splits[3].greedy_perplexity);

  // A search takes the faster kind, and writes the model of that kind.
  options.most_perplexity = 100, options.how.gate_aware = {false, true};
  const Sparsified best = sparsify(options, folder / "best");
  ASSERT_EQ(best.searched.size(), 2u);
  const size_t faster = best.searched[1].tpot_ms < best.searched[0].tpot_ms ? 1 : 0;
  EXPECT_EQ(best.split.gate_aware, faster == 1);
  EXPECT_EQ(best.conversion.fingerprint, fingerprints.at(best.split.gate_aware));

  // Plain splits first, gate-aware ones in a later call, and nothing new in a third.
  const std::string at = folder / "r";
  sweep.gate_aware = {false};
  EXPECT_EQ(sweep_splits(sweep, at).resumed, 0);
  sweep.gate_aware = {true, false};
  const SweepResult later = sweep_splits(sweep, at);
  EXPECT_EQ(later.resumed, 2);
  ASSERT_EQ(later.splits.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(later.splits[i].split.gate_aware, whole.splits[i].split.gate_aware);
    EXPECT_EQ(later.splits[i].uniform_perplexity, whole.splits[i].uniform_perplexity);
    EXPECT_EQ(later.splits[i].greedy_perplexity, whole.splits[i].greedy_perplexity);
    EXPECT_EQ(later.splits[i].counted_activations, whole.splits[i].counted_activations);
  }
  const std::string csv = io::read_file(at + "/" + kSweepTable, 1 << 20);
  // The gates of each are calibrated on its own pruned model, as those of the chain are.
  for (const size_t i : {size_t{1}, size_t{3}}) {
    const Calibration chain = read_calibration(folder / ("s" + std::to_string(i)));
    const Split& split = whole.splits[i].split;
    const report::Table rows =
        report::Database::open(std::filesystem::path(at) / kSweepFile)
            .run(
                "SELECT layer, threshold FROM thresholds WHERE allocation = 'uniform' AND total = ?1 AND "
                "pruning = ?2 ORDER BY rowid",
                {split.total, pruning_of(split, sweep.prune)});
    ASSERT_EQ(rows.rows.size(), chain.layers.size());
    for (size_t j = 0; j < rows.rows.size(); ++j) {
      const CalibratedLayer& layer = chain.layers[j];
      EXPECT_EQ(std::get<std::string>(rows.rows[j][0]), layer.name);
      EXPECT_EQ(std::get<double>(rows.rows[j][1]), chain.gate(layer, split.activations).threshold)
          << layer.name;
    }
  }
  EXPECT_EQ(sweep_splits(sweep, at).resumed, 4);
  EXPECT_EQ(io::read_file(at + "/" + kSweepTable, 1 << 20), csv);
  if (report::has_png()) {
    report::Database database = report::Database::open(std::filesystem::path(at) / kSweepFile);
    std::vector<std::string> names;
    const auto tell = [&](const std::string& name) { names.push_back(name); };
    export_sweep_pictures(database, folder / "png", PictureFormat::png, tell);
    std::ranges::sort(names);
    EXPECT_EQ(names, (std::vector<std::string>{
                         "bytes_vs_sparsity.png", "combined_ppl_plot.png", "tpot_ppl_vs_sparsity.png",
                         "tpot_vs_ppl.png", "uniform_ppl_plot_gate-aware-sparsegpt_0.3.png",
                         "uniform_ppl_plot_gate-aware-sparsegpt_0.5.png",
                         "uniform_ppl_plot_sparsegpt_0.3.png", "uniform_ppl_plot_sparsegpt_0.5.png"}));
    export_sweep_pictures(database, folder / "again", PictureFormat::png, tell);
    for (size_t i = 0; i < 8; ++i)
      EXPECT_EQ(io::read_file(folder / "png/" + names[i], 1 << 24),
                io::read_file(folder / "again/" + names[i], 1 << 24));
    export_sweep_pictures(database, folder / "pdf", PictureFormat::pdf, tell);
    EXPECT_TRUE(io::read_file(folder / "pdf/tpot_vs_ppl.pdf", 1 << 24).starts_with("%PDF-1.4\n"));
    database.run("DELETE FROM splits WHERE total = 0.5");
    database.run("UPDATE splits SET uniform_ppl = NULL, greedy_ppl = NULL");
    export_sweep_pictures(database, folder / "none", PictureFormat::png, tell);  // axes, and no points
    database.run("DELETE FROM splits");
    EXPECT_TRUE(throws([&] { export_sweep_pictures(database, folder / "x", PictureFormat::png, tell); },
                       "no split of this sweep"));
    EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  }
}

TEST(Splits, SweepsGoOnAfterPerplexitiesThatAreNotFinite) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: this build has no SQLite";
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  SweepOptions sweep = small_chain(folder, text).how;
  sweep.totals = {0.3, 0.5}, sweep.weights = {0.2}, sweep.weights_alone = false;
  const std::string at = folder / "r";
  sweep_splits(sweep, at);
  const std::filesystem::path file = std::filesystem::path(at) / kSweepFile;
  report::Database::open(file).run(
      "UPDATE splits SET uniform_ppl = NULL, greedy_ppl = NULL WHERE total = 0.5");
  const SweepResult again = sweep_splits(sweep, at);
  EXPECT_EQ(again.resumed, 2);
  EXPECT_EQ(again.splits[1].perplexity(), HUGE_VAL);
  // The fastest split is in the page's front although its perplexity is finite with the greedy gates alone.
  report::Database database = report::Database::open(file);
  database.run("UPDATE splits SET greedy_ppl = 1234.5, tpot_ms = 0.0 WHERE total = 0.5");
  EXPECT_NE(sweep_page(database).find("1234.5000"), std::string::npos);
}

TEST(Splits, SweepsDoNotShareAFolder) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: this build has no SQLite";
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  const SweepOptions sweep = small_chain(folder, text).how;
  io::make_folder(folder / "r");
  const train::FolderLock other(folder / "r");
  EXPECT_TRUE(throws([&] { sweep_splits(sweep, folder / "r"); }, "another process is writing in it"));
}

TEST(Splits, SweepsTimeATextThatJustFitsTheModel) {
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  SweepOptions sweep = small_chain(folder, text).how;
  sweep.totals = {0.5}, sweep.weights = {0.2}, sweep.weights_alone = false;
  sweep.prompt = 15, sweep.timing.new_tokens = 2;  // of 16 positions, the last token takes none
  if (report::has_database()) EXPECT_GT(sweep_splits(sweep, "").splits.at(0).tpot_ms, 0);
}

TEST(Splits, SweepsHaveTheirSettingsFromTheFirstMomentOn) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: this build has no SQLite";
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  const SweepOptions sweep = gate_aware_chain(folder, text).how;
  const std::string at = folder / "r";
  {
    const io::test::RestoreFileCalls restore;
    io::file_calls().rename = [](const char* from, const char* to) {
      const int result = std::rename(from, to);
      if (std::string_view(to).ends_with(kSweepFile)) throw std::runtime_error("killed");
      return result;
    };
    EXPECT_THROW(sweep_splits(sweep, at), std::runtime_error);
  }
  report::Database killed = report::Database::open(std::filesystem::path(at) / kSweepFile);
  const report::Table settings = killed.run("SELECT name FROM settings ORDER BY rowid");
  ASSERT_FALSE(settings.rows.empty());
  EXPECT_EQ(std::get<std::string>(settings.rows.front()[0]), "fingerprint");
  EXPECT_EQ(std::get<std::string>(settings.rows.back()[0]), "warmups");
}

TEST(Splits, SweepsOfEarlierVersionsAreRefused) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: this build has no SQLite";
  const TemporaryFolder folder;
  const std::vector<int64_t> text = small_text(400);
  SweepOptions sweep = gate_aware_chain(folder, text).how;
  std::filesystem::create_directory(folder / "old");
  {
    report::Database old = report::Database::open(std::filesystem::path(folder / "old") / kSweepFile);
    old.run("PRAGMA application_id = " + std::to_string(kSweepId));
    old.run("CREATE TABLE splits (total REAL, weights REAL)");
    EXPECT_TRUE(throws([&] { sweep_page(old); }, "is of an earlier version"));
  }
  EXPECT_TRUE(throws([&] { sweep_splits(sweep, folder / "old"); }, "is of an earlier version"));
}

}  // namespace
}  // namespace tessera::sparsity
