#include "study/runs_report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/error.h"
#include "tests/folder.h"

namespace tessera::study {
namespace {

/// A run whose loss falls from 2 to `end` over 40 steps and stays there for 20.
train::RunFolder make_run(const std::filesystem::path& root, const std::string& name, const char* dtype,
                          double end, bool evaluated = true) {
  const train::RunFolder run = train::RunFolder::create(root, name);
  run.write_settings({{"model", "tnp"}, {"job", {{"model.dtype", dtype}, {"lr", 0.5}}}});
  for (int64_t step = 1; step <= 60; ++step)
    run.append({step, {{"loss", step <= 40 ? 2 - (2 - end) * double(step) / 40 : end}}});
  if (evaluated) run.append({60, {{"eval_nll", end + 1}, {"eval_gap", end / 10}}});
  return run;
}

TEST(RunsReport, GroupsBySettingAndTellsTheNoise) {
  const TemporaryFolder folder;
  std::vector<train::RunFolder> runs;
  for (const double end : {1.00, 1.02, 1.04}) {
    runs.push_back(make_run(folder.path(), "a", "f32", end));
    runs.push_back(make_run(folder.path(), "b", "bf16", end + 0.01));
  }
  const RunsReportOptions options{.by = "model.dtype", .last = 20};
  const auto groups = group_runs(runs, options);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].name, "f32");
  EXPECT_EQ(groups[1].name, "bf16");
  ASSERT_EQ(groups[0].final_loss.size(), 3u);
  EXPECT_NEAR(groups[0].final_loss[1], 1.02, 1e-12);
  EXPECT_NEAR(groups[1].evaluation[2], 2.05, 1e-12);
  const std::string text = format_groups(groups);
  EXPECT_NE(text.find("1.0200 +- 0.0200"), std::string::npos) << text;
  EXPECT_NE(text.find("final loss (nats per point): f32 - bf16 = -0.0100, within the noise"),
            std::string::npos)
      << text;

  write_runs_report(folder / "page.html", groups, options);
  const std::string page = get(folder / "page.html");
  EXPECT_NE(page.find("Training loss, the second half"), std::string::npos);
  EXPECT_NE(page.find("bf16 (b-3)"), std::string::npos);
}

TEST(RunsReport, SaysThatAnInterruptedRunWasEvaluatedEarlier) {
  const TemporaryFolder folder;
  const train::RunFolder whole = make_run(folder.path(), "whole", "f32", 1);
  const train::RunFolder stopped = make_run(folder.path(), "stopped", "f32", 1);
  stopped.append({75, {{"loss", 0.5}, {"interrupted", 1}}});
  const std::string text = format_groups(group_runs({whole, stopped}, {}));
  EXPECT_NE(
      text.find("held-out loss (nats per point): stopped was evaluated last after step 60, and its loss "
                "is that of step 75\n"),
      std::string::npos)
      << text;
  EXPECT_EQ(text.find("whole was evaluated"), std::string::npos) << text;
}

TEST(RunsReport, ComparesEachPairOfGroupsAndShowsSkippedSteps) {
  const TemporaryFolder folder;
  std::vector<train::RunFolder> runs;
  for (const double end : {1.00, 1.02, 1.04}) {
    runs.push_back(make_run(folder.path(), "a", "f32", end));
    runs.push_back(make_run(folder.path(), "b", "bf16", end + 0.01));
    runs.push_back(make_run(folder.path(), "c", "f16", end - 0.01));
    runs.back().append({60, {{"skipped_steps", double(runs.size())}}});
  }
  auto groups = group_runs(runs, {.by = "model.dtype", .last = 20});
  const std::string text = format_groups(groups);
  for (const char* part :
       {"skipped steps", "3, 6, 9", "-, -, -", "final loss (nats per point): f32 - bf16 = -0.0100, within",
        "final loss (nats per point): f32 - f16 = 0.0100, within",
        "final loss (nats per point): bf16 - f16 = 0.0200, within"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
  EXPECT_TRUE(agree(groups));
  groups[2].final_loss = {1.5, 1.51, 1.52};
  EXPECT_FALSE(agree(groups));
  groups[2].final_loss = {1.5};
  EXPECT_TRUE(agree(groups)) << "one run does not tell the noise";
  groups[2].final_loss = {1.5, 1.5, 1.5};
  EXPECT_TRUE(agree(groups)) << "nor do repeats of one";
  EXPECT_NE(
      format_groups(groups).find("final loss (nats per point): f32 - f16 = -0.4800, a group of runs with "
                                 "equal values does not tell the noise"),
      std::string::npos);
}

// Ends of a and b differ by 0.05 +- 0.0453, which is beyond the noise of that pair alone (p = 0.037) and not
// of three pairs tested together; a difference of 0.07 (p = 0.0127) is.
TEST(RunsReport, CorrectsForTheNumberOfPairs) {
  const TemporaryFolder folder;
  const auto groups_of = [&](std::initializer_list<std::pair<const char*, double>> shifts) {
    std::vector<train::RunFolder> runs;
    for (const auto& [dtype, shift] : shifts)
      for (const double end : {1.00, 1.02, 1.04})
        runs.push_back(make_run(folder.path(), dtype, dtype, end + shift, false));
    return group_runs(runs, {.by = "model.dtype", .last = 20});
  };
  const auto two = groups_of({{"a", 0}, {"b", 0.05}});
  EXPECT_FALSE(agree(two));
  EXPECT_NE(format_groups(two).find("a - b = -0.0500, beyond the noise over runs (0.0453, 95 %)"),
            std::string::npos)
      << format_groups(two);
  const auto three = groups_of({{"a", 0}, {"b", 0.05}, {"c", 0.025}});
  EXPECT_TRUE(agree(three));
  EXPECT_NE(format_groups(three).find("a - b = -0.0500, within the noise over runs (p = 0.11 after Holm's "
                                      "correction for 3 pairs; of this pair alone 0.0453, 95 %)"),
            std::string::npos)
      << format_groups(three);
  EXPECT_FALSE(agree(groups_of({{"a", 0}, {"b", 0.07}, {"c", 0.035}})));
}

TEST(RunsReport, SaysWhichRunsDiverged) {
  const TemporaryFolder folder;
  std::vector<train::RunFolder> runs;
  for (const double end : {1.0, 1.1, 1.2}) {
    runs.push_back(make_run(folder.path(), "a", "f32", end));
    runs.push_back(make_run(folder.path(), "b", "bf16", end));
  }
  runs.back().append({61, {{"loss", std::nan("")}}});
  const std::string text = format_groups(group_runs(runs, {.by = "model.dtype", .last = 20}));
  EXPECT_NE(text.find("final loss (nats per point): not compared, since 1 of the 3 runs of bf16 diverged\n"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("runs of f32 diverged"), std::string::npos) << text;
}

TEST(RunsReport, LossesOfTnpsOnOtherTasksAreNotCompared) {
  const TemporaryFolder folder;
  std::vector<train::RunFolder> runs;
  for (const char* const prior : {"linear", "rbf", "linear", "rbf"}) {
    runs.push_back(make_run(folder.path(), prior, "f32", 1 + 0.01 * double(runs.size())));
    runs.back().write_settings({{"model", "tnp"}, {"job", {{"prior", prior}, {"context", 8}}}});
  }
  const auto groups = group_runs(runs, {.by = "prior", .last = 20});
  const std::string text = format_groups(groups);
  EXPECT_NE(text.find("final loss (nats per point): not compared, since they differ in prior (linear, rbf): "
                      "linear and rbf"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("linear - rbf"), std::string::npos) << text;
  EXPECT_NE(incomparable(groups).find("differ in prior"), std::string::npos);
}

TEST(RunsReport, RunsWithoutTheSettingAreAGroup) {
  const TemporaryFolder folder;
  const train::RunFolder adamw = make_run(folder.path(), "a", "f32", 1),
                         muon = make_run(folder.path(), "b", "f32", 2);
  muon.write_settings({{"model", "tnp"}, {"job", {{"optimizer", "muon"}}}});
  const auto groups = group_runs({adamw, muon, make_run(folder.path(), "c", "f32", 3)}, {.by = "optimizer"});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].name, "(not set)");
  EXPECT_EQ(groups[0].runs.size(), 2u);
  EXPECT_EQ(groups[1].name, "muon");
}

TEST(RunsReport, ASettingOfTheJobComesBeforeAFactOfThatName) {
  const TemporaryFolder folder;
  std::vector<train::RunFolder> runs;
  for (const int stride : {3, 16}) {
    runs.push_back(make_run(folder.path(), "run", "f32", 1));
    runs.back().write_settings({{"model", "tnp"},
                                {"evaluation", {{"stride", 8}, {"every", 5}}},
                                {"job", {{"stride", stride}, {"lr", 0.5}}},
                                {"options", {{"every", stride}, {"lr", 1}}}});
  }
  for (const char* by : {"stride", "every"}) {
    const auto groups = group_runs(runs, {.by = by});
    ASSERT_EQ(groups.size(), 2u) << by;
    EXPECT_EQ(groups[0].name, "3");
    EXPECT_EQ(groups[1].name, "16");
  }
  EXPECT_EQ(group_runs(runs, {.by = "lr"}).at(0).name, "0.5");
  EXPECT_EQ(group_runs(runs, {.by = "evaluation/stride"}).at(0).name, "8");
}

TEST(RunsReport, TheFinalLossIsOfTheLastStepsOnly) {
  const TemporaryFolder folder;
  const train::RunFolder run = make_run(folder.path(), "a", "f32", 1, false);
  EXPECT_DOUBLE_EQ(group_runs({run}, {.last = 20})[0].final_loss[0], 1);
  EXPECT_GT(group_runs({run}, {.last = 22})[0].final_loss[0], 1);
  EXPECT_TRUE(std::isnan(group_runs({run}, {})[0].evaluation[0]));
  EXPECT_EQ(group_runs({run}, {})[0].name, "a");
}

TEST(RunsReport, RunsOfOneNameAreEachTheirOwnAndOneRunCountsOnce) {
  const TemporaryFolder folder;
  const train::RunFolder a = make_run(folder / "first", "a", "f32", 1),
                         b = make_run(folder / "second", "a", "f32", 2);
  const auto groups = group_runs({train::RunFolder::open(a.path() / ""), b}, {});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].name, a.path().string());
  EXPECT_EQ(groups[1].name, b.path().string());
  EXPECT_EQ(group_runs({a, b}, {.by = "lr"}).size(), 1u);
  try {
    group_runs({a, b, train::RunFolder::open(a.path() / ".")}, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("is given twice"), std::string::npos) << error.what();
  }
}

TEST(RunsReport, EachGroupIsOneLineOfTheTable) {
  const TemporaryFolder folder;
  const std::string text =
      format_groups(group_runs({make_run(folder.path(), "a\nb\tc", "f32", 1)}, {.last = 20}));
  EXPECT_NE(text.find("\na b c  "), std::string::npos) << text;
}

train::RunFolder make_run_of(const std::filesystem::path& root, const std::string& name,
                             const nlohmann::json& settings) {
  const train::RunFolder run = train::RunFolder::create(root, name);
  run.write_settings(settings);
  run.append({1, {{"loss", 2.0}, {"eval_nll", 1.5}, {"eval_gap", 0.25}, {"eval_score", 0.8}}});
  return run;
}

TEST(RunsReport, SaysWhatTheNumbersOfEachKindOfRunAre) {
  const TemporaryFolder folder;
  const auto make = [&](const char* name, const nlohmann::json& settings) {
    return make_run_of(folder.path(), name, settings);
  };
  const train::RunFolder tnp = make("tnp", {{"model", "tnp"}}),
                         gpt = make("gpt", {{"model", "gpt"}, {"baseline", {{"order", 5}}}}),
                         llama = make("llama", {{"model", "llama"}, {"baseline", {{"order", 3}}}}),
                         alone = make("alone", {{"model", "gpt"}}),
                         sst2 = make("sst2", {{"model", "bert"}, {"job", {{"task", "sst2"}}}}),
                         stsb = make("stsb", {{"model", "bert"}, {"job", {{"task", "stsb"}}}}),
                         other = make("other", {{"model", "resnet"}});
  const auto table = [&](const std::vector<train::RunFolder>& runs) {
    write_runs_report(folder / "page.html", group_runs(runs, {}), {});
    const std::string page = get(folder / "page.html");
    return format_groups(group_runs(runs, {})) + page.substr(page.find("<body>"));  // not Chart.js
  };
  const auto says = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(says(table({tnp}), "gap to the optimum (nats per point)"));
  const std::string of_gpt = table({gpt});
  EXPECT_TRUE(says(of_gpt, "final loss (nats per token)") && says(of_gpt, "held-out loss (nats per token)") &&
              says(of_gpt, "gap to the 5-gram (nats per token)"))
      << of_gpt;
  EXPECT_FALSE(says(of_gpt, "per point") || says(of_gpt, "optimum")) << of_gpt;
  // Next to different n-grams, or none, a gap says nothing.
  for (const std::string& text : {table({gpt, llama}), table({alone}), table({gpt, alone})})
    EXPECT_TRUE(says(text, "nats per token") && !says(text, "gap")) << text;
  const std::string of_bert = table({sst2});
  EXPECT_TRUE(says(of_bert, "score on SST-2") && says(of_bert, "nats per text") && says(of_bert, "0.8000") &&
              !says(of_bert, "gap"))
      << of_bert;
  EXPECT_TRUE(says(table({stsb}), "squared error per text"));
  for (const auto& [runs, part] : std::vector<std::pair<std::vector<train::RunFolder>, std::string>>{
           {{tnp, gpt}, "gpt is a run of `train gpt` (nats per token"},
           {{sst2, stsb}, "stsb is a run of `train bert` (squared error per text, score on STS-B)"},
           {{other}, "says that it is a run of \"resnet\", which is unknown"}})
    try {
      group_runs(runs, {});
      FAIL() << part;
    } catch (const Error& error) {
      EXPECT_TRUE(says(error.what(), part)) << error.what();
    }
}

/// A run of `train gpt` with this tokenizer and length, evaluated on this text.
train::RunFolder make_gpt(const TemporaryFolder& folder, const char* name, const char* tokenizer, int length,
                          const char* text, int64_t targets, double loss) {
  const train::RunFolder run = train::RunFolder::create(folder.path(), name);
  run.write_settings(
      {{"model", "gpt"},
       {"job", {{"fingerprint", tokenizer}, {"length", length}}},
       {"evaluation", {{"length", length}, {"stride", 8}, {"targets", targets}, {"text", text}}}});
  run.append({1, {{"loss", loss}, {"eval_nll", loss}, {"eval_bits_per_byte", loss / 2}}});
  return run;
}

TEST(RunsReport, FiguresOfOtherTokenizersAndEvaluationsAreNotCompared) {
  const TemporaryFolder folder;
  const std::string one(32, '1'), two(32, '2'), text(32, 'a'), other(32, 'b');
  const train::RunFolder a = make_gpt(folder, "a", one.c_str(), 16, text.c_str(), 64, 1.0),
                         same = make_gpt(folder, "same", one.c_str(), 16, text.c_str(), 64, 1.1),
                         bpe = make_gpt(folder, "bpe", two.c_str(), 16, text.c_str(), 30, 3.0),
                         few = make_gpt(folder, "few", one.c_str(), 16, other.c_str(), 32, 1.2),
                         longer = make_gpt(folder, "longer", one.c_str(), 32, text.c_str(), 64, 1.3);
  const auto said = [](const std::vector<train::RunFolder>& runs) {
    return format_groups(group_runs(runs, {}));
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  const std::string alike = said({a, same});
  EXPECT_TRUE(has(alike, "held-out loss (nats per token): a - same = -0.1000")) << alike;
  EXPECT_FALSE(has(alike, "not compared") || has(alike, "bits per byte")) << alike;
  EXPECT_EQ(incomparable(group_runs({a, same}, {})), "");

  const std::string tokenizers = said({a, bpe});
  EXPECT_TRUE(has(tokenizers, "held-out bits per byte: a - bpe = -1.0000")) << tokenizers;
  EXPECT_TRUE(has(tokenizers,
                  "final loss (nats per token): not compared, since they differ in tokenizer: a and "
                  "bpe\n"))
      << tokenizers;
  EXPECT_TRUE(has(tokenizers,
                  "held-out loss (nats per token): not compared, since they differ in targets (64, "
                  "30), tokenizer: a and bpe\n"))
      << tokenizers;
  EXPECT_FALSE(has(tokenizers, "loss (nats per token): a - bpe")) << tokenizers;
  EXPECT_TRUE(has(incomparable(group_runs({a, bpe}, {})),
                  "a and bpe cannot be compared, which differ in "
                  "tokenizer"));

  // Other held-out tokens are no reason not to compare the training.
  const std::string texts = said({a, few});
  EXPECT_TRUE(has(texts, "final loss (nats per token): a - few = -0.2000")) << texts;
  EXPECT_TRUE(has(texts,
                  "held-out loss (nats per token): not compared, since they differ in held-out text, "
                  "targets (64, 32): a and few"))
      << texts;
  EXPECT_EQ(incomparable(group_runs({a, few}, {})), "");

  const std::string lengths = said({a, longer});
  EXPECT_TRUE(has(lengths, "final loss (nats per token): not compared, since they differ in length (16, 32)"))
      << lengths;
  // Nor are such runs averaged.
  const std::vector<RunGroup> mixed = group_runs({a, bpe}, {.by = "model"});
  ASSERT_EQ(mixed.size(), 1u);
  const std::string means = format_groups(mixed);
  EXPECT_TRUE(has(means, "differ in tokenizer: the runs of gpt")) << means;
  EXPECT_FALSE(has(means, "2.0000 +-")) << means;
  EXPECT_TRUE(has(incomparable(mixed), "the runs of gpt"));
}

TEST(RunsReport, NamesTheRunThatLacksWhatIsAsked) {
  const TemporaryFolder folder;
  const train::RunFolder run = make_run(folder.path(), "a", "f32", 1);
  try {
    group_runs({run}, {.by = "model.dtpe"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean model.dtype?"), std::string::npos) << error.what();
  }
  const train::RunFolder silent = train::RunFolder::create(folder.path(), "silent");
  silent.write_settings({{"job", 1}});
  EXPECT_THROW(group_runs({silent}, {}), Error);
  silent.write_settings({{"seeds", 3}});
  try {
    group_runs({silent}, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("silent/seed-*"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::study
