#if defined(TESSERA_PROGRAM)  // a build without the command has nothing to launch
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "tests/dist/launched_train.h"
#include "tests/errors.h"

// `tessera train bert` on several ranks: fine-tuning, seed after seed, and pretraining.

namespace tessera::dist::test {
namespace {

/// Sentences with a word that tells the label.
void write_task(const TemporaryFolder& folder) {
  fs::create_directories(folder / "glue");
  for (const char* part : {"train", "dev"}) {
    std::ofstream out(folder / (std::string("glue/") + part + ".tsv"));
    out << "sentence\tlabel\n";
    for (int i = 0; i < (part[0] == 't' ? 48 : 10); ++i)
      out << "film number " << (i * i) % 37 << (i % 2 ? " is good" : " is bad") << " and ends\t" << i % 2
          << "\n";
  }
  std::ofstream out(folder / "glue/test.tsv");
  out << "index\tsentence\n0\ta good film\n1\ta bad film\n";
}

const std::string kBertSizes =
    " --device cpu --layers 1 --d-model 8 --n-head 1 --d-ff 16 --vocab-size 300 --batch-size 2 "
    "--max-length 24 --lr 1e-3 --quiet";

/// Seeds with dropout.
std::string glue_flags(const TemporaryFolder& folder, int seeds = 2) {
  return "bert --task sst2 --scratch --seeds " + std::to_string(seeds) + " --data " + folder / "glue" +
         kBertSizes + " --runs " + folder / "runs";
}

std::string mlm_flags(const TemporaryFolder& folder) {
  return "bert --task mlm --seeds 1 --text " + folder / "text.txt" + kBertSizes + " --runs " +
         folder / "runs";
}

std::string replaced(std::string line, const std::string& old, const std::string& other) {
  return line.replace(line.find(old), old.size(), other);
}

/// The values of the last evaluation in metrics.jsonl, as they are written there.
std::string last_evaluation(const TemporaryFolder& folder, const std::string& run) {
  const std::string lines = folder.get("runs/" + run + "/metrics.jsonl");
  const size_t last = lines.rfind("\"eval_"), line = lines.rfind("\n", last) + 1;
  if (last == std::string::npos) return "";
  const size_t begin = lines.find("\"eval_", line);
  return lines.substr(begin, lines.find(',', last) - begin);
}

TEST(LaunchBert, FineTuningHasTheSameBitsOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  write_task(folder);
  const std::string line = glue_flags(folder) + " --accumulate 4 --order global --steps 6 --name ";
  for (const int ranks : {1, 2, 4}) train_to_end(folder, ranks, line + "r" + std::to_string(ranks));
  train_to_end(folder, 4, line + "z4 --zero 1"), train_to_end(folder, 2, line + "b2 --bucket-mb 0");
  for (const char* seed : {"/seed-0", "/seed-1"}) {
    const std::string alone = checkpoint(folder, std::string("r1") + seed, 6);
    const std::string scores = last_evaluation(folder, std::string("r1") + seed);
    EXPECT_FALSE(alone.empty());
    EXPECT_NE(scores.find("eval_accuracy"), std::string::npos);
    for (const char* run : {"r2", "r4", "z4", "b2"}) {
      EXPECT_TRUE(checkpoint(folder, std::string(run) + seed, 6) == alone) << run << seed;
      EXPECT_EQ(last_evaluation(folder, std::string(run) + seed), scores) << run << seed;
    }
  }
  EXPECT_NE(checkpoint(folder, "r1/seed-0", 6), checkpoint(folder, "r1/seed-1", 6));
  EXPECT_FALSE(folder.get("runs/r4/summary.json").empty());
}

TEST(LaunchBert, PretrainingHasTheSameBitsOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  write_text(folder, 1500);
  const std::string line = mlm_flags(folder) + " --accumulate 4 --order global --steps 6 --name ";
  for (const int ranks : {1, 2, 4}) train_to_end(folder, ranks, line + "r" + std::to_string(ranks));
  train_to_end(folder, 2, line + "z2 --zero 1");
  const std::string alone = checkpoint(folder, "r1", 6),
                    model = folder.get("runs/r1/model/model.safetensors");
  const std::string scores = last_evaluation(folder, "r1");
  EXPECT_FALSE(alone.empty() || model.empty());
  EXPECT_NE(scores.find("eval_nll"), std::string::npos);
  for (const std::string run : {"r2", "r4", "z2"}) {
    EXPECT_TRUE(checkpoint(folder, run, 6) == alone) << run;
    EXPECT_TRUE(folder.get("runs/" + run + "/model/model.safetensors") == model) << run;
    EXPECT_EQ(last_evaluation(folder, run), scores) << run;
  }
}

TEST(LaunchBert, SlicesAndDroppedBranchesAreTheSameOnAllRanks) {
  const TemporaryFolder folder;
  write_task(folder);
  const std::string line = glue_flags(folder, 1) +
                           " --slice random --rows 50% --probe-gradient 3 --dropbp 0.5 --dropbp-rates "
                           "sensitivity --accumulate 4 --order global --steps 10 --name ";
  for (const int ranks : {1, 2, 4}) train_to_end(folder, ranks, line + "r" + std::to_string(ranks));
  const std::string alone = checkpoint(folder, "r1/seed-0", 10);
  const std::string probes = folder.get("runs/r1/seed-0/probes.jsonl");
  EXPECT_FALSE(alone.empty() || probes.empty());
  for (const std::string run : {"r2", "r4"}) {
    EXPECT_TRUE(checkpoint(folder, run + "/seed-0", 10) == alone) << run;
    EXPECT_EQ(folder.get("runs/" + run + "/seed-0/probes.jsonl"), probes) << run;
  }
}

TEST(LaunchBert, EpochsAreThoseOfAllRanks) {
  const TemporaryFolder folder;
  write_task(folder);
  train_to_end(folder, 2, glue_flags(folder, 1) + " --epochs 2 --log-every 100 --name two");
  // 24 micro-batches per epoch, one per rank and step; evaluated after each epoch.
  const std::string lines = folder.get("runs/two/seed-0/metrics.jsonl");
  for (const char* step : {"\"step\":12", "\"step\":24"})
    EXPECT_NE(lines.find(step), std::string::npos) << step << " in " << lines;
  EXPECT_FALSE(checkpoint(folder, "two/seed-0", 24).empty());
}

TEST(LaunchBert, AnInterruptedGroupGoesOnWithOtherNumbersOfRanks) {
  const TemporaryFolder folder;
  write_task(folder);
  const std::string flags =
      glue_flags(folder) + " --accumulate 4 --order global --steps 40 --log-every 1 --save-every 5 --name ";
  train_to_end(folder, 1, flags + "whole");
  // A signal to one rank ends the run on both, after the same step.
  std::atomic<int> target = 0;
  LaunchOptions options{
      .ranks = 2, .command = tessera("train " + flags + "parts"), .started = [&](int rank, int pid) {
        if (rank == 1) target = pid;
      }};
  std::jthread sender([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && folder.get("runs/parts/seed-0/metrics.jsonl").size() < 300)
      ::usleep(1000);
    if (target != 0) ::kill(target, SIGINT);
  });
  const Said stopped = launched(folder, options);
  EXPECT_EQ(stopped.end.code, 128 + SIGINT) << stopped.err << stopped.end.cause;
  expect_parts(stopped.out, {"interrupted after step", "train bert --resume"});
  train_to_end(folder, 4, "bert --device cpu --quiet --zero 1 --resume " + folder / "runs/parts");
  for (const char* seed : {"/seed-0", "/seed-1"}) {
    EXPECT_FALSE(checkpoint(folder, std::string("whole") + seed, 40).empty());
    EXPECT_TRUE(checkpoint(folder, std::string("whole") + seed, 40) ==
                checkpoint(folder, std::string("parts") + seed, 40))
        << seed;
  }
  // A group that is done writes on several ranks what it lacks.
  train_to_end(folder, 2,
               "bert --device cpu --quiet --predict --save-model --resume " + folder / "runs/parts");
  EXPECT_FALSE(folder.get("runs/parts/seed-1/predictions/SST-2.tsv").empty());
  EXPECT_FALSE(folder.get("runs/parts/seed-1/model/model.safetensors").empty());
}

/// Kills rank 1 of two once the run has a checkpoint, and expects that a restart ends as a run that was never
/// killed.
void expect_restarted(const TemporaryFolder& folder, const std::string& flags, const std::string& run,
                      int steps) {
  const std::string line =
      flags + " --order global --log-every 1 --save-every 5 --steps " + std::to_string(steps) + " --name ";
  train_to_end(folder, 2, line + "whole");
  std::atomic<int> victim = 0;
  std::atomic<bool> killed = false;
  LaunchOptions options{.ranks = 2,
                        .restarts = 1,
                        .command = tessera("train " + line + "again"),
                        .resumed =
                            [&](const std::string& path) {
                              return tessera("train bert --device cpu --quiet --resume " + path);
                            },
                        .started =
                            [&](int rank, int pid) {
                              if (rank == 1) victim = pid;
                            }};
  std::jthread killer([&](const std::stop_token& stop) {
    if (await_steps(stop, folder, "again" + run, 12)) killed = ::kill(victim, SIGKILL) == 0;
  });
  const Said said = launched(folder, options);
  EXPECT_TRUE(killed);
  EXPECT_EQ(said.end.code, 0) << said.err;
  EXPECT_EQ(said.end.restarted, 1) << said.err;
  expect_parts(said.err, {"rank 1", "was killed by signal 9"});
  EXPECT_FALSE(checkpoint(folder, "whole" + run, steps).empty());
  EXPECT_TRUE(checkpoint(folder, "whole" + run, steps) == checkpoint(folder, "again" + run, steps));
}

TEST(LaunchBert, AKilledFineTuningGoesOnToTheSameEnd) {
  const TemporaryFolder folder;
  write_task(folder);
  expect_restarted(folder, glue_flags(folder), "/seed-1", 300);
}

TEST(LaunchBert, AKilledPretrainingGoesOnToTheSameEnd) {
  const TemporaryFolder folder;
  write_text(folder, 1500);
  expect_restarted(folder, mlm_flags(folder), "", 300);
}

TEST(LaunchBert, RefusesWhatRanksCannotShare) {
  const TemporaryFolder folder;
  write_task(folder), write_text(folder, 1500);
  const auto refuses = [&](int ranks, const std::string& line, int code,
                           std::initializer_list<const char*> parts) {
    expect_refused(folder, ranks, line, code, parts);
  };
  const std::string glue = glue_flags(folder), mlm = mlm_flags(folder);
  for (const std::string& line : {glue, mlm}) {
    refuses(2, line + " --steps 2 --accumulate 3", 1,
            {"--accumulate 3 micro-batches per step on 2 ranks", "multiple of 2"});
    refuses(2, line + " --steps 2 --accumulate 6", 1, {"3 micro-batches each", "power of two"});
    refuses(2, line + " --steps 2 --optimizer muon --zero 1", 1,
            {"--zero 1 with --optimizer muon", "adamw or sgd"});
    refuses(2, replaced(line, "--device cpu", "--device cuda:0") + " --steps 2", 2,
            {"--device cuda:0", "a GPU of its own"});
  }
  refuses(2, glue + " --steps 2 --missing-grad skip", 1,
          {"--missing-grad skip on 2 ranks", "--missing-grad zero"});
  refuses(1, glue + " --steps 2 --missing-grad skip --order global", 1,
          {"--missing-grad skip with --order global", "--order world"});
  refuses(2, replaced(glue, "--batch-size 2", "--batch-size 64") + " --steps 2", 1,
          {"48 examples give no batch of 64"});
  refuses(
      2,
      "bert --task sst2 --scratch --data " + folder / "nowhere" + kBertSizes + " --runs " + folder / "runs",
      1, {"train.tsv"});
}

}  // namespace
}  // namespace tessera::dist::test
#endif
