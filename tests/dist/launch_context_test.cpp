#if defined(TESSERA_PROGRAM)  // a build without the command has nothing to launch
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <sstream>

#include "tests/dist/launched_train.h"
#include "tests/errors.h"

// `tessera train tnp --context-parallel`, between processes: the losses of one rank, its files, and how a run
// goes on.

namespace tessera::dist::test {
namespace {

// 7 context points and 5 targets: no number of ranks here divides either.
const std::string kTask =
    "tnp --device cpu --d-model 16 --d-ff 12 --n-head 4 --layers 2 --emb-hidden 8 --components 2 --m 7 --n 5 "
    "--batch-size 2 --eval-tasks 3 --quiet --warmup 0 --schedule constant";

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}
std::vector<std::string> metrics(const TemporaryFolder& folder, const std::string& run) {
  return lines_of(folder.get("runs/" + run + "/metrics.jsonl"));
}
/// A number of a line of JSON; NaN, which nothing is near to, if there is none.
double number(const std::string& line, const std::string& key) {
  const size_t at = line.find("\"" + key + "\":");
  return at == std::string::npos ? NAN : std::strtod(line.c_str() + at + key.size() + 3, nullptr);
}

TEST(LaunchContext, HasTheLossesOfOneRankWhateverTheSplit) {
  const TemporaryFolder folder;
  const std::string line = kTask + " --steps 20 --log-every 1 --runs " + folder / "runs" + " --accumulate 2";
  train_to_end(folder, 1, line + " --name one");
  train_to_end(folder, 2, line + " --name rows --context-parallel 2");
  train_to_end(folder, 2, line + " --name heads --context-parallel 2 --context-split heads");
  train_to_end(folder, 4, line + " --name four --context-parallel 4");
  const Said mesh = train_to_end(folder, 4, line + " --name mesh --context-parallel 2 --zero 1");
  expect_parts(mesh.out, {"2 share each task", "M=4 N=3"});
  const std::vector<std::string> one = metrics(folder, "one");
  ASSERT_EQ(one.size(), 20u);
  for (const char* run : {"rows", "heads", "four", "mesh"}) {
    const std::vector<std::string> split = metrics(folder, run);
    ASSERT_EQ(split.size(), 20u) << run;
    for (size_t i = 0; i < 20; ++i)
      EXPECT_NEAR(number(split[i], "loss"), number(one[i], "loss"), 1e-5) << run << " step " << i + 1;
    EXPECT_NEAR(number(split[19], "eval_nll"), number(one[19], "eval_nll"), 1e-4) << run;
    EXPECT_FALSE(checkpoint(folder, run, 20).empty()) << run;
  }
  EXPECT_EQ(number(folder.get("runs/heads/run.json"), "context_parallel"), 2);
  EXPECT_NE(folder.get("runs/heads/run.json").find("\"heads\""), std::string::npos);
  EXPECT_EQ(folder.get("runs/one/run.json").find("context_split"), std::string::npos);
}

TEST(LaunchContext, GoesOnToTheBitsOfARunThatNeverStoppedOrWithAnotherSplitWhereItIsTold) {
  const TemporaryFolder folder;
  const std::string flags = kTask + " --runs " + folder / "runs" + " --log-every 1";
  train_to_end(folder, 2, flags + " --context-parallel 2 --steps 9 --name whole");
  train_to_end(folder, 2, flags + " --context-parallel 2 --steps 3 --name parts");
  const std::string again = "tnp --device cpu --quiet --resume " + folder / "runs/parts";
  train_to_end(folder, 2, again + " --steps 6");  // with the split that it was begun with
  train_to_end(folder, 2, again + " --steps 9");
  EXPECT_FALSE(checkpoint(folder, "whole", 9).empty());
  EXPECT_TRUE(checkpoint(folder, "whole", 9) == checkpoint(folder, "parts", 9));
  const Said refused = train(folder, 1, again + " --steps 12");
  EXPECT_EQ(refused.end.code, 1);
  expect_parts(refused.err, {"--context-parallel 2 on 1 rank", "another --context-parallel"});
  train_to_end(folder, 1, again + " --steps 12 --context-parallel 1");
  train_to_end(folder, 4, again + " --steps 15 --context-parallel 4 --context-split heads");
  train_to_end(folder, 2, "tnp --device cpu --quiet --resume " + folder / "runs/whole" + " --steps 15");
  const std::vector<std::string> changed = metrics(folder, "parts"), straight = metrics(folder, "whole");
  ASSERT_EQ(changed.size(), straight.size());
  for (size_t i = 0; i < straight.size(); ++i)
    EXPECT_NEAR(number(changed[i], "loss"), number(straight[i], "loss"), 1e-5) << "step " << i + 1;
}

TEST(LaunchContext, RefusesWhatCannotBeShared) {
  const TemporaryFolder folder;
  const auto refuses = [&](int ranks, const std::string& flags, int code,
                           std::initializer_list<const char*> parts) {
    expect_refused(folder, ranks, kTask + " --steps 2 --runs " + folder / "runs " + flags, code, parts);
  };
  refuses(2, "--context-parallel 3", 1, {"--context-parallel 3 on 2 ranks", "must divide"});
  refuses(1, "--context-parallel 2", 1, {"--context-parallel 2 on 1 rank", "tessera launch -n 2"});
  refuses(6, "--context-parallel 6", 1, {"6 ranks cannot share 5 targets (--n)"});
  refuses(3, "--context-parallel 3 --context-split heads", 1, {"3 ranks do not divide 4 attention heads"});
  refuses(2, "--context-parallel 2 --order global", 1, {"--order global", "Leave --order out"});
  refuses(2, "--context-parallel 2 --bucket-mb 1", 1, {"--bucket-mb", "leave"});
  refuses(2, "--context-parallel 2 --find-max-batch", 1, {"--find-max-batch"});
  refuses(2, "--context-parallel 0", 2, {"--context-parallel"});
  refuses(2, "--context-parallel 2 --context-split columns", 2, {"--context-split", "columns"});
}

TEST(LaunchContext, BenchesStepsOfAllRanksTogether) {
  const TemporaryFolder folder;
  const std::string line =
      "bench step tnp --device cpu --d-model 16 --d-ff 12 --n-head 4 --layers 2 --emb-hidden 8 "
      "--components 2 --m 7 --n 5 --batch-size 2 --seconds 0.01 --json " +
      folder / "steps.jsonl";
  for (const char* flags : {" --context-parallel 2 --context-split heads", ""}) {
    const Said said = launched(folder, {.ranks = 2, .command = tessera(line + flags)});
    EXPECT_EQ(said.end.code, 0) << said.err << said.end.cause;
  }
  const std::vector<std::string> records = lines_of(folder.get("steps.jsonl"));
  ASSERT_EQ(records.size(), 2u);
  for (const std::string& record : records) {
    EXPECT_EQ(number(record.substr(record.find("\"shape\"")), "ranks"), 2) << record;
    EXPECT_GT(number(record, "tokens_per_s"), 0);
  }
  EXPECT_EQ(number(records[0], "context_parallel"), 2);
  EXPECT_NE(records[0].find("\"split\":\"heads\""), std::string::npos);
  EXPECT_EQ(number(records[1], "flops"), 2 * number(records[0], "flops"));  // two tasks instead of one
  EXPECT_LT(number(records[0], "planned_bytes"), number(records[1], "planned_bytes"));
  const Said refused = launched(folder, {.ranks = 2, .command = tessera(line + " --context-parallel 3")});
  EXPECT_EQ(refused.end.code, 1);
  expect_parts(refused.err, {"--context-parallel 3 on 2 ranks"});
}

}  // namespace
}  // namespace tessera::dist::test
#endif
