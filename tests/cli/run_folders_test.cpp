#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "tests/cli/files.h"

// Run folders that are damaged, and folders that cannot be made.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

/// A finished run in runs/r of two checkpoints.
void put_run(const Workplace& at) {
  const Outcome outcome = run(at, "train tnp --quiet --steps 4 --save-every 2 --name r" + kTiny);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
}

struct BadRun {
  const char* name;
  std::function<void(const Workplace&)> damage;
  const char* says;
};
void PrintTo(const BadRun& bad, std::ostream* out) {
  *out << bad.name;
}

std::function<void(const Workplace&)> put_job(const char* key, json value) {
  return [key, value = std::move(value)](const Workplace& at) {
    json settings = json::parse(at.get("runs/r/run.json"));
    settings["job"][key] = value;
    at.put("runs/r/run.json", settings.dump());
  };
}

void damage_checkpoints(const Workplace& at, const std::function<std::string(std::string)>& damage) {
  for (const auto& entry : fs::directory_iterator(at / "runs/r/checkpoints")) {
    const std::string name = "runs/r/checkpoints/" + entry.path().filename().string();
    at.put(name, damage(at.get(name)));
  }
}

const std::vector<BadRun>& bad_runs() {
  static const std::vector<BadRun> kRuns = {
      {"NoFolder", [](const Workplace& at) { fs::remove_all(at / "runs/r"); }, "runs/r|run.json"},
      {"NoSettings", [](const Workplace& at) { fs::remove(at / "runs/r/run.json"); }, "runs/r|run.json"},
      {"SettingsAreAFolder",
       [](const Workplace& at) {
         fs::remove(at / "runs/r/run.json");
         fs::create_directory(at / "runs/r/run.json");
       },
       "runs/r|run.json"},
      {"EmptySettings", [](const Workplace& at) { at.put("runs/r/run.json", ""); }, "run.json|empty"},
      {"Garbage", [](const Workplace& at) { at.put("runs/r/run.json", "{\"job\": {"); },
       "run.json|JSON object"},
      {"Array", [](const Workplace& at) { at.put("runs/r/run.json", "[1]"); }, "run.json|JSON object"},
      {"NoJob", [](const Workplace& at) { at.put("runs/r/run.json", "{}"); }, "run.json|\"job\""},
      {"JobIsText", [](const Workplace& at) { at.put("runs/r/run.json", R"({"job":"tnp"})"); },
       "run.json|object"},
      {"EmptyJob", [](const Workplace& at) { at.put("runs/r/run.json", R"({"job":{}})"); },
       "run.json|missing"},
      {"UnknownSetting", put_job("colour", 3), "run.json|\"colour\"|not a setting"},
      {"TextForNumber", put_job("batch", "2"), "run.json|\"batch\"|another type"},
      {"FractionForSize", put_job("batch", 2.5), "run.json|\"batch\"|2.5"},
      {"FlagForNumber", put_job("lr", true), "run.json|\"lr\"|true"},
      {"NumberForFlag", put_job("model.pre_norm", 1), "run.json|\"model.pre_norm\"|1"},
      {"NumberForWord", put_job("prior", 1), "run.json|\"prior\"|1"},
      {"NegativeSeed", put_job("seed", -1), "run.json|\"seed\"|-1"},
      {"NegativeSize", put_job("model.layers", -1), "run.json|layers|-1"},
      {"HugeSize", put_job("context", int64_t(1) << 62), "run.json|context|expected 1 to 1073741824"},
      {"TooLargeForSigned", put_job("context", ~uint64_t(0)), "run.json|\"context\""},
      {"ZeroLr", put_job("lr", 0.0), "run.json|lr|expected 1e-30 to 1e+30"},
      {"NoNumber", put_job("lr", nullptr), "run.json|\"lr\"|null"},
      {"UnknownPrior", put_job("prior", "rbg"), "run.json|rbg"},
      {"UnknownDType", put_job("model.dtype", "f31"), "run.json|f31"},
      {"UnknownSchedule", put_job("schedule", "cosin"), "run.json|cosin"},
      {"HeadsThatDoNotDivide", put_job("model.heads", 3), "run.json|d_model 8|3"},
      {"AnotherModel", put_job("model.d_ff", 9), "checkpoints/|another job|\"model.d_ff\"|8|9"},
      {"AnotherCurve", put_job("lr", 0.5), "checkpoints/|another job|\"lr\"|0.5"},
      {"CheckpointsCut",
       [](const Workplace& at) {
         damage_checkpoints(at, [](const std::string& bytes) { return bytes.substr(0, bytes.size() / 2); });
       },
       "none of the 2|checkpoints|another folder"},
      {"CheckpointsFlipped",
       [](const Workplace& at) {
         damage_checkpoints(at, [](std::string bytes) {
           bytes[bytes.size() - 5] = char(bytes[bytes.size() - 5] ^ 4);
           return bytes;
         });
       },
       "none of the 2|damaged|another folder"},
      {"CheckpointsEmpty",
       [](const Workplace& at) { damage_checkpoints(at, [](const std::string&) { return ""; }); },
       "none of the 2|empty"},
  };
  return kRuns;
}

class BadRuns : public ::testing::TestWithParam<BadRun> {};

TEST_P(BadRuns, AreRefusedByResumeAndEval) {
  const Workplace workplace;
  put_run(workplace);
  GetParam().damage(workplace);
  for (const std::string line :
       {"train tnp --device cpu --steps 8 --resume runs/r", "eval tnp runs/r --device cpu --tasks 2"}) {
    const Outcome outcome = run(workplace, line);
    EXPECT_EQ(outcome.code, 1) << line << outcome.out << outcome.err;
    const size_t last = outcome.err.rfind("tessera: ");  // after warnings of what was passed over
    EXPECT_TRUE(last != std::string::npos && holds_all(outcome.err.substr(last), GetParam().says))
        << line << ": " << outcome.err << "expected " << GetParam().says;
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, BadRuns, ::testing::ValuesIn(bad_runs()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Runs, EvalOfARunWithoutACheckpointSaysSo) {
  const Workplace workplace;
  put_run(workplace);
  fs::remove_all(workplace / "runs/r/checkpoints");
  expect_failure(workplace, "eval tnp runs/r --device cpu --tasks 2", 1,
                 "runs/r/checkpoints|no checkpoint yet");
}

TEST(Runs, BadOptionsOfAResumedRunAreRefused) {
  const Workplace workplace;
  put_run(workplace);
  json settings = json::parse(workplace.get("runs/r/run.json"));
  settings["options"]["save_every"] = -3;
  workplace.put("runs/r/run.json", settings.dump());
  expect_failure(workplace, "train tnp --device cpu --steps 8 --resume runs/r", 1,
                 "run.json|\"save_every\"|-3|--save-every");
}

TEST(Runs, AFolderThatCannotBeMadeIsNamed) {
  const Workplace workplace;
  workplace.put("file", "in the way");
  const std::string made = "tessera: write: cannot create the folder ", taken = ": a file has that name";
  for (const auto& [root, said] : std::vector<std::pair<std::string, std::string>>{
           {"/proc/tessera-runs", made + "/proc/tessera-runs: No such file or directory"},
           {"file", made + "file" + taken},
           {"file/runs", made + "file" + taken},
           {"/dev/null/runs", made + "/dev/null" + taken}})
    expect_failure(workplace, "train tnp --steps 1 --runs " + root + kTiny, 1, said);
  EXPECT_EQ(workplace.files(), std::vector<std::string>{"file"});
}

TEST(Runs, ADivergedOneIsNamedByTheCheckOfAReport) {
  const Workplace at;
  for (const char* name : {"a", "b", "c", "d"}) {
    const std::string seed = name;
    const bool diverges = seed == "c" || seed == "d";
    const Outcome outcome =
        run(at, "train tnp --quiet --steps 2 --name " + seed + " --seed " + std::to_string(seed[0]) + kTiny);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    if (!diverges) continue;
    std::string lines = at.get("runs/" + seed + "/metrics.jsonl");
    for (size_t at_loss = lines.find("\"loss\":"); at_loss != std::string::npos;
         at_loss = lines.find("\"loss\":", at_loss + 1)) {
      const size_t value = at_loss + 7;
      lines.replace(value, lines.find_first_of(",}", value) - value, "null");
    }
    at.put("runs/" + seed + "/metrics.jsonl", lines);
    json settings = json::parse(at.get("runs/" + seed + "/run.json"));
    settings["job"]["lr"] = 7;
    at.put("runs/" + seed + "/run.json", settings.dump());
  }
  const std::string all = "report runs/a runs/b runs/c runs/d --by lr";
  EXPECT_EQ(run(at, all).code, 0);
  expect_failure(at, all + " --check", 2, "report: --check: runs/c diverged|leave it out");
}

TEST(Runs, ADatabaseThatIsNoneIsNamed) {
  const Workplace workplace;
  workplace.put("runs/runs.sqlite", std::string(4096, 'x'));
  const Outcome outcome = run(workplace, "train tnp --steps 1" + kTiny);
  EXPECT_EQ(outcome.code, 0) << outcome.err;  // the run is worth more than its row
  EXPECT_TRUE(holds_all(outcome.err, "warning|runs.sqlite|not a database"));
  const Outcome report = run(workplace, "report runs/runs.sqlite");  // as runs/* names it
  EXPECT_EQ(report.code, 1);
  EXPECT_TRUE(holds_all(report.err, "runs/runs.sqlite: it is a file"));
}

TEST(Runs, WhatDoesNotFitIntoMemoryIsSaid) {
  const Workplace workplace;
  expect_failure(workplace, "train tnp --steps 1 --device cpu --m 1000000 --n 1000000 --batch-size 1000000",
                 1, "memory");
}

}  // namespace
}  // namespace tessera::cli::test
