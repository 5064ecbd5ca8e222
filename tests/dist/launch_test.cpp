#include "dist/launch.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <semaphore>
#include <sstream>
#include <stop_token>
#include <thread>

#include "comm/socket.h"
#include "tests/dist/launched.h"
#include "tests/errors.h"

// Ranks as `tessera launch` starts them: here programs of the shell.

namespace tessera::dist {
namespace {

using test::launched;
using test::Said;

std::vector<std::string> shell(const std::string& script) {
  return {"/bin/sh", "-c", script};
}

TEST(Launch, TagsLinesAndKeepsLogs) {
  const TemporaryFolder folder;
  const Said said = launched(
      folder,
      {.ranks = 3,
       .command = shell("echo I am $RANK of $WORLD_SIZE at $LOCAL_RANK; echo $RANK >&2; printf end")});
  EXPECT_EQ(said.end.code, 0);
  EXPECT_EQ(said.end.cause, "");
  for (int r = 0; r < 3; ++r) {
    const std::string n = std::to_string(r);
    EXPECT_NE(said.out.find("[" + n + "] I am " + n + " of 3 at " + n + "\n"), std::string::npos) << said.out;
    EXPECT_NE(said.out.find("[" + n + "] end\n"), std::string::npos) << said.out;
    EXPECT_NE(said.err.find("[" + n + "] " + n + "\n"), std::string::npos) << said.err;
    EXPECT_NE(folder.get("ranks/rank-" + n + ".log").find("I am " + n), std::string::npos);
  }
}

TEST(Launch, GivesEveryRankItsVariables) {
  const TemporaryFolder folder;
  const Said said =
      launched(folder, {.ranks = 2,
                        .nodes = 2,
                        .node = 1,
                        .master = "node0:4000",
                        .command = shell("echo $RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT "
                                         "$NCCL_NVLS_ENABLE ${TESSERA_LISTENER:-none}")});
  EXPECT_NE(said.out.find("[2] 2 2 node0 4000 0 none\n"), std::string::npos) << said.out;
  EXPECT_NE(said.out.find("[3] 3 2 node0 4000 0 none\n"), std::string::npos) << said.out;
}

TEST(Launch, NamesTheRankThatFailedAndItsStatus) {
  const TemporaryFolder folder;
  const Said said = launched(
      folder, {.ranks = 3, .command = shell("[ $RANK = 1 ] && exit 5; exec sleep 1000"), .grace = 0.01});
  EXPECT_EQ(said.end.code, 5);
  expect_parts(said.end.cause, {"rank 1 (pid ", "ended with status 5", "rank-1.log"});
}

TEST(Launch, NamesTheSignal) {
  const TemporaryFolder folder;
  const Said said = launched(
      folder, {.ranks = 3, .command = shell("[ $RANK = 2 ] && kill -9 $$; exec sleep 1000"), .grace = 0.01});
  EXPECT_EQ(said.end.code, 128 + SIGKILL);
  expect_parts(said.end.cause, {"rank 2 (pid ", "was killed by signal 9 (Killed)"});
}

TEST(Launch, LeavesNoProcess) {
  const TemporaryFolder folder;
  std::vector<int> pids;
  launched(folder, {.ranks = 4,
                    .command = shell("[ $RANK = 0 ] && exit 1; exec sleep 1000"),
                    .grace = 0.01,
                    .started = [&](int, int pid) { pids.push_back(pid); }});
  EXPECT_EQ(pids.size(), 4u);
  for (const int pid : pids) EXPECT_NE(::kill(pid, 0), 0);
}

TEST(Launch, StartsAgain) {
  const TemporaryFolder folder;
  const std::string script = "[ $RANK = 1 ] && [ $TESSERA_RESTART -lt 2 ] && exit 3; exit 0";
  const Said said = launched(folder, {.ranks = 2, .restarts = 3, .command = shell(script)});
  EXPECT_EQ(said.end.code, 0);
  EXPECT_EQ(said.end.restarted, 2);
  expect_parts(said.err, {"restart 1 of 3", "restart 2 of 3", "ended with status 3"});
  const Said enough = launched(folder, {.ranks = 2, .restarts = 1, .command = shell(script)});
  EXPECT_EQ(enough.end.code, 3);
  EXPECT_EQ(enough.end.restarted, 1);
}

TEST(Launch, PassesSignalsOnOnce) {
  const TemporaryFolder folder;
  std::atomic<int> ready = 0;
  LaunchOptions options{
      .ranks = 2,
      .command = shell(
          "n=0; trap 'n=$((n+1)); echo got $n; exit 7' TERM; echo ready; while :; do sleep 0.01; done")};
  std::string out;
  options.logs = folder / "ranks";
  options.out = [&](const std::string& line) {
    out += line;
    if (line.find("ready") != std::string::npos && ++ready == 2) ::kill(::getpid(), SIGTERM);
  };
  const LaunchEnd end = launch(options);
  EXPECT_EQ(end.code, 7);
  EXPECT_EQ(end.cause, "") << "an end that was asked for is no failure";
  expect_parts(out, {"[0] got 1", "[1] got 1"});
}

/// A script that runs a program, as the shell does with all but a script's last command.
std::vector<std::string> script_around(const std::string& program) {
  return shell("sh -c '" + program + "'; exit $?");
}

TEST(Launch, ReachesTheProgramOfAScript) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const TemporaryFolder folder;
    std::atomic<int> ready = 0;
    // SIGTERM ends the shell of the script at once, before the program has saved; at SIGINT it waits for it.
    LaunchOptions options{.ranks = 2,
                          .command = script_around("trap \"echo saved >&2; exit 9\" INT; "
                                                   "trap \"while kill -0 $PPID 2>&-; do sleep 0.01; done; "
                                                   "echo saved >&2; exit 9\" TERM; "
                                                   "echo ready; while :; do sleep 0.01; done")};
    std::string err;
    options.logs = folder / "ranks";
    options.err = [&](const std::string& line) { err += line; };
    options.out = [&](const std::string& line) {
      if (line.find("ready") != std::string::npos && ++ready == 2) ::kill(::getpid(), signal);
    };
    EXPECT_NE(launch(options).code, 0);
    expect_parts(err, {"[0] saved", "[1] saved"});
  }
}

TEST(Launch, LeavesNoProcessOfAScript) {
  const TemporaryFolder folder;
  // Rank 0 leaves a program behind, and rank 1 still waits for one.
  const std::string waits = folder / "waits";
  const Said said =
      launched(folder, {.ranks = 2,
                        .command = shell("sleep 1000 & echo $!; [ $RANK = 1 ] && touch " + waits +
                                         " && wait; until [ -e " + waits + " ]; do sleep 0.01; done; exit 4"),
                        .grace = 0.01});
  EXPECT_EQ(said.end.code, 4);
  int pids = 0, pid = 0;
  std::istringstream lines(said.out);
  for (std::string tag; lines >> tag >> pid; ++pids) EXPECT_NE(::kill(pid, 0), 0) << tag << " " << pid;
  EXPECT_EQ(pids, 2) << said.out;
}

/// A thread that takes the process's signals, as threads of the CUDA driver do, while the test's own blocks
/// them.
class TakesSignals {
 public:
  TakesSignals() {
    thread_ = std::jthread([this](const std::stop_token& stop) {
      id_ = ::pthread_self();
      started_.release();
      std::mutex mutex;
      std::unique_lock lock(mutex);
      std::condition_variable_any().wait(lock, stop, [] { return false; });
    });
    started_.acquire();
  }
  void send(int signal) const { ::pthread_kill(id_, signal); }

 private:
  pthread_t id_{};
  std::binary_semaphore started_{0};
  std::jthread thread_;
};

TEST(Launch, EndsThoughAnotherThreadTakesTheSignals) {
  const TemporaryFolder folder;
  const TakesSignals other;
  // A lost end would be waited for for ever; one in three was lost where SIGCHLD was waited for.
  for (int i = 0; i < 30; ++i)
    EXPECT_EQ(launched(folder, {.ranks = 2, .command = shell("exec 1>&- 2>&-; sleep 0.02; exit 0")}).end.code,
              0);
}

TEST(Launch, PassesOnSignalsThatAnotherThreadTakes) {
  const TemporaryFolder folder;
  const TakesSignals other;
  LaunchOptions options{.ranks = 1,
                        .command = shell("trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done")};
  options.logs = folder / "ranks";
  options.out = [&](const std::string&) { other.send(SIGTERM); };
  EXPECT_EQ(launch(options).code, 7);
}

// As some launchers leave it to the programs that they start: the ranks' ends
// were waited for for ever.
TEST(Launch, TellsHowRanksEndWhereTheEndsOfProcessesAreIgnored) {
  const TemporaryFolder folder;
  struct sigaction before {};
  ::sigaction(SIGCHLD, nullptr, &before);
  ::signal(SIGCHLD, SIG_IGN);
  const Said said = launched(folder, {.ranks = 2, .command = shell("exit 3")});
  ::sigaction(SIGCHLD, &before, nullptr);
  EXPECT_EQ(said.end.code, 3);
  expect_parts(said.end.cause, {"ended with status 3"});
}

TEST(Launch, AddsToTheLogsOfAnEarlierOne) {
  const TemporaryFolder folder;
  EXPECT_EQ(launched(folder, {.ranks = 1, .command = shell("echo the crash; exit 3")}).end.code, 3);
  EXPECT_EQ(folder.get("ranks/rank-0.log"), "the crash\n");
  launched(folder, {.ranks = 1, .command = shell("echo again")});
  EXPECT_EQ(folder.get("ranks/rank-0.log"),
            "the crash\n\n==== tessera launch -- /bin/sh -c echo again ====\nagain\n");
}

TEST(Launch, NextToAnotherNeedsLogsOfItsOwn) {
  const TemporaryFolder folder;
  const auto again = [&](int, int) {
    expect_error([&] { launched(folder, {.ranks = 1, .command = shell("echo other")}); },
                 {"launch: another launch is writing", "ranks/rank-0.log", "--logs"});
    // Machines that share the directory write different files.
    EXPECT_EQ(
        launched(folder,
                 {.ranks = 1, .nodes = 2, .node = 1, .master = "127.0.0.1:9", .command = shell("echo other")})
            .end.code,
        0);
  };
  launched(folder, {.ranks = 1, .command = shell("echo said"), .started = again});
  EXPECT_EQ(folder.get("ranks/rank-0.log"), "said\n");
}

TEST(Launch, WhatCannotBeIsRefused) {
  const auto refuses = [](const LaunchOptions& options, std::initializer_list<const char*> parts) {
    const TemporaryFolder folder;
    expect_error([&] { launched(folder, options); }, parts);
  };
  refuses({.ranks = 0, .command = shell("")}, {"-n 0"});
  refuses({.ranks = 5000, .command = shell("")}, {"-n 5000", "4096"});
  refuses({.nodes = 2, .command = shell("")}, {"--nodes 2 needs --master HOST:PORT"});
  refuses({.nodes = 2, .node = 2, .master = "a:1", .command = shell("")}, {"--node 2 of --nodes 2"});
  refuses({.nodes = 0, .command = shell("")}, {"--nodes 0"});
  refuses({.restarts = -1, .command = shell("")}, {"--restarts -1"});
  for (const char* master : {"node0", "node0:", ":29500", "node0:x", "node0:0", "node0:70000", "node0:1 "})
    refuses({.nodes = 2, .master = master, .command = shell("")}, {"--master \"", "expected HOST:PORT"});
  refuses({}, {"nothing to run", "-- train gpt"});
  const comm::File taken = comm::listen_on(0, false);
  refuses({.master = "127.0.0.1:" + std::to_string(comm::port_of(taken)), .command = shell("")},
          {"is taken by another program"});
  const TemporaryFolder folder;
  const Said said = launched(folder, {.ranks = 2, .command = {"/no/such/program"}});
  EXPECT_EQ(said.end.code, 127);
  expect_parts(said.err, {"launch: /no/such/program: No such file"});
}

}  // namespace
}  // namespace tessera::dist
