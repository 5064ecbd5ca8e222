#include "study/folder.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>

#include "study/report.h"
#include "study/run.h"
#include "tests/errors.h"
#include "tests/folder.h"

namespace tessera::study {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

Plan small_plan() {
  return {.title = "t",
          .command = "tnp",
          .metric = "eval_score",
          .higher = true,
          .baseline = "dense",
          .flags = {{"--steps", {"40"}}},
          .arms = {{"dense", {}}, {"half", {{"--rows", {"50%"}}}}},
          .tasks = {},
          .rates = {},
          .seeds = {1, 2, 3}};
}

/// What a run of `tessera train` leaves: two evaluations, at steps 20 and 40.
void fake_run(const fs::path& runs, const std::string& name, double first, double last) {
  const train::RunFolder run = train::RunFolder::create(runs, name);
  run.write_settings({{"model", "tnp"}, {"gpu", "none"}, {"job", {{"steps", 40}}}});
  run.append({1, {{"loss", 2}, {"ms_per_step", 900}}});
  run.append(
      {20, {{"loss", 1.5}, {"ms_per_step", 10}, {"eval_score", first}, {"exposed_communication_ms", 2}}});
  run.append({40, {{"loss", 1}, {"ms_per_step", 30}, {"eval_score", last}}});
}

Folder fake_study(const fs::path& path, const Plan& plan, const std::map<std::string, double>& scores) {
  Folder folder = Folder::begin(path, plan);
  for (const Cell& cell : cells_of(plan)) {
    const auto found = scores.find(cell.name);
    if (found == scores.end()) continue;
    fake_run(folder.cells(), cell.name, found->second - 0.2, found->second);
    folder.set(cell, {.status = CellStatus::finished, .reason = {}, .attempts = 1, .flags = cell.flags});
  }
  return folder;
}

TEST(StudyPlan, CellsAreSeedBySeedWithTheArmsSideBySide) {
  Plan plan = small_plan();
  plan.tasks = {{"cola", {{"--task", {"cola"}}, {"--steps", {"80"}}}}};
  plan.rates = {"1e-3", "3e-3"};
  plan.arms[1].flags["--steps"] = {"10"};
  std::vector<std::string> names;
  for (const Cell& cell : cells_of(plan)) names.push_back(cell.name);
  ASSERT_EQ(names.size(), 12u);
  EXPECT_EQ(names[0], "dense,cola,lr-1e-3,seed-1");
  EXPECT_EQ(names[1], "half,cola,lr-1e-3,seed-1");
  EXPECT_EQ(names[2], "dense,cola,lr-3e-3,seed-1");
  EXPECT_EQ(names[4], "dense,cola,lr-1e-3,seed-2");
  // An arm wins over a task, a task over the flags of all.
  EXPECT_EQ(cells_of(plan)[0].flags.at("--steps"), std::vector<std::string>{"80"});
  EXPECT_EQ(cells_of(plan)[1].flags.at("--steps"), std::vector<std::string>{"10"});
  EXPECT_EQ(
      arguments_of(plan, cells_of(plan)[1], "r", false),
      (std::vector<std::string>{"train", "tnp", "--lr", "1e-3", "--rows", "50%", "--seed", "1", "--steps",
                                "10", "--task", "cola", "--runs", "r", "--name", names[1], "--quiet"}));
  plan.flags["--device"] = {"cpu"};
  EXPECT_EQ(
      arguments_of(plan, cells_of(plan)[0], "r", true),
      (std::vector<std::string>{"train", "tnp", "--resume", "r/" + names[0], "--device", "cpu", "--quiet"}));
  const Plan same = plan_from_json(to_json(plan), "f");
  EXPECT_EQ(to_json(same), to_json(plan));
}

// They may not fit into so few steps, or make them other ones than most of the run's.
TEST(StudyPlan, ARunForStepTimesHasNoFlagsThatCountTheStepsOfTheWholeRun) {
  Plan plan = small_plan();
  plan.arms[1].flags = {{"--ffn", {"relu2"}}};
  const Flags wanted = timing_cell(plan, "half", "", 30).flags;
  EXPECT_EQ(wanted.at("--steps"), std::vector<std::string>{"30"});
  for (const char* const flag : {"--dense-first", "--dense-last", "--restarts", "--restart-warmup",
                                 "--warmup", "--log-every", "--eval-every"})
    plan.flags[flag] = {"40"};
  plan.flags["--schedule"] = {"cosine_restarts"};
  EXPECT_EQ(timing_cell(plan, "half", "", 30).flags, wanted);
}

// As on a full disk: the next call must not take what it left for something else's folder.
TEST(StudyFolder, ACallThatCannotWriteLeavesAFolderThatCanBeUsed) {
  const TemporaryFolder root;
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto signal_before = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit nothing { 0, before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &nothing), 0);
  const std::string refused = message_of([&] { Folder::begin(root / "s", small_plan()); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, signal_before);
  EXPECT_NE(refused, "");
  EXPECT_EQ(message_of([&] { Folder::begin(root / "s", small_plan()); }), "");
}

TEST(StudyResults, DifferencesArePairedBySeed) {
  const TemporaryFolder root;
  Plan plan = small_plan();
  plan.arms.push_back({"tenth", {{"--rows", {"10%"}}}});
  const Folder folder = fake_study(root / "s", plan,
                                   {{"dense,seed-1", 0.80},
                                    {"dense,seed-2", 0.70},
                                    {"dense,seed-3", 0.90},
                                    {"half,seed-1", 0.79},
                                    {"half,seed-2", 0.70},
                                    {"half,seed-3", 0.88},
                                    {"tenth,seed-1", 0.50},
                                    {"tenth,seed-2", 0.41}});
  const Results results = collect(folder);
  ASSERT_EQ(results.families.size(), 1u);
  const auto& family = results.families.front();
  ASSERT_EQ(family.size(), 3u);
  EXPECT_EQ(family[0].verdict(true), "baseline");
  EXPECT_NEAR(family[0].score.mean, 0.8, 1e-12);
  // -0.01, 0, -0.02: mean -0.01, deviation 0.01, and 4.3027 * 0.01 / sqrt(3) at two degrees of freedom.
  ASSERT_TRUE(family[1].difference);
  EXPECT_NEAR(family[1].difference->mean, -0.01, 1e-12);
  EXPECT_NEAR(family[1].difference->half, 4.3026527297494619 * 0.01 / std::sqrt(3), 1e-12);
  EXPECT_EQ(family[1].verdict(true), "not told apart");
  // Of seeds 1 and 2: -0.30 and -0.29.
  EXPECT_EQ(family[2].difference->n, 2);
  EXPECT_NEAR(family[2].difference->mean, -0.295, 1e-12);
  EXPECT_NEAR(family[2].p_holm, 2 * family[2].difference->p, 1e-12);
  EXPECT_EQ(family[2].verdict(true), "worse");
  EXPECT_EQ(family[2].verdict(false), "better");
  // 95 % of 0.8 is 0.76: dense gets there at its end with seeds 1 and 3, "tenth" never.
  EXPECT_NEAR(family[0].target, 0.76, 1e-12);
  EXPECT_EQ(family[0].reached, 2);
  EXPECT_EQ(family[0].steps_to_target->mean, 40);
  EXPECT_EQ(family[2].reached, 0);
  // The median of 10 and 30 ms; the first step is no pace.
  EXPECT_EQ(results.time_of("half", "").ms, 20);
  EXPECT_EQ(results.time_of("half", "").intervals, 6);
  const std::string text = format_comparisons(results);
  for (const char* part : {"-0.0100 [-0.0348, +0.0148]", "0.8 +- 0 s (2 of 3 seeds)", "never", "worse"})
    EXPECT_NE(text.find(part), std::string::npos) << part << text;
}

// Both arms of a task of few examples may answer the same way with every seed: 2 of 10 and 3 of 10 right.
TEST(StudyResults, EqualDifferencesOfFewSeedsAreNoEvidence) {
  const TemporaryFolder root;
  Plan plan = small_plan();
  plan.seeds = {1, 2};
  const Results results = collect(
      fake_study(root / "s", plan,
                 {{"dense,seed-1", 0.2}, {"dense,seed-2", 0.2}, {"half,seed-1", 0.3}, {"half,seed-2", 0.3}}));
  const Comparison& half = results.families.front()[1];
  EXPECT_EQ(half.difference->n, 2);
  EXPECT_EQ(half.verdict(true), "-");
  const std::string text = format_comparisons(results);
  EXPECT_NE(text.find("0.3000 +- 0.0000  +0.1000  "), std::string::npos) << text;
  write_report(root / "s", results);
  EXPECT_NE(get(root / "s/comparisons.csv").find(",,,,,-,"), std::string::npos)
      << get(root / "s/comparisons.csv");
}

// The same plan gives the same curves.csv, on several ranks too.
TEST(StudyResults, CurvesHaveNoTimes) {
  const TemporaryFolder root;
  write_report(root / "s", collect(fake_study(root / "s", small_plan(), {{"dense,seed-1", 0.2}})));
  const std::string curves = get(root / "s/curves.csv");
  EXPECT_NE(curves.find("eval_score"), std::string::npos) << curves;
  for (const char* time : {"ms_per_step", "exposed_communication_ms"})
    EXPECT_EQ(curves.find(time), std::string::npos) << curves;
}

TEST(StudyResults, ArmsThatAreMeasuredOnOtherTextAreNotCompared) {
  const TemporaryFolder root;
  Plan plan = small_plan();
  plan.command = "gpt", plan.metric = "eval_nll", plan.higher = false, plan.seeds = {1, 2};
  plan.arms.push_back({"long", {{"--length", {"32"}}}});
  Folder folder = Folder::begin(root / "s", plan);
  for (const Cell& cell : cells_of(plan)) {
    const train::RunFolder run = train::RunFolder::create(folder.cells(), cell.name);
    const int length = cell.arm == "long" ? 32 : 16;
    run.write_settings({{"model", "gpt"},
                        {"job", {{"fingerprint", "f"}, {"length", length}}},
                        {"evaluation", {{"length", length}, {"text", "t"}}}});
    run.append({40, {{"loss", 1}, {"eval_nll", 1 + 0.1 * double(cell.seed)}}});
    folder.set(cell, {.status = CellStatus::finished, .reason = {}, .attempts = 1, .flags = cell.flags});
  }
  const Results results = collect(folder);
  ASSERT_EQ(results.families.size(), 1u);
  const auto& family = results.families.front();
  ASSERT_EQ(family.size(), 3u);
  EXPECT_TRUE(family[1].difference);
  EXPECT_EQ(family[1].incomparable, "");
  EXPECT_FALSE(family[2].difference);
  EXPECT_EQ(family[2].verdict(false), "not compared");
  EXPECT_TRUE(std::isnan(family[2].target) && std::isnan(family[2].p_holm));
  const std::string text = format_comparisons(results);
  EXPECT_NE(text.find("long is not compared with dense: they differ in length (16, 32)"), std::string::npos)
      << text;
}

TEST(StudyResults, ArmsOnOtherTasksOfATnpAreComparedInTheirTimesOnly) {
  const TemporaryFolder root;
  for (const bool loss : {true, false}) {
    Plan plan = small_plan();
    plan.metric = loss ? "eval_nll" : "ms_per_step", plan.higher = false, plan.seeds = {1, 2};
    Folder folder = Folder::begin(root / (loss ? "loss" : "time"), plan);
    for (const Cell& cell : cells_of(plan)) {
      const train::RunFolder run = train::RunFolder::create(folder.cells(), cell.name);
      run.write_settings({{"model", "tnp"}, {"job", {{"context", cell.arm == "half" ? 32 : 64}}}});
      run.append({40, {{"loss", 1}, {"eval_nll", double(cell.seed)}, {"ms_per_step", double(cell.seed)}}});
      folder.set(cell, {.status = CellStatus::finished, .reason = {}, .attempts = 1, .flags = cell.flags});
    }
    const Comparison half = collect(folder).families.front()[1];
    EXPECT_EQ(half.incomparable, loss ? "context points (64, 32)" : "");
  }
}

TEST(StudyResults, TheBestRateIsOfEachArmAndTheMeanIsOverAllTasks) {
  const TemporaryFolder root;
  Plan plan = small_plan();
  plan.seeds = {1, 2};
  plan.tasks = {{"a", {}}, {"b", {}}};
  plan.rates = {"0.1", "0.2"};
  std::map<std::string, double> scores;
  for (const Cell& cell : cells_of(plan))
    scores[cell.name] = (cell.task == "a" ? 0.5 : 0.7) + 0.01 * double(cell.seed) +
                        ((cell.arm == "dense") == (cell.rate == "0.1") ? 0.1 : 0.0);
  scores.erase("half,b,lr-0.2,seed-2");
  const Results results = collect(fake_study(root / "s", plan, scores));
  // Two rates and the best of them on each task, and over the tasks.
  ASSERT_EQ(results.families.size(), 7u);
  const auto& best = results.families[2];
  EXPECT_TRUE(best[0].best_rate);
  EXPECT_EQ(best[0].rate, "0.1");
  EXPECT_EQ(best[1].rate, "0.2");
  // On b the better rate has one seed only, so that with two is taken.
  EXPECT_EQ(results.families[5][1].rate, "0.1");
  const auto& all = results.families[6];
  EXPECT_TRUE(all[0].over_tasks);
  EXPECT_NEAR(all[0].score.mean, (0.615 + 0.815) / 2, 1e-12);
  EXPECT_NEAR(all[1].difference->mean, (0.0 - 0.1) / 2, 1e-12);
  write_report(root / "s", results);
  EXPECT_NE(get(root / "s/comparisons.csv").find("mean of all,,1,half,2,"), std::string::npos);
}

/// A program in the place of `tessera`: a shell script, which finds the words after "train" in "$@".
std::string program_of(const fs::path& path, const std::string& script) {
  put(path, "#!/bin/sh\n" + script);
  fs::permissions(path, fs::perms::owner_all);
  return path.string();
}

/// Its run folder, from --runs and --name.
constexpr const char* kMakeRun =
    "while [ $# -gt 0 ]; do case $1 in --runs) runs=$2;; --name) name=$2;; esac; shift; done\n"
    "mkdir -p \"$runs/$name\"\n"
    "echo '{\"model\": \"tnp\"}' > \"$runs/$name/run.json\"\n"
    "echo '{\"step\": 4, \"loss\": 1, \"eval_score\": 0.5}' > \"$runs/$name/metrics.jsonl\"\n";

TEST(StudyRun, ACrashIsThatOfOneCell) {
  const TemporaryFolder root;
  Folder folder = Folder::begin(root / "s", small_plan());
  const std::string program =
      program_of(root / "program", "case \"$*\" in *50%*) kill -SEGV $$;; esac\n" + std::string(kMakeRun));
  std::string said;
  const End end =
      run_cells(folder, {.program = program, .say = [&](const std::string& text) { said += text; }});
  EXPECT_EQ(end.cells, 6);
  EXPECT_EQ(end.finished, 3);
  EXPECT_EQ(end.failed, 3);
  EXPECT_EQ(end.signal, 0);
  EXPECT_NE(end.failure.find("half,seed-1: crashed: signal 11"), std::string::npos) << end.failure;
  EXPECT_NE(said.find("dense,seed-3  eval_score 0.5000"), std::string::npos) << said;
  const Cell cell = cells_of(folder.plan())[1];
  EXPECT_EQ(folder.record_of(cell).status, CellStatus::failed);
  EXPECT_EQ(folder.record_of(cell).attempts, 1);
  EXPECT_EQ(Folder::open(root / "s").record_of(cell).reason, folder.record_of(cell).reason);
}

// The study was killed, and its last cell still saves: that cell would fail by the lock of its folder.
TEST(StudyRun, DoesNotBeginWhileACellOfAKilledCallRuns) {
  const TemporaryFolder root;
  const Plan plan = small_plan();
  const Cell cell = cells_of(plan)[1];
  {
    Folder folder = Folder::begin(root / "s", plan);
    fake_run(folder.cells(), cell.name, 0.1, 0.2);
    folder.set(cell, {.status = CellStatus::begun, .reason = {}, .attempts = 1, .flags = cell.flags});
  }
  const std::string before = get(root / "s/study.json");
  {
    const train::FolderLock held(root / ("s/cells/" + cell.name));
    expect_parts(message_of([&] { Folder::begin(root / "s", plan); }),
                 {"half,seed-1", "an earlier call of the study", "once it has ended"});
  }
  EXPECT_EQ(get(root / "s/study.json"), before);
  EXPECT_EQ(message_of([&] { Folder::begin(root / "s", plan); }), "");
}

// A study that was killed before it could note the end of its cell; --patience ended that one.
TEST(StudyRun, ACellThatEndedEarlyIsFinished) {
  const TemporaryFolder root;
  Plan plan = small_plan();
  plan.arms.resize(1), plan.seeds = {1}, plan.metric = "eval_nll", plan.higher = false;
  Folder folder = Folder::begin(root / "s", plan);
  const Cell cell = cells_of(plan).front();
  const train::RunFolder run = train::RunFolder::create(folder.cells(), cell.name);
  run.write_settings({{"model", "gpt"}, {"job", {{"steps", 40}}}, {"options", {{"patience", 2}}}});
  for (const int64_t step : {10, 20, 30})
    run.append({step, {{"loss", 1}, {"ms_per_step", 1}, {"eval_nll", 1 + 0.1 * double(step)}}});
  folder.set(cell, {.status = CellStatus::begun, .reason = {}, .attempts = 1, .flags = cell.flags});
  const Request request{.program = program_of(root / "program", "exit 1")};
  EXPECT_EQ(run_cells(folder, request).failed, 1);  // it has not written its page
  put(run.path() / "report.html", "page");
  folder.set(cell, {.status = CellStatus::begun, .reason = {}, .attempts = 1, .flags = cell.flags});
  const End end = run_cells(folder, request);
  EXPECT_EQ(end.finished, 1);
  EXPECT_EQ(end.failed, 0);
}

// Its run says that it has finished, and fails if it is to be continued.
TEST(StudyRun, ACellThatIsStoppedAfterItsEndIsFinished) {
  const TemporaryFolder root;
  Plan plan = small_plan();
  plan.arms.resize(1), plan.seeds = {1}, plan.metric = "eval_nll", plan.higher = false;
  Folder folder = Folder::begin(root / "s", plan);
  const std::string at_its_end =
      std::string(kMakeRun) +
      "echo '{\"model\": \"gpt\", \"options\": {\"patience\": 1}}' > \"$runs/$name/run.json\"\n"
      "echo '{\"step\": 4, \"loss\": 1, \"eval_nll\": 1}' > \"$runs/$name/metrics.jsonl\"\n"
      "echo '{\"step\": 8, \"loss\": 1, \"eval_nll\": 2}' >> \"$runs/$name/metrics.jsonl\"\n"
      "mkdir \"$runs/$name/checkpoints\"\ntouch \"$runs/$name/report.html\"\nkill -TERM $$\n";
  const End end = run_cells(folder, {.program = program_of(root / "program", at_its_end)});
  EXPECT_EQ(end.signal, SIGTERM);
  EXPECT_EQ(end.finished, 1);
  const Cell cell = cells_of(plan).front();
  for (const CellStatus noted :
       {CellStatus::interrupted, CellStatus::failed}) {  // by a call that did not look
    folder.set(cell, {.status = noted, .reason = "r", .attempts = 1, .flags = cell.flags});
    const End again = run_cells(folder, {.program = program_of(root / "program", "exit 1")});
    EXPECT_EQ(again.finished, 1);
    EXPECT_EQ(again.failed, 0);
    EXPECT_EQ(folder.record_of(cell).reason, "");
  }
}

TEST(StudyRun, TheReasonIsTheLastErrorOfTheLog) {
  const TemporaryFolder root;
  Plan plan = small_plan();
  plan.arms.resize(1), plan.seeds = {1};
  const auto failure_of = [&](const std::string& script) {
    Folder folder = Folder::begin(root / "s", plan);
    return run_cells(folder, {.program = program_of(root / "program", script)});
  };
  EXPECT_EQ(failure_of("echo 'tessera: warning: w' >&2; echo 'tessera: no data' >&2; echo x; exit 1").failure,
            "dense,seed-1: no data");
  EXPECT_EQ(failure_of("exit 3").failure, "dense,seed-1: ended with status 3");
  EXPECT_NE(failure_of("kill -KILL $$").failure.find("possibly out of memory"), std::string::npos);
  EXPECT_EQ(failure_of("echo 'tessera: --rows: bad' >&2; exit 2").refused, "arm \"dense\": --rows: bad");
  // A run that another process stops ends the study as if the signal had come to it.
  const End stopped = failure_of("kill -TERM $$");
  EXPECT_EQ(stopped.signal, SIGTERM);
  EXPECT_EQ(stopped.failed, 0);
  EXPECT_EQ(failure_of(kMakeRun).finished, 1);
}

TEST(StudyRun, TheEnvironmentDividesTheProcessorsAmongJobs) {
  const TemporaryFolder root;
  const std::string program =
      program_of(root / "program", "echo \"threads $TESSERA_THREADS\"\n" + std::string(kMakeRun));
  const auto threads = [&](const char* folder_name, int64_t jobs) {
    Folder folder = Folder::begin(root / folder_name, small_plan());
    run_cells(folder, {.program = program, .jobs = jobs});
    return root.get(std::string(folder_name) + "/logs/dense,seed-1.log");
  };
  const char* const before = std::getenv("TESSERA_THREADS");
  const std::string kept = before ? before : "";
  ::unsetenv("TESSERA_THREADS");
  EXPECT_EQ(threads("one", 1), "threads \n");
  EXPECT_EQ(threads("many", 1024), "threads 1\n");
  ::setenv("TESSERA_THREADS", "3", 1);
  EXPECT_EQ(threads("set", 1024), "threads 3\n");
  before ? ::setenv("TESSERA_THREADS", kept.c_str(), 1) : ::unsetenv("TESSERA_THREADS");
}

TEST(StudyRun, TheCellsTakeTurnsOnTheGpus) {
  const TemporaryFolder root;
  const std::string program =
      program_of(root / "program", "echo \"GPU $CUDA_VISIBLE_DEVICES\"\n" + std::string(kMakeRun));
  Folder folder = Folder::begin(root / "study", small_plan());
  const std::vector<Cell> cells = cells_of(small_plan());
  ASSERT_GE(cells.size(), 2u);
  run_cells(folder,
            {.program = program, .jobs = 2, .gpus = {"4", "GPU-7"}});  // both start before one is waited for
  EXPECT_EQ(get(folder.log_of(cells[0])), "GPU 4\n");
  EXPECT_EQ(get(folder.log_of(cells[1])), "GPU GPU-7\n");
}

}  // namespace
}  // namespace tessera::study
