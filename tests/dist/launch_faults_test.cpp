#if defined(TESSERA_PROGRAM)
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "tests/dist/launched_train.h"
#include "tests/errors.h"

// One rank of a run hangs, meets a full disk, or runs out of memory: all ranks end, and say which it was.

namespace tessera::dist {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::launched;
using test::Said;
using test::words_of;

std::string run_flags(const Folder& folder, const std::string& more) {
  return "train tnp --device cpu --d-model 8 --d-ff 8 --n-head 1 --layers 2 --emb-hidden 8 --components 2 "
         "--n 4 "
         "--batch-size 2 --eval-tasks 4 --quiet --runs " +
         folder / "runs" + " --name fault" + more;
}

/// The command, in a shell that first runs `script`.
std::vector<std::string> after(const std::string& script, const std::string& line) {
  std::vector<std::string> command = {"/bin/sh", "-c", script + "; exec \"$0\" \"$@\""};
  for (std::string& word : test::tessera(line)) command.push_back(std::move(word));
  return command;
}

std::string log_of(const Folder& folder, int rank) {
  return folder.get("ranks/rank-" + std::to_string(rank) + ".log");
}

TEST(LaunchFaults, AStoppedRankIsNamedAtTheDeadline) {
  const Folder folder;
  std::atomic<int> stopped = 0;
  LaunchOptions options{.ranks = 3,
                        .command = after("export TESSERA_COMM_SECONDS=1",
                                         run_flags(folder, " --m 4 --steps 1000000 --log-every 1")),
                        .grace = 0.01,
                        .started = [&](int rank, int pid) {
                          if (rank == 1) stopped = pid;
                        }};
  std::jthread stopper([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && folder.get("runs/fault/metrics.jsonl").empty()) ::usleep(1000);
    if (!stop.stop_requested()) ::kill(stopped, SIGSTOP);
  });
  const Said said = launched(folder, options);
  EXPECT_EQ(said.end.code, 1) << said.err;
  for (const int rank : {0, 2})
    expect_parts(log_of(folder, rank), {"rank 1 (pid ", "did not take part in", "within 1 s"});
  EXPECT_NE(::kill(stopped, 0), 0) << "the stopped rank is left";
}

TEST(LaunchFaults, AFullDiskOnRankZeroIsTheCauseOnAll) {
  const Folder folder;
  // Of 512 bytes each; a write beyond that is an error then, not a signal.
  const Said said = launched(
      folder, {.ranks = 2,
               .command = after("trap '' XFSZ; [ $RANK = 0 ] && ulimit -f 16",
                                run_flags(folder, " --m 4 --steps 1000000 --log-every 1 --save-every 1")),
               .grace = 0.01});
  EXPECT_EQ(said.end.code, 1) << said.err;
  expect_parts(log_of(folder, 0), {"File too large"});
  expect_parts(log_of(folder, 1), {"rank 0 (pid ", "File too large"});
  EXPECT_FALSE(fs::exists(folder / "runs/fault/checkpoints/step-1000000.safetensors"));
}

TEST(LaunchFaults, ARankWithoutMemoryIsTheCauseOnAll) {
  const Folder folder;
  // KiB of addresses: enough to start in, too few for a batch of 500,000 points.
  const Said said = launched(folder, {.ranks = 2,
                                      .command = after("[ $RANK = 1 ] && ulimit -v 700000",
                                                       run_flags(folder, " --m 250000 --steps 3")),
                                      .grace = 0.01});
  EXPECT_EQ(said.end.code, 1) << said.err;
  expect_parts(said.end.cause, {"rank 1 (pid "});
}

}  // namespace
}  // namespace tessera::dist
#endif
