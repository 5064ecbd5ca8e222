#include "sparsity/prune_run.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "io/file.h"
#include "pretrained/language_model.h"
#include "tests/io/files.h"
#include "tests/sparsity/small.h"
#include "train/run_folder.h"

// Whole runs of pruning: what they write, and what they leave when they fail.

namespace tessera::sparsity {
namespace {

using io::test::throws;
using namespace test;

pretrained::LoadedLanguageModel loaded_from(const std::string& folder) {
  Rng rng(0);
  return pretrained::load_language(folder, rng, kCpu);
}

TEST(PruneRuns, MeasureAndWriteTheModel) {
  const TemporaryFolder folder;
  pretrained::save(SmallGpt().model, folder / "m");
  const std::vector<int64_t> text = small_text(100);
  const auto windows = eval::perplexity_windows(text, {.length = 12});
  pretrained::LoadedLanguageModel language = loaded_from(folder / "m");
  PruneRunResult done =
      run_pruning(language, small_samples(), {.model = "m", .out = folder / "p", .windows = windows});
  EXPECT_EQ(done.report["model"], "m");
  EXPECT_EQ(done.report["type"], "gpt2");
  EXPECT_EQ(done.report["matrices"].size(), done.pruned.matrices.size());
  const auto& perplexity = done.report["perplexity"];
  EXPECT_EQ(perplexity["windows"], 8);
  EXPECT_EQ(perplexity["length"], 12);
  EXPECT_NE(perplexity["before"], perplexity["after"]);
  EXPECT_EQ(nlohmann::ordered_json::parse(io::read_file(folder / "p/pruning.json", 1 << 20)), done.report);
  EXPECT_TRUE(std::filesystem::exists(folder / "p/masks.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(partial_folder(folder / "p")));
  const pretrained::LoadedLanguageModel again = loaded_from(folder / "p");
  const auto measured = eval::measure_perplexity(again.model, windows, kCpu, 1).perplexity();
  EXPECT_EQ(measured, perplexity["after"].get<double>());
}

TEST(PruneRuns, KeepFinishedBlocksAfterAnError) {
  const TemporaryFolder folder;
  pretrained::save(SmallLlama().model, folder / "m");
  PruneRun run{.model = "m", .out = folder / "p"};
  run.options.on_block = [](int64_t, const std::vector<PrunedMatrix>&) { fail_at(Site::here(), "no room"); };
  pretrained::LoadedLanguageModel stopped = loaded_from(folder / "m");
  EXPECT_TRUE(throws([&] { run_pruning(stopped, small_samples(), run); }, "no room"));
  EXPECT_EQ(partial_folder(folder / "p"), folder / "p.partial");
  EXPECT_TRUE(std::filesystem::exists(folder / "p.partial/block-00000.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "p"));
  run.options.on_block = {};
  pretrained::LoadedLanguageModel resumed = loaded_from(folder / "m"), whole = loaded_from(folder / "m");
  const PruneRunResult done = run_pruning(resumed, small_samples(), run);
  EXPECT_EQ(done.pruned.resumed, 1);
  EXPECT_FALSE(std::filesystem::exists(folder / "p.partial"));
  run.out = folder / "q";
  EXPECT_EQ(run_pruning(whole, small_samples(), run).report, done.report);
}

TEST(PruneRuns, LetNoOtherWriteToTheSameFolder) {
  const TemporaryFolder folder;
  pretrained::save(SmallLlama().model, folder / "m");
  io::make_folder(folder / "p.partial");
  const train::FolderLock other(folder / "p.partial");
  pretrained::LoadedLanguageModel language = loaded_from(folder / "m");
  EXPECT_TRUE(throws([&] { run_pruning(language, small_samples(), {.model = "m", .out = folder / "p"}); },
                     "p.partial"));
}

}  // namespace
}  // namespace tessera::sparsity
