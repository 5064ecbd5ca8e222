#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/cli/command.h"
#include "tests/place.h"

#if defined(TESSERA_WITH_SQLITE)
#include <sqlite3.h>
#endif

// `tessera study` as a user meets it: run, stopped, killed, continued; cells that fail; files that are wrong.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

const std::string kTinyFlags =
    "[flags]\ndevice = \"cpu\"\nd-model = 8\nd-ff = 8\nn-head = 1\nlayers = 1\nemb-hidden = 8\ncomponents = "
    "2\n"
    "m = 4\nn = 4\nbatch-size = 2\neval-tasks = 4\nwarmup = 2\n";
const std::string kHead = "command = \"tnp\"\nseeds = [1, 2]\n";
const std::string kArms = "[[arm]]\nname = \"adamw\"\n[[arm]]\nname = \"sgd\"\noptimizer = \"sgd\"\n";

std::string plan_of(int steps, const std::string& head = kHead, const std::string& arms = kArms) {
  return head + kTinyFlags + "steps = " + std::to_string(steps) +
         "\neval-every = " + std::to_string(steps / 4) + "\n" + arms;
}

/// The files whose bytes depend on the plan alone.
void expect_same_results(const Workplace& at, const std::string& a, const std::string& b) {
  for (const char* file : {"cells.csv", "curves.csv", "comparisons.csv", "results.json"}) {
    EXPECT_NE(at.get(a + "/" + file), "") << file;
    EXPECT_EQ(at.get(a + "/" + file), at.get(b + "/" + file)) << file;
  }
}

TEST(Study, ComparesArmsBySeedAndWritesEverything) {
  const Workplace at;
  at.put("s.toml", plan_of(20));
  const std::string out = said(at, "study run s.toml");
  EXPECT_TRUE(holds_all(out, "[1/4] adamw,seed-1|[4/4] sgd,seed-2|eval_nll|baseline|report: "));
  const json results = json::parse(at.get("runs/s/results.json"));
  ASSERT_EQ(results.at("cells").size(), 4u);
  // The score is the last evaluation of the cell's own run folder.
  const std::string metrics = at.get("runs/s/cells/sgd,seed-2/metrics.jsonl");
  const std::string last = metrics.substr(metrics.rfind("\n", metrics.size() - 2) + 1);
  EXPECT_EQ(results["cells"][3].at("arm"), "sgd");
  EXPECT_EQ(results["cells"][3].at("score"), json::parse(last).at("eval_nll"));
  EXPECT_EQ(results["cells"][3].at("steps"), 20);
  // The difference is paired by seed.
  const auto score = [&](size_t i) { return results["cells"][i].at("score").get<double>(); };
  const json& sgd = results.at("comparisons").at(1);
  EXPECT_NEAR(sgd.at("difference").get<double>(), (score(1) - score(0) + score(3) - score(2)) / 2, 1e-12);
  for (const json& time : json::parse(at.get("runs/s/times.json")).at("times")) {
    EXPECT_GT(time.at("ms_per_step").get<double>(), 0);
    EXPECT_EQ(time.at("measured_in"), "cells that ran alone");
  }
  const std::string page = at.get("runs/s/report.html");
  EXPECT_TRUE(holds_all(page, "adamw|sgd|over training time|paired by seed|--optimizer sgd"));
  EXPECT_EQ(page.find("http://"), std::string::npos);  // self-contained
#if defined(TESSERA_WITH_SQLITE)
  sqlite3* handle = nullptr;
  ASSERT_EQ(sqlite3_open((at / "runs/s/study.sqlite").c_str(), &handle), SQLITE_OK);
  std::string count;
  sqlite3_exec(
      handle, "SELECT count(*) FROM cells WHERE status = 'finished' AND score IS NOT NULL",
      [](void* to, int, char** values, char**) { return *static_cast<std::string*>(to) = values[0], 0; },
      &count, nullptr);
  sqlite3_close(handle);
  EXPECT_EQ(count, "4");
  EXPECT_TRUE(fs::exists(at / "runs/s/cells/runs.sqlite"));
#endif
}

TEST(Study, AFinishedStudyRunsNothingAndGrowsByWhatIsAdded) {
  const Workplace at;
  at.put("s.toml", plan_of(8));
  said(at, "study run s.toml --out a");
  const std::string before = at.get("a/results.json");
  const std::string again = said(at, "study run s.toml --out a");
  EXPECT_EQ(again.find("[4/4]"), std::string::npos) << again;
  EXPECT_EQ(at.get("a/results.json"), before);
  EXPECT_TRUE(holds_all(said(at, "study page a"), "adamw|report: "));
  EXPECT_EQ(at.get("a/results.json"), before);
  at.put("s.toml", plan_of(8, "command = \"tnp\"\nseeds = [1, 2, 3]\n",
                           kArms + "[[arm]]\nname = \"muon\"\noptimizer = \"muon\"\n"));
  const std::string listed = said(at, "study run s.toml --out a --list");
  EXPECT_TRUE(holds_all(listed, "finished     tessera train tnp --resume|pending      tessera train tnp"));
  const std::string grown = said(at, "study run s.toml --out a");
  EXPECT_TRUE(holds_all(grown, "[5/9] muon,seed-1|[9/9] muon,seed-3"));
  at.put("t.toml", at.get("s.toml"));
  said(at, "study run t.toml --out b");
  json a = json::parse(at.get("a/results.json")), b = json::parse(at.get("b/results.json"));
  EXPECT_EQ(a.at("cells"), b.at("cells"));
  EXPECT_EQ(a.at("comparisons"), b.at("comparisons"));
}

TEST(Study, InterruptedKilledOrOutOfTimeItGoesOnToTheSameBytes) {
  const Workplace at;
  at.put("s.toml", plan_of(1200));
  said(at, "study run s.toml --out whole");
  const auto begun = [&](const std::string& folder, const char* cell) {
    return [&at, file = folder + "/cells/" + cell + "/metrics.jsonl"] { return !at.get(file).empty(); };
  };
  {
    Process process(at, words_of("study run s.toml --out parts"));
    ASSERT_TRUE(wait_for(process, begun("parts", "adamw,seed-1")));
    process.send(SIGINT);
    const Outcome outcome = process.wait();
    EXPECT_EQ(outcome.code, 130) << outcome.err;
    EXPECT_TRUE(
        holds_all(outcome.out,
                  "stopped and saved|interrupted after|To continue:|tessera study run s.toml --out parts"));
  }
  const std::string stopped = said(at, "study run s.toml --out parts --minutes 0.0001");
  EXPECT_TRUE(holds_all(stopped, "stopped by --minutes"));
  {
    Process process(at, words_of("study run s.toml --out parts"));
    ASSERT_TRUE(wait_for(process, begun("parts", "sgd,seed-1")));
    process.send(SIGKILL);
    EXPECT_EQ(process.wait().signal, SIGKILL);
  }
  // The cell that ran then ends by itself (it gets SIGTERM); its folder is free once it has.
  Outcome outcome;
  do outcome = run(at, "study run s.toml --out parts");
  while (holds_all(outcome.err, "is still written to by a run that an earlier call of the study began"));
  expect_success(outcome);
  expect_same_results(at, "whole", "parts");
}

TEST(Study, CellsSideBySideGiveTheSameBytesAndTimesOfTheirOwn) {
  const Workplace at;
  at.put("s.toml", plan_of(40));
  said(at, "study run s.toml --out one");
  const std::string out = said(at, "study run s.toml --out two --jobs 2 --timing-steps 20");
  EXPECT_TRUE(holds_all(out, "step time  adamw,timing|step time  sgd,timing"));
  expect_same_results(at, "one", "two");
  for (const json& time : json::parse(at.get("two/times.json")).at("times"))
    EXPECT_EQ(time.at("measured_in"), "a run of its own");
  EXPECT_EQ(json::parse(at.get("two/times.json")).at("runs").at(0).at("alone"), 0);
}

TEST(Study, ACellThatFailsIsRecordedAndTheOthersFinish) {
  const Workplace at;
  at.put("s.toml",
         plan_of(40, kHead,
                 "[[arm]]\nname = \"good\"\n[[arm]]\nname = \"bad\"\nlr = 1e30\nmax-grad-norm = 0\n"));
  expect_failure(at, "study run s.toml --out s", 1,
                 "2 of 4 runs failed, first bad,seed-1: |s/logs|tries them again");
  const json cells = json::parse(at.get("s/results.json")).at("cells");
  EXPECT_EQ(cells[0].at("status"), "finished");
  EXPECT_EQ(cells[1].at("status"), "failed");
  EXPECT_TRUE(holds_all(cells[1].at("reason"), "training: |not finite")) << cells[1];
  EXPECT_EQ(cells[2].at("status"), "finished");
  EXPECT_TRUE(holds_all(at.get("s/report.html"), "Cells without a result|bad,seed-2"));
  const Outcome again = run(at, "study run s.toml --out s");
  EXPECT_EQ(again.code, 1);
  EXPECT_EQ(again.out.find("good,seed"), std::string::npos) << again.out;  // only what failed is tried again
}

TEST(Study, SeveralSeedsOfBertAreCellsOfOneSeed) {
  const Workplace at;
  expect_success(run(at, "data glue --out glue --task sst2 --train 40 --dev 12 --test 6"));
  at.put("s.toml",
         "command = \"bert\"\nseeds = [5, 7]\nlearning_rates = [1e-3, 2e-3]\n[flags]\ndata = "
         "\"glue\"\nscratch = true\n"
         "layers = 1\nd-model = 8\nn-head = 1\nd-ff = 8\nvocab-size = 300\nbatch-size = 4\nmax-length = 32\n"
         "steps = 4\ndevice = \"cpu\"\n[[task]]\nname = \"sst2\"\ntask = \"sst2\"\n[[arm]]\nname = "
         "\"plain\"\n[[arm]]\n"
         "name = \"dropout-0.3\"\ndropout = 0.3\n");
  const std::string out = said(at, "study run s.toml");
  EXPECT_TRUE(holds_all(
      out, "plain,sst2,lr-1e-3,seed-5|dropout-0.3,sst2,lr-2e-3,seed-7|eval_score|best learning rate"));
  EXPECT_TRUE(fs::exists(at / "runs/s/cells/plain,sst2,lr-1e-3,seed-5/seed-5/metrics.jsonl"));
  const json comparisons = json::parse(at.get("runs/s/results.json")).at("comparisons");
  ASSERT_EQ(comparisons.size(), 6u);  // two arms at two rates, and at the best
  EXPECT_EQ(comparisons[0].at("seeds"), 2);
}

TEST(Study, PretrainingIsMeasuredByItsLossWhereverTheTaskStands) {
  const Workplace at;
  at.put("t.txt", "some text");
  const std::string head = "command = \"bert\"\nseeds = [1]\n[flags]\ntext = \"t.txt\"\nscratch = true\n";
  for (const char* const parts :
       {"task = \"mlm\"\n[[arm]]\nname = \"x\"\n", "[[arm]]\nname = \"x\"\ntask = \"mlm\"\n",
        "[[task]]\nname = \"mlm\"\ntask = \"mlm\"\n[[arm]]\nname = \"x\"\n"}) {
    at.put("s.toml", head + parts);
    const Outcome outcome = run(at, "study run s.toml --list");
    EXPECT_EQ(outcome.code, 0) << parts << outcome.err;
  }
}

TEST(Study, FilesThatAreWrongAreRefusedBeforeAnythingRuns) {
  const Workplace at;
  const std::string flags = kTinyFlags + "steps = 4\n", arms = kArms;
  const auto bad = [&](const std::string& text, const char* says) {
    at.put("bad.toml", text);
    const Outcome outcome =
        expect_failure(at, "study run bad.toml --out out", 2, std::string("bad.toml:|") + says);
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.out, "") << text;
    EXPECT_FALSE(fs::exists(at / "out")) << text;
  };
  bad(flags + arms, "command is missing|tnp");
  bad("command = \"tpn\"\nseeds = [1]\n" + flags + arms, "command is \"tpn\"|did you mean tnp?");
  bad("seed = 1\n" + kHead + flags + arms, "\"seed\": expected one of|seeds");
  bad(kHead + flags, "there are no arms|[[arm]]");
  bad(kHead + flags + arms + "[[arm]]\nname = \"sgd\"\n", "arm \"sgd\" is given twice");
  bad("baseline = \"dense\"\n" + kHead + flags + arms, "baseline is \"dense\"|adamw, sgd");
  bad("command = \"tnp\"\n" + flags + arms, "there are no seeds");
  bad("command = \"tnp\"\nseeds = []\n" + flags + arms, "there are no seeds");
  bad("command = \"tnp\"\nseeds = [1, 18446744073709551615]\n" + flags + arms,
      "bad.toml:2: not valid TOML|18446744073709551615");
  bad("command = \"tnp\"\nseeds = [1, 9223372036854775807]\n" + flags + arms,
      "bad.toml:2: seeds: 9223372036854775807 is too large");
  bad("command = \"tnp\"\nseeds = [1, \"two\"]\n" + flags + arms, "bad.toml:2: seeds: \"two\"");
  bad("command = \"tnp\"\nseeds = [-1]\n" + flags + arms, "seeds: \"-1\"");
  bad("command = \"tnp\"\nseeds = [1, 2, 1]\n" + flags + arms, "seed 1 is given twice");
  bad(kHead + flags + arms + "[[arm]]\nname = \"x\"\noptimiser = \"sgd\"\n",
      "arm \"x\"|\"optimiser\" is not a flag of tessera train tnp|did you mean optimizer?");
  bad(kHead + flags + "stpes = 3\n" + arms, "[flags]|\"stpes\" is not a flag|did you mean steps?");
  bad(kHead + flags + arms + "[[arm]]\nname = \"x\"\nlayers = \"many\"\n", "arm \"x\"|--layers|many");
  bad(kHead + flags + arms + "[[arm]]\nname = \"x\"\nlayers = 0\n", "arm \"x\"|--layers|range");
  bad(kHead + flags + arms + "[[arm]]\nname = \"x\"\noptimizer = \"adam\"\n", "arm \"x\"|--optimizer|adam");
  bad(kHead + flags + "seed = 3\n" + arms, "--seed is set by the study");
  bad(kHead + flags + "resume = \"r\"\n" + arms, "--resume is set by the study");
  bad("learning_rates = [0.1]\n" + kHead + flags + "lr = 0.2\n" + arms,
      "gives lr, and so does learning_rates");
  bad("learning_rates = [\"fast\"]\n" + kHead + flags + arms, "learning_rates: \"fast\"");
  bad("learning_rates = [-0.1]\n" + kHead + flags + arms, "learning_rates: \"-0.1\"");
  bad("learning_rates = [0.1, 1e-1]\n" + kHead + flags + arms, "learning_rates: 1e-1 is given twice");
  bad(kHead + flags + arms + "[[arm]]\noptimizer = \"sgd\"\n", "an [[arm]] has no name");
  bad(kHead + flags + "[[arm]]\nname = \"a/b\"\n", "arm \"a/b\"|folder");
  bad(kHead + flags + "[[arm]]\nname = \"..\"\n", "arm \"..\"|folder");
  bad(kHead + flags + arms + "[[tasks]]\nname = \"x\"\n", "section [tasks]|did you mean task?");
  bad(kHead + flags + "[arm.x]\nlr = 1\n", "section [arm.x]");
  bad(kHead + flags + arms + "[[task]]\nname = \"x\"\n[[task]]\nname = \"x\"\n", "task \"x\" is given twice");
  bad(kHead + flags + "[[arm]]\nname = \"x\"\nlr = 1\nclip = 1\nlr = 2\n", "not valid TOML|lr");
  bad(kHead + flags + "[[arm]]\nname = \"x\"\ncheck-finite = 3\n", "arm \"x\"|expected true or false");
  bad("metric = \"eval_score\"\n" + kHead + flags + arms, "metric is \"eval_score\"|does not log|eval_nll");
  bad("metric = \"eval_nl\"\n" + kHead + flags + arms, "did you mean eval_nll?");
  bad("metric = \"grad_nrm\"\n" + kHead + flags + arms, "does not log|such as loss|did you mean grad_norm?");
  bad("metric = \"flip_rate\"\n" + kHead + flags + arms, "train tnp does not log");
  bad("better = \"up\"\n" + kHead + flags + arms, "better is \"up\"");
  bad(kHead + flags + "prior = linear rbf\n" + arms, "not valid TOML");
  bad(kHead + flags + "prior = [\"linear\", \"rbf\"]\n" + arms, "\"prior\": expected one value");
  bad(kHead + flags + arms + "seeds = [1]\n", "\"seeds\"|before the first section");
}

TEST(Study, CostsAreBetterIfLower) {
  for (const auto& [metric, better] :
       {std::pair("ms_per_step", "lower"), std::pair("peak_gib", "lower"),
        std::pair("skipped_steps", "lower"), std::pair("tokens_per_s", "higher")}) {
    const Workplace at;
    at.put("s.toml", "command = \"tnp\"\nseeds = [1]\nmetric = \"" + std::string(metric) + "\"\n" +
                         kTinyFlags + "steps = 1\n[[arm]]\nname = \"x\"\n");
    run(at, "study run s.toml");
    EXPECT_TRUE(holds_all(at.get("runs/s/study.json"), std::string("\"better\": \"") + better)) << metric;
  }
}

TEST(Study, FilesAreReadAsToml) {
  const Workplace at;
  at.put("s.toml",
         "title = \"a # b\" # c\ncommand = 'tnp'\nseeds = [ 1, # one\n  0x2 ]\nlearning_rates = [+1e-3, "
         "0.10]\n" +
             kTinyFlags + "[[arm]] # first\nname = \"x\\u0031\"\n");
  EXPECT_TRUE(
      holds_all(said(at, "study run s.toml --list"), "x1,lr-1e-3,seed-1|x1,lr-0.10,seed-2|--lr 0.10 "));
}

/// The names in cli/study_file.cpp are those of the runs.
TEST(Study, TakesAllThatRunsLogAsItsMetric) {
  const Workplace at;
  std::string text;
  for (int i = 0; i < 300; ++i) text += "word" + std::to_string(i * i % 17) + (i % 9 ? " " : ".\n");
  at.put("t.txt", text);
  said(at, "train tnp --steps 2 --eval-every 1 --quiet --name tnp" + kTiny);
  said(at,
       "train llama --text t.txt --layers 1 --d-model 16 --heads 2 --d-ff 32 --length 16 --batch-size 2 "
       "--steps "
       "2 --eval-every 1 --ffn relu2 --activation-l1 0.01 --sparse24 naive --weights-24 attn --device cpu "
       "--quiet --name llama");
  for (const std::string command : {"tnp", "llama"}) {
    std::set<std::string> logged;
    for (const json& values : metrics_of(at, "runs/" + command))
      for (const auto& [name, value] : values.items()) logged.insert(name);
    logged.erase("step");
    EXPECT_GE(logged.size(), command == "tnp" ? 12u : 21u);
    for (const std::string& name : logged) {
      at.put("m.toml", "command = \"" + command + "\"\nseeds = [1]\nmetric = \"" + name +
                           "\"\n[flags]\nsteps = 2\n" + (command == "llama" ? "text = \"t.txt\"\n" : "") +
                           "[[arm]]\nname = \"x\"\n");
      const Outcome outcome = run(at, "study run m.toml --list");
      EXPECT_EQ(outcome.code, 0) << name << ": " << outcome.err;
    }
  }
}

TEST(Study, FoldersAndCommandsThatAreWrong) {
  const Workplace at;
  at.put("s.toml", plan_of(4));
  said(at, "study run s.toml --out a");
  at.put("other.toml", plan_of(4, kHead, "[[arm]]\nname = \"mine\"\n"));
  at.put("changed.toml",
         plan_of(4, kHead,
                 "[[arm]]\nname = \"adamw\"\nlr = 0.5\n[[arm]]\nname = \"sgd\"\noptimizer = \"sgd\"\n"));
  at.put("full/file", "x");
  at.put("damaged/study.json", "{\"format\": 1, \"plan\": {}}");
  at.put("text/study.json", "no JSON");
  expect_failures(
      at,
      {{"study", 2, "subcommand|run, page"},
       {"study run", 2, "file"},
       {"study run none.toml", 1, "none.toml"},
       {"study run s.toml --job 2", 2, "unknown flag --job|--jobs"},
       {"study run s.toml --jobs 0", 2, "--jobs"},
       {"study run s.toml --gpus 0,1,0", 2, "--gpus: 0 is given twice"},
       {"study run s.toml --gpus 0,,1", 2, "--gpus"},
       {"study run s.toml --minutes nan", 2, "--minutes"},
       {"study run s.toml --minutes -1", 2, "--minutes"},
       {"study run s.toml --out full", 1, "full|holds no study.json|--out"},
       {"study run s.toml --out full/file", 1, "cannot create the folder full/file"},
       {"study run s.toml --out /proc/none/x", 1, "cannot create the folder /proc/none"},
       {"study run other.toml --out a", 1, "a has the run adamw,seed-1|another study's folder"},
       {"study run changed.toml --out a", 1, "adamw,seed-1 ran without --lr, the study has it with --lr 0.5"},
       {"study run s.toml --out damaged", 1, "damaged/study.json"},
       {"study run s.toml --out text", 1, "text/study.json"},
       {"study page none", 1, "none holds no study.json"},
       {"study page damaged", 1, "damaged/study.json"},
       {"study page", 2, "folder"}});
  at.put("text", "some text");
  at.put("inputs.toml",
         "command = \"gpt\"\nseeds = [1]\n[flags]\ntext = [\"text\"]\n[[arm]]\nname = \"x\"\n[[arm]]\nname = "
         "\"y\"\ntokenizer = \"none.json\"\n");
  expect_failures(at, {{"study run inputs.toml --out inputs", 1,
                        "inputs.toml: arm \"y\": --tokenizer none.json: there is no such file"}});
  EXPECT_FALSE(fs::exists(at / "inputs"));
  // What only the command itself can tell ends the study with its first cell.
  at.put("bert.toml",
         "command = \"bert\"\nseeds = [1, 2]\n[[arm]]\nname = \"x\"\npad = true\npacked = true\n");
  expect_failure(at, "study run bert.toml", 2, "bert.toml: arm \"x\": train bert: --task is required");
  at.put("metric.toml", plan_of(4, kHead + "metric = \"loss_scale\"\n"));  // which f16 alone has
  expect_failure(at, "study run metric.toml", 2, "metric is \"loss_scale\"|did not log|eval_nll");
  const std::string cells = said(at, "study run metric.toml --list");
  EXPECT_EQ(run(at, "study run metric.toml").code, 2);
  EXPECT_EQ(said(at, "study run metric.toml --list"), cells) << "another cell was run for nothing";
}

/// A file of studies/.
std::string study_of_repository(const std::string& name) {
  std::ifstream in(tessera::test::place("TESSERA_TEST_DATA", TESSERA_TEST_DATA) + "/../studies/" + name);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Study, TheCommandLinesOfTheRepositorysStudiesAreUnderstood) {
  const Workplace at;
  for (const char* name : {"design", "optimizers", "training_language_models", "sparse_backward"})
    at.put("docs/" + std::string(name) + ".md", "Text.");
  for (const char* name : {"demo.toml", "glue-backward.toml", "glue-backward-confirm.toml", "low-rank.toml",
                           "low-rank-60m.toml", "sparse24.toml", "weights24.toml"}) {
    at.put(name, study_of_repository(name));
    EXPECT_TRUE(holds_all(said(at, std::string("study run --list ") + name), "pending      tessera train"))
        << name;
  }
}

TEST(SlowStudy, TheDemoOfTheRepositoryRuns) {
  const Workplace at;
  at.put("demo.toml", study_of_repository("demo.toml"));
  const std::string out = said(at, "study run demo.toml");
  EXPECT_TRUE(holds_all(out, "[18/18]|each arm at its best learning rate|muon"));
  EXPECT_TRUE(fs::exists(at / "runs/demo/report.html"));
}

}  // namespace
}  // namespace tessera::cli::test
