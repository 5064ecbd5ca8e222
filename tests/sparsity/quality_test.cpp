#include "sparsity/quality.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "report/run_table.h"
#include "sparsity/patterns.h"
#include "tests/io/files.h"

// Quality over several models: pairs, intervals, claims, and files that are refused.

namespace tessera::sparsity {
namespace {

using io::test::throws;
using nlohmann::json;

json cell(const char* task, const char* arm, double nats, json accuracy = nullptr, int64_t seed = 0) {
  return {{"task", task}, {"arm", arm},   {"calibration_seed", seed},       {"weights", 0.5},
          {"inputs", 0},  {"nats", nats}, {"accuracy", std::move(accuracy)}};
}

json claim(const char* text, json lower, json than, bool alike = false) {
  return {{"text", text},
          {"task", "2:4"},
          {"lower", std::move(lower)},
          {"than", std::move(than)},
          {"alike", alike}};
}

/// A model whose dense loss is `dense`; Wanda loses `wanda` more, magnitude `magnitude`.
json model(const std::string& name, double dense, double wanda, double magnitude) {
  return {
      {"format", kQualityFormat},
      {"title", "Study"},
      {"model", name},
      {"baseline", "dense"},
      {"settings", {{"seed", name.size()}, {"samples", 8}}},
      {"cells",
       {cell("", "dense", dense, 0.75), cell("2:4", "wanda", dense + wanda, 0.5),
        cell("2:4", "magnitude", dense + magnitude, 0.25)}},
      {"claims",
       {claim("wanda loses less", {"wanda"}, {"magnitude"}),
        claim("magnitude loses less", {"magnitude"}, {"wanda"}),
        claim("as good", {"wanda"}, {"magnitude"}, true),
        claim("the best of two", {"magnitude", "wanda"}, {"dense"}), claim("absent", {"ria"}, {"wanda"})}},
      {"missing", {"2:4: ria: no time was left"}}};
}

Quality read(const TemporaryFolder& folder, const std::vector<json>& models) {
  std::vector<std::string> paths;
  for (const json& one : models) {
    paths.push_back(folder / ("q" + std::to_string(paths.size())));
    io::write_file(paths.back(), one.dump());
  }
  return read_quality(paths);
}

const QualityArm& arm_of(const std::vector<QualityArm>& arms, const std::string& name) {
  return *std::ranges::find(arms, name, &QualityArm::arm);
}

TEST(Quality, DifferencesArePairedByModel) {
  const TemporaryFolder folder;
  // The models differ by 3 nats, which is more than any arm; what an arm adds differs little.
  const Quality quality =
      read(folder, {model("a", 1, 0.1, 0.5), model("bb", 4, 0.2, 0.65), model("ccc", 2, 0.3, 0.65)});
  const std::vector<QualityArm> arms = quality.arms();
  ASSERT_EQ(arms.size(), 3u);
  const QualityArm& wanda = arm_of(arms, "wanda");
  EXPECT_EQ(wanda.nats.n, 3);
  EXPECT_NEAR(wanda.nats.mean, 7.6 / 3, 1e-12);
  // t_{0.975, 2} = 4.302653, deviation 0.1.
  EXPECT_NEAR(wanda.nats_above_dense->mean, 0.2, 1e-12);
  EXPECT_NEAR(wanda.nats_above_dense->half, 4.302652729911275 * 0.1 / std::sqrt(3.0), 1e-9);
  EXPECT_NEAR(wanda.accuracy_above_dense->mean, -0.25, 1e-12);
  EXPECT_FALSE(arm_of(arms, "dense").nats_above_dense);
  const std::vector<ClaimResult> results = quality.results();
  EXPECT_EQ(results[0].verdict(), "held");
  EXPECT_NEAR(results[0].difference->mean, -0.4, 1e-12);
  EXPECT_EQ(results[1].verdict(), "refuted");
  EXPECT_EQ(results[2].verdict(), "differ");
  EXPECT_NEAR(results[3].difference->mean, 0.2, 1e-12);  // wanda is the better one in each model
  EXPECT_EQ(results[4].verdict(), "not measured");
}

TEST(Quality, NoiseIsNotAnOrder) {
  const TemporaryFolder folder;
  const Quality quality = read(folder, {model("a", 1, 0.1, 0.2), model("bb", 1, 0.2, 0.1)});
  EXPECT_EQ(quality.results()[0].verdict(), "not told apart");
  EXPECT_EQ(quality.results()[2].verdict(), "not told apart");
}

// An interval of width 0 would exclude 0 however small the difference is.
TEST(Quality, EqualDifferencesDoNotTellTheNoise) {
  const TemporaryFolder folder;
  const Quality quality =
      read(folder, {model("a", 1, 0.25, 0.5), model("bb", 4, 0.25, 0.5), model("ccc", 2, 0.25, 0.5)});
  for (const size_t claim : {0, 1, 2, 3}) EXPECT_EQ(quality.results()[claim].verdict(), "noise unknown");
  const std::string text = quality_markdown(quality);
  EXPECT_NE(text.find("| +0.2500 |"), std::string::npos) << text;
  EXPECT_EQ(text.find("[+"), std::string::npos) << text;
  EXPECT_EQ(text.find("[-"), std::string::npos) << text;
  const Quality same = read(folder, {model("a", 1, 0.5, 0.5), model("bb", 4, 0.5, 0.5)});
  EXPECT_EQ(same.results()[0].verdict(), "not told apart");
}

TEST(Quality, OneModelHasNoIntervals) {
  const TemporaryFolder folder;
  const Quality quality = read(folder, {model("a", 1, 0.1, 0.5)});
  EXPECT_EQ(quality.results()[0].verdict(), "held in one model");
  EXPECT_EQ(quality.results()[1].verdict(), "not held in one model");
  EXPECT_EQ(quality.results()[2].verdict(), "one model cannot tell");
  const std::string text = quality_markdown(quality);
  EXPECT_NE(text.find("there are no intervals"), std::string::npos) << text;
  EXPECT_EQ(text.find("[+"), std::string::npos) << text;
  EXPECT_NE(text.find("- a: 2:4: ria: no time was left"), std::string::npos) << text;
}

TEST(Quality, CalibrationSeedsAreAveragedWithinAModel) {
  const TemporaryFolder folder;
  json one = model("a", 1, 0.1, 0.5);
  one["cells"].push_back(cell("2:4", "wanda", 1.3, nullptr, 1));
  const QualityArm wanda = arm_of(read(folder, {one}).arms(), "wanda");
  EXPECT_EQ(wanda.nats.n, 1);
  EXPECT_NEAR(wanda.nats.mean, 1.2, 1e-12);
  EXPECT_FALSE(wanda.accuracy);  // one of its seeds was not asked
  EXPECT_FALSE(wanda.counted);
  one["cells"][1]["counted"] = 0.4, one["cells"][3]["counted"] = 0.5;
  EXPECT_NEAR(*arm_of(read(folder, {one}).arms(), "wanda").counted, 0.45, 1e-12);
}

TEST(Quality, TheDatabaseHoldsAllOfIt) {
  if (!report::has_database()) GTEST_SKIP() << "skipped: this build has no SQLite";
  const TemporaryFolder folder;
  json first = model("a", 1, 0.1, 0.5);
  first["cells"][1]["counted"] = 0.4;
  const Quality quality = read(folder, {first, model("bb", 4, 0.2, 0.65)});
  const std::string out = folder / "out";
  write_quality(quality, out);
  const std::string bytes = io::read_file(out + "/" + kPatternsFile, 1 << 24);
  {
    report::Database database =
        report::Database::read_only(out + "/" + kPatternsFile, kQualityId, kQualityWhat);
    const Quality again = quality_of(database);
    std::ifstream page(out + "/" + kQualityPage);
    EXPECT_EQ(quality_html(again), std::string(std::istreambuf_iterator<char>(page), {}));
    EXPECT_EQ(quality_markdown(again), io::read_file(out + "/" + kQualityTable, 1 << 24));
    EXPECT_EQ(database.run("SELECT verdict FROM claims WHERE claim = 'wanda loses less'").rows[0][0],
              report::TableCell(std::string("held")));
  }
  write_quality(quality, out);
  EXPECT_EQ(io::read_file(out + "/" + kPatternsFile, 1 << 24), bytes);
  io::write_file(out + "/" + kPatternsFile, "x");
  EXPECT_TRUE(throws([&] { write_quality(quality, out); }, kPatternsFile));
}

TEST(Quality, WhatIsNoResultIsRefused) {
  const TemporaryFolder folder;
  const auto refused = [&](const json& one, const char* says) {
    EXPECT_TRUE(throws([&] { read(folder, {one}); }, says)) << says;
  };
  const json good = model("a", 1, 0.1, 0.5);
  refused(json::array(), "no file of results");
  const auto changed = [&](const char* place, json value) {
    json one = good;
    one[json::json_pointer(place)] = std::move(value);
    return one;
  };
  refused(changed("/format", "other"), "no file of results");
  refused(changed("/title", 3), "\"title\" is 3; expected a text");
  refused(changed("/cells", json::array()), "nothing was measured");
  refused(changed("/cells/1/nats", "much"), "cell 2: \"nats\" is \"much\"; expected a number");
  refused(changed("/cells/1/nats", nullptr), "\"nats\" is null");
  refused(changed("/cells/1/nats", -1), "expected 0 or more");
  refused(changed("/cells/1/weights", 1.5), "\"weights\" is 1.5; expected 0 to 1");
  refused(changed("/cells/1/accuracy", 2), "\"accuracy\" is 2");
  refused(changed("/cells/2/arm", "wanda"), "wanda in \"2:4\" is given twice");
  refused(changed("/claims/0/lower", json::array()), "compares nothing");
  refused(changed("/claims/0/than", json::array({3})), "expected texts");
  refused(changed("/missing", "x"), "expected a list");
  json lacking = good;
  lacking["cells"][0].erase("task");
  refused(lacking, "cell 1 has no \"task\"");
  const auto both = [&](json other, const char* says) {
    EXPECT_TRUE(throws([&] { read(folder, {good, other}); }, says)) << says;
  };
  both(good, "the model a is given twice");
  json other = model("bb", 1, 0.1, 0.5);
  EXPECT_EQ(read(folder, {good, other}).models.size(), 2u);  // the seed alone differs
  other["settings"]["program"] = "tessera 1 (b)";            // as does the revision
  EXPECT_EQ(read(folder, {good, other}).settings,
            (std::vector<std::pair<std::string, std::string>>(
                {{"samples", "8"}, {"seed", "1"}, {"program", "tessera 1 (b)"}})));
  other["settings"]["samples"] = 9;
  both(other, "of another study");
  other["settings"].erase("samples");
  both(other, "\"samples\" differs");
  other = model("bb", 1, 0.1, 0.5);
  other["claims"].erase(0);
  both(other, "\"claims\" differs");
  EXPECT_TRUE(throws([] { read_quality({"absent"}); }, "absent"));
}

}  // namespace
}  // namespace tessera::sparsity
