#include "train/seeds_report.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/errors.h"
#include "tests/folder.h"

namespace tessera::train {
namespace {

using nlohmann::json;

RunFolder run_of(const std::filesystem::path& root, const std::string& name, double first, double last) {
  const RunFolder run = RunFolder::create(root, name);
  run.append({1, {{"loss", 0.9}}});
  run.append({2, {{"loss", 0.7}, {"eval_accuracy", first}, {"eval_loss", 0.6}}});
  run.append({4, {{"loss", 0.5}, {"eval_accuracy", last}, {"eval_loss", 0.4}}});
  return run;
}

TEST(SeedsReport, MeansAndDeviationsByHand) {
  const TemporaryFolder root;
  const SeedResults results =
      collect_seeds({run_of(root.path(), "seed-0", 0.5, 0.8), run_of(root.path(), "seed-1", 0.6, 0.9),
                     run_of(root.path(), "seed-2", 0.7, 0.7)});
  const json out = to_json(results);
  EXPECT_NEAR(out["eval_accuracy"]["mean"].get<double>(), 0.8, 1e-12);
  EXPECT_NEAR(out["eval_accuracy"]["deviation"].get<double>(), 0.1, 1e-12);  // sqrt((0 + 0.01 + 0.01) / 2)
  EXPECT_EQ(out["eval_accuracy"]["values"], json({0.8, 0.9, 0.7}));
  EXPECT_NEAR(out["loss"]["mean"].get<double>(), 0.5, 1e-12);
  const std::string table = format_seeds(results);
  for (const char* part : {"seed-0", "seed-2", "accuracy", "0.8000 +- 0.1000", "training loss"})
    EXPECT_NE(table.find(part), std::string::npos) << part << "\n" << table;
  write_seeds_report(root / "page.html", "BERT on X", results, {{"lr", "0.1"}});
  const std::string page = get(root / "page.html");
  EXPECT_NE(page.find("0.8000 +- 0.1000"), std::string::npos);
  EXPECT_NE(page.find("mean and standard deviation over the seeds"), std::string::npos);
  // At step 2 the accuracies are 0.5, 0.6 and 0.7: a bar of 0.1, which Chart.js draws from "spread".
  EXPECT_NE(page.find("\"spread\":[0.1"), std::string::npos);
  EXPECT_NE(page.find("id:'spread'"), std::string::npos);
}

TEST(SeedsReport, OneSeedHasNoBars) {
  const TemporaryFolder root;
  const SeedResults results = collect_seeds({run_of(root.path(), "seed-0", 0.5, 0.8)});
  EXPECT_NE(format_seeds(results).find(" 0.8000\n"), std::string::npos);
  EXPECT_EQ(format_seeds(results).find("0.8000 +-"), std::string::npos);
}

TEST(SeedsReport, SaysWhatNanMeans) {
  const TemporaryFolder root;
  const std::string meaning =
      "nan: not defined, as a correlation is not where all predictions or all labels are equal";
  const auto says = [&](const SeedResults& results) {
    write_seeds_report(root / "page.html", "BERT on X", results, {});
    const bool in_table = format_seeds(results).find(meaning) != std::string::npos;
    EXPECT_EQ(get(root / "page.html").find(meaning) != std::string::npos, in_table);
    return in_table;
  };
  const RunFolder good = run_of(root.path(), "seed-0", 0.5, 0.8);
  EXPECT_TRUE(says(collect_seeds({good, run_of(root.path(), "seed-1", 0.5, std::nan(""))})));
  EXPECT_FALSE(says(collect_seeds({good})));
}

TEST(SeedsReport, NamesTheRunWithoutAnEvaluation) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "seed-7");
  run.append({1, {{"loss", 0.9}}});
  EXPECT_NE(message_of([&] { collect_seeds({run}); }).find("seed-7 has logged no evaluation"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::train
