#if defined(TESSERA_PROGRAM)  // a build without the command has nothing to launch
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <thread>

#include "runtime/device.h"
#include "tests/dist/launched_train.h"
#include "tests/errors.h"

// Runs of `tessera train` on several ranks: the same bits on any number of them, and a clean end when one
// dies.

namespace tessera::dist::test {
namespace {

const std::string kTnp =
    " --device cpu --d-model 8 --d-ff 8 --n-head 1 --layers 2 --emb-hidden 8 --components 2 --m 4 --n 4 "
    "--batch-size 2 --eval-tasks 4 --quiet";

std::string gpt_flags(const TemporaryFolder& folder) {
  return " --device cpu --text " + folder / "text.txt" +
         " --tokenizer-kind byte --d-model 16 --n-head 2 --layers 2 --d-ff 32 --length 16 --batch-size 2 "
         "--dropout 0.1 "
         "--ngram 0 --sample-tokens 0 --eval-tokens 64 --quiet";
}

/// Runs on 1, 2 and 4 ranks that end with the same bytes.
void expect_same_end(const TemporaryFolder& folder, const std::string& model, const std::string& flags,
                     int steps) {
  const std::string line = model + flags + " --runs " + folder / "runs" +
                           " --accumulate 4 --order global --steps " + std::to_string(steps) +
                           " --warmup 2 --name ";
  for (const int ranks : {1, 2, 4}) {
    const Said said = train(folder, ranks, line + "r" + std::to_string(ranks));
    EXPECT_EQ(said.end.code, 0) << said.err << said.end.cause;
  }
  const std::string alone = checkpoint(folder, "r1", steps);
  EXPECT_FALSE(alone.empty());
  for (const char* run : {"r2", "r4"}) EXPECT_TRUE(checkpoint(folder, run, steps) == alone) << run;
}

TEST(LaunchTrain, TnpHasTheSameBitsOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  expect_same_end(folder, "tnp", kTnp, 12);
}

TEST(LaunchTrain, GptWithDropoutHasTheSameBitsOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  write_text(folder, 3000);
  expect_same_end(folder, "gpt", gpt_flags(folder), 8);
}

TEST(LaunchTrain, NoBitsDependOnBuckets) {
  const TemporaryFolder folder;
  write_text(folder, 3000);
  const std::string line = "gpt" + gpt_flags(folder) + " --runs " + folder / "runs" +
                           " --accumulate 4 --steps 6 --warmup 2 --log-every 1 --name ";
  for (const char* size : {"0", "0.001", "32"}) {
    const Said said = train(folder, 2, line + "b" + size + " --bucket-mb " + size);
    EXPECT_EQ(said.end.code, 0) << said.err << said.end.cause;
  }
  const std::string after = checkpoint(folder, "b0", 6);
  EXPECT_FALSE(after.empty());
  for (const char* run : {"b0.001", "b32"}) EXPECT_TRUE(checkpoint(folder, run, 6) == after) << run;
  EXPECT_NE(folder.get("runs/b32/metrics.jsonl").find("exposed_communication_ms"), std::string::npos);
}

TEST(LaunchTrain, SpreadStatesHaveTheSameBitsAndFiles) {
  const TemporaryFolder folder;
  write_text(folder, 3000);
  const std::string line =
      "gpt" + gpt_flags(folder) + " --runs " + folder / "runs" +
      " --accumulate 4 --order global --warmup 2 --save-every 2 --precision bf16 --name ";
  train_to_end(folder, 1, line + "alone --steps 6");
  for (const int ranks : {2, 4}) {
    const Said said = train(folder, ranks,
                            line + "z" + std::to_string(ranks) + " --steps 6 --zero " +
                                (ranks == 2 ? "2 --bucket-mb 0.001" : "1"));
    EXPECT_EQ(said.end.code, 0) << said.err << said.end.cause;
    expect_parts(said.out, {"planned a step on each rank"});
  }
  const std::string alone = checkpoint(folder, "alone", 6);
  EXPECT_FALSE(alone.empty());
  for (const char* run : {"z2", "z4"})
    for (const int step : {4, 6})
      EXPECT_TRUE(checkpoint(folder, run, step) == checkpoint(folder, "alone", step)) << run << " " << step;
  // Spread on two ranks, then whole on two, then alone, then spread on four.
  const auto go_on = [&](int ranks, const char* flags) {
    const Said said = train(folder, ranks, "gpt --device cpu --quiet --resume " + folder / "runs/z2" + flags);
    EXPECT_EQ(said.end.code, 0) << said.err;
  };
  go_on(2, " --steps 8 --zero 0"), go_on(1, " --steps 10"), go_on(4, " --steps 12 --zero 2");
  const Said straight =
      train(folder, 1, "gpt --device cpu --quiet --resume " + folder / "runs/alone" + " --steps 8");
  EXPECT_EQ(straight.end.code, 0) << straight.err;
  for (const int steps : {10, 12})
    train_to_end(
        folder, 1,
        "gpt --device cpu --quiet --resume " + folder / "runs/alone" + " --steps " + std::to_string(steps));
  EXPECT_TRUE(checkpoint(folder, "z2", 12) == checkpoint(folder, "alone", 12));
}

/// Each rank takes the gradients that columns are chosen by whole, in whatever way the run has its own.
TEST(LaunchTrain, ColumnsChosenByGradientAreThoseOfOneRank) {
  const TemporaryFolder folder;
  write_text(folder, 3000);
  const std::string line = "gpt" + gpt_flags(folder) + " --runs " + folder / "runs" +
                           " --form lost --rank 2 --column-share 0.2 --columns gradient --accumulate 2 "
                           "--order global --steps 2 --name ";
  train_to_end(folder, 1, line + "alone");
  train_to_end(folder, 2, line + "spread --zero 2 --bucket-mb 0.001");
  const std::string alone = checkpoint(folder, "alone", 2);
  EXPECT_FALSE(alone.empty());
  EXPECT_TRUE(checkpoint(folder, "spread", 2) == alone);
}

TEST(LaunchTrain, StatesInBf16HaveTheSameBitsOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  write_text(folder, 3000);
  const std::string line = "gpt" + gpt_flags(folder) + " --runs " + folder / "runs" +
                           " --accumulate 4 --order global --warmup 2 --save-every 2 --precision bf16" +
                           " --optimizer-states bf16 --name ";
  train_to_end(folder, 1, line + "alone --steps 6");
  train_to_end(folder, 2, line + "z1 --steps 6 --zero 1");
  train_to_end(folder, 2, line + "z2 --steps 6 --zero 2 --bucket-mb 0.001");
  const std::string alone = checkpoint(folder, "alone", 6);
  EXPECT_FALSE(alone.empty());
  EXPECT_EQ(alone.find("master."), std::string::npos);
  for (const char* run : {"z1", "z2"}) EXPECT_TRUE(checkpoint(folder, run, 6) == alone) << run;
  const auto go_on = [&](int ranks, const std::string& run) {
    const Said said =
        train(folder, ranks, "gpt --device cpu --quiet --steps 8 --resume " + folder / "runs/" + run);
    EXPECT_EQ(said.end.code, 0) << said.err;
  };
  go_on(1, "alone"), go_on(2, "z1 --zero 2");
  EXPECT_TRUE(checkpoint(folder, "z1", 8) == checkpoint(folder, "alone", 8));
}

/// Two ranks on the CPU that are told what the optimizer or the device cannot do.
void expect_flags_refused(const std::string& flags, std::initializer_list<const char*> parts) {
  const TemporaryFolder folder;
  const Said said = train(folder, 2, "tnp" + kTnp + " --runs " + folder / "runs" + " --steps 2 " + flags);
  EXPECT_EQ(said.end.code, 1);
  expect_parts(said.err, parts);
  EXPECT_FALSE(std::filesystem::exists(folder / "runs")) << "refused after the run had a folder";
}

TEST(LaunchTrain, WhatCannotBeSpreadIsRefused) {
  expect_flags_refused("--optimizer muon --zero 1", {"--zero 1 with --optimizer muon", "adamw or sgd"});
  expect_flags_refused("--momentum-reset 5 --zero 1",
                       {"--zero 1 with --momentum-reset 5", "--momentum-reset 0"});
}

TEST(LaunchTrain, StepsOfATimeAreFoundWithStatesThatAreSpread) {
  const TemporaryFolder folder;
  write_text(folder, 3000);
  for (const std::string stage : {"1", "2"}) {
    const Said said = train(folder, 2,
                            "gpt" + gpt_flags(folder) + " --runs " + folder / "runs" +
                                " --warmup 0 --minutes 0.0001 --name m --zero " + stage);
    EXPECT_EQ(said.end.code, 0) << said.err;
  }
}

TEST(LaunchTrain, TheSizeOfBucketsThatIsGivenIsKept) {
  const TemporaryFolder folder;
  const Said said =
      train(folder, 2, "tnp" + kTnp + " --runs " + folder / "runs" + " --steps 2 --bucket-mb 32 --name b");
  EXPECT_EQ(said.end.code, 0) << said.err;
  EXPECT_NE(folder.get("runs/b/run.json").find("\"bucket_mb\": 32"), std::string::npos);
}

TEST(LaunchTrain, CopiesBetweenGpusNeedGpus) {
  expect_flags_refused("--rank-exchange peer",
                       {"cannot be summed by copies between GPUs", "--rank-exchange communicator"});
}

const std::string kOnGpus =
    "tnp --m 16 --n 16 --batch-size 4 --d-model 64 --n-head 4 --layers 2 --d-ff 128 --steps 12 --warmup 2 "
    "--quiet --device cuda --runs ";

TEST(LaunchTrain, CopiesBetweenGpusHaveTheBitsOfOne) {
  if (Device::cuda_count() < 2) GTEST_SKIP() << "this machine has no two GPUs";
  const TemporaryFolder folder;
  const std::string line = kOnGpus + folder / "runs" + " --accumulate 4 --order global --name ";
  ASSERT_EQ(train(folder, 1, line + "alone").end.code, 0);
  for (int ranks = 2; ranks <= std::min(4, Device::cuda_count()); ranks *= 2)
    for (const std::string how : {"0", "0.05", "0.05 --graph off", "0.05 --zero 1"}) {
      fs::remove_all(folder / "runs/several");
      const Said said = train(folder, ranks, line + "several --rank-exchange peer --bucket-mb " + how);
      EXPECT_EQ(said.end.code, 0) << said.err;
      EXPECT_TRUE(checkpoint(folder, "several", 12) == checkpoint(folder, "alone", 12))
          << ranks << ' ' << how;
    }
}

TEST(LaunchTrain, CopiesBetweenThreeGpusHaveTheBitsOfNccl) {
  if (Device::cuda_count() < 3) GTEST_SKIP() << "this machine has no three GPUs";
  const TemporaryFolder folder;
  const std::string line = kOnGpus + folder / "runs" + " --order world --rank-exchange ";
  for (const std::string how : {"communicator", "peer"})
    ASSERT_EQ(train(folder, 3, line + how + " --name " + how).end.code, 0);
  EXPECT_TRUE(checkpoint(folder, "peer", 12) == checkpoint(folder, "communicator", 12));
}

TEST(LaunchTrain, StoppedOnTwoRanksGoesOnAloneAndOnTwoAgain) {
  const TemporaryFolder folder;
  const std::string flags =
      kTnp + " --runs " + folder / "runs" + " --accumulate 2 --schedule constant --warmup 0";
  train_to_end(folder, 2, "tnp" + flags + " --steps 9 --name whole");
  train_to_end(folder, 2, "tnp" + flags + " --steps 3 --name parts");
  for (const int ranks : {1, 2}) {
    const Said said = train(folder, ranks,
                            "tnp --device cpu --quiet --resume " + folder / "runs/parts" + " --steps " +
                                (ranks == 1 ? "6" : "9"));
    EXPECT_EQ(said.end.code, 0) << said.err;
  }
  EXPECT_FALSE(checkpoint(folder, "whole", 9).empty());
  // But for the number of steps the job was told first, which the file names.
  EXPECT_EQ(checkpoint(folder, "whole", 9) == checkpoint(folder, "parts", 9), true);
}

TEST(LaunchTrain, BegunAloneGoesOnOnTwoRanksAndAloneAgain) {
  const TemporaryFolder folder;
  write_text(folder, 3000);
  const std::string flags = gpt_flags(folder) + " --runs " + folder / "runs" +
                            " --accumulate 4 --order global --schedule constant --warmup 0";
  const auto go = [&](int ranks, const std::string& line) {
    const Said said = train(folder, ranks, line);
    EXPECT_EQ(said.end.code, 0) << said.err << said.end.cause;
  };
  go(1, "gpt" + flags + " --steps 6 --name whole");
  go(1, "gpt" + flags + " --steps 2 --name parts");
  go(2, "gpt --device cpu --quiet --resume " + folder / "runs/parts" + " --steps 4 --zero 1");
  go(1, "gpt --device cpu --quiet --resume " + folder / "runs/parts" + " --steps 6 --zero 0");
  EXPECT_FALSE(checkpoint(folder, "whole", 6).empty());
  EXPECT_TRUE(checkpoint(folder, "whole", 6) == checkpoint(folder, "parts", 6));
}

TEST(LaunchTrain, RefusesWhatRanksCannotShare) {
  const TemporaryFolder folder;
  const auto refuses = [&](int ranks, const std::string& line, int code,
                           std::initializer_list<const char*> parts) {
    expect_refused(folder, ranks, line + kTnp + " --runs " + folder / "runs", code, parts);
  };
  refuses(2, "tnp --accumulate 3", 1, {"--accumulate 3 micro-batches per step on 2 ranks", "multiple of 2"});
  refuses(4, "tnp --accumulate 2", 1, {"--accumulate 2", "on 4 ranks", "multiple of 4"});
  refuses(2, "tnp --accumulate 6", 1, {"3 micro-batches each", "power of two", "--order world"});
  refuses(2, "tnp --order sideways", 2, {"--order", "sideways"});
  refuses(2, "tnp --accumulate 0", 2, {"--accumulate"});
}

/// Kills a rank of a run in training as soon as `ready`, and expects what the others and the launcher say.
void expect_killed(const TemporaryFolder& folder, int dead, const std::function<bool()>& ready) {
  std::map<int, int> pids;
  std::atomic<int> target = 0;
  LaunchOptions options{.ranks = 4,
                        .command = tessera("train tnp" + kTnp + " --runs " + folder / "runs" +
                                           " --name dead --steps 1000000 --log-every 1 --save-every 5"),
                        .started = [&](int rank, int pid) {
                          pids[rank] = pid;
                          if (rank == 3) target = pids[dead];
                        }};
  std::jthread killer([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && (target == 0 || !ready())) ::usleep(1000);
    if (target != 0) ::kill(target, SIGKILL);
  });
  const Said said = launched(folder, options);
  EXPECT_EQ(said.end.code, 128 + SIGKILL) << said.err;
  const std::string name = "rank " + std::to_string(dead) + " (pid " + std::to_string(pids[dead]);
  expect_parts(said.end.cause, {name.c_str(), "was killed by signal 9"});
  EXPECT_EQ(said.end.cause.find('\n'), std::string::npos);
  for (const auto& [rank, pid] : pids) EXPECT_NE(::kill(pid, 0), 0) << "rank " << rank << " is left";
  for (int r = 0; r < 4; ++r) {
    if (r == dead) continue;
    const std::string log = folder.get("ranks/rank-" + std::to_string(r) + ".log");
    EXPECT_NE(log.find("rank " + std::to_string(dead)), std::string::npos) << "rank " << r << " says " << log;
  }
}

class LaunchKilled : public ::testing::TestWithParam<int> {};

TEST_P(LaunchKilled, InTraining) {
  const TemporaryFolder folder;
  std::mt19937 engine{unsigned(GetParam())};
  const size_t bytes = 1 + engine() % 4000;
  expect_killed(folder, GetParam() % 4, [&] { return folder.get("runs/dead/metrics.jsonl").size() > bytes; });
}

TEST_P(LaunchKilled, InASave) {
  const TemporaryFolder folder;
  expect_killed(folder, GetParam() % 4, [&] {
    std::error_code code;
    for (fs::directory_iterator at(folder / "runs/dead/checkpoints", code), end; !code && at != end;
         at.increment(code))
      if (at->path().filename().string().starts_with(".")) return true;
    return false;
  });
}

INSTANTIATE_TEST_SUITE_P(Rank, LaunchKilled, ::testing::Range(0, 5));

TEST(LaunchTrain, ARestartGoesOnToTheSameEnd) {
  const TemporaryFolder folder;
  const std::string flags =
      kTnp + " --runs " + folder / "runs" + " --steps 400 --save-every 10 --log-every 1 --name ";
  train_to_end(folder, 2, "tnp" + flags + "whole");
  std::atomic<int> victim = 0;
  std::atomic<bool> killed = false;
  LaunchOptions options{
      .ranks = 2,
      .restarts = 1,
      .command = tessera("train tnp" + flags + "again"),
      .resumed =
          [&](const std::string& run) { return tessera("train tnp --device cpu --quiet --resume " + run); },
      .started =
          [&](int rank, int pid) {
            if (rank == 1) victim = pid;
          }};
  std::jthread killer([&](const std::stop_token& stop) {
    if (await_steps(stop, folder, "again", 25)) killed = ::kill(victim, SIGKILL) == 0;
  });
  const Said said = launched(folder, options);
  EXPECT_TRUE(killed);
  EXPECT_EQ(said.end.code, 0) << said.err;
  EXPECT_EQ(said.end.restarted, 1) << said.err;
  EXPECT_FALSE(checkpoint(folder, "whole", 400).empty());
  EXPECT_TRUE(checkpoint(folder, "whole", 400) == checkpoint(folder, "again", 400));
}

TEST(LaunchTrain, AStartThatFailsTwiceInTheSameWayIsNotRepeated) {
  const TemporaryFolder folder;
  const auto command = tessera("train gpt --text " + folder / "missing.txt" + " --runs " + folder / "runs" +
                               " --device cpu --accumulate 2");
  const Said said = launched(folder, {.ranks = 2, .restarts = 5, .command = command});
  EXPECT_EQ(said.end.code, 1) << said.err;
  EXPECT_EQ(said.end.restarted, 1) << said.err;
  expect_parts(said.err, {"restart 1 of 5", "the same error before a run began"});
}

/// Process ids of the ranks of a launcher.
std::vector<int> children_of(int pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children");
  return {std::istream_iterator<int>(in), std::istream_iterator<int>()};
}

/// Of a job of one rank, too; json-out is the former name of json.
TEST(LaunchTrain, ARestartKeepsWhatAConfigFileSaysOfTheRun) {
  for (const auto& [count, json] : {std::pair(2, "json"), std::pair(1, "json-out")}) {
    const TemporaryFolder folder;
    std::ofstream(folder / "run.toml") << "device = \"cpu\"\nquiet = true\n"
                                       << json << " = \"" << folder / "run.json"
                                       << "\"\n";
    std::string flags = kTnp;
    for (const std::string flag : {" --device cpu", " --quiet"}) flags.erase(flags.find(flag), flag.size());
    std::atomic<int> launcher = 0;
    const LaunchOptions options{
        .command = tessera("launch -n " + std::to_string(count) + " --restarts 1 --logs " + folder / "inner" +
                           " -- train tnp" + flags + " --runs " + folder / "runs" +
                           " --name again --steps 400 --save-every 10" + " --log-every 1 --config " +
                           folder / "run.toml"),
        .started = [&](int, int pid) { launcher = pid; }};
    std::atomic<bool> killed = false;
    std::jthread killer([&](const std::stop_token& stop) {
      if (!await_steps(stop, folder, "again", 25)) return;
      const std::vector<int> ranks = children_of(launcher);
      if (int(ranks.size()) == count) killed = ::kill(ranks.back(), SIGKILL) == 0;
    });
    const Said said = launched(folder, options);
    EXPECT_TRUE(killed);
    EXPECT_EQ(said.end.code, 0) << said.err;
    expect_parts(said.err, {"restart 1 of 1"});
    EXPECT_NE(folder.get("run.json"), "");
    EXPECT_FALSE(fs::exists(folder / "runs/again-2"));
    EXPECT_EQ(said.out.find("step 400/400"), std::string::npos) << "a progress line, though it is quiet";
  }
}

}  // namespace
}  // namespace tessera::dist::test
#endif
