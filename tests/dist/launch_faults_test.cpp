#if defined(TESSERA_PROGRAM)
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "tests/dist/launched_train.h"
#include "tests/errors.h"

// One rank of a run hangs, meets a full disk, or runs out of memory: all ranks end, and say which it was.

namespace tessera::dist::test {
namespace {

std::string run_flags(const TemporaryFolder& folder, const std::string& more) {
  return "train tnp --device cpu --d-model 8 --d-ff 8 --n-head 1 --layers 2 --emb-hidden 8 --components 2 "
         "--n 4 --eval-tasks 4 --quiet --runs " +
         folder / "runs" + " --name fault" + more;
}

/// The command, in a shell that first runs `script`.
std::vector<std::string> after(const std::string& script, const std::string& line) {
  std::vector<std::string> command = {"/bin/sh", "-c", script + "; exec \"$0\" \"$@\""};
  for (std::string& word : tessera(line)) command.push_back(std::move(word));
  return command;
}

std::string log_of(const TemporaryFolder& folder, int rank) {
  return folder.get("ranks/rank-" + std::to_string(rank) + ".log");
}

/// Launches a run without end, and once it has logged a step does `act` to the process of rank 1.
Said launched_and(const TemporaryFolder& folder, LaunchOptions options,
                  const std::function<void(int pid)>& act) {
  std::atomic<int> one = 0;
  options.started = [&](int rank, int pid) {
    if (rank == 1) one = pid;
  };
  std::jthread actor([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && folder.get("runs/fault/metrics.jsonl").empty()) ::usleep(1000);
    if (!stop.stop_requested()) act(one);
  });
  return launched(folder, options);
}
const std::string kEndless = " --m 4 --batch-size 2 --steps 1000000 --log-every 1";

TEST(LaunchFaults, AStoppedRankIsNamedAtTheDeadline) {
  const TemporaryFolder folder;
  int stopped = 0;
  const Said said =
      launched_and(folder,
                   {.ranks = 3,
                    .command = after("export TESSERA_COMM_SECONDS=1", run_flags(folder, kEndless)),
                    .grace = 5},  // for the others to hear of it
                   [&](int pid) { ::kill(stopped = pid, SIGSTOP); });
  EXPECT_EQ(said.end.code, 1) << said.err;
  for (const int rank : {0, 2})
    expect_parts(log_of(folder, rank), {"rank 1 (pid ", "did not take part in", "within 1 s"});
  EXPECT_NE(::kill(stopped, 0), 0) << "the stopped rank is left";
}

/// While it lives, processes whose parents have ended become children of this one, which can wait for them.
class AdoptsOrphans {
 public:
  AdoptsOrphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }
  ~AdoptsOrphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 0); }
  AdoptsOrphans(const AdoptsOrphans&) = delete;
};

/// Reads until the text came; false if the pipe's last writer is gone before.
bool came(int pipe, const std::string& text) {
  std::string all;
  for (char some[256]; all.find(text) == std::string::npos;) {
    const ssize_t count = ::read(pipe, some, sizeof some);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    all.append(some, size_t(count));
  }
  return true;
}

TEST(LaunchFaults, TheProgramsOfScriptsEndWithALauncherThatIsKilled) {
  const TemporaryFolder folder;
  const AdoptsOrphans adopts;
  // The programs tell of their steps through a pipe that is not the launcher's. They would
  // end by themselves, later.
  std::string line = run_flags(folder, " --m 4 --batch-size 2 --steps 20000 --log-every 1");
  line.erase(line.find("--quiet "), std::string("--quiet ").size());
  std::string program;
  for (const std::string& word : tessera(line)) program += word + " ";
  const std::string script = program + "2>&9 & echo $! >" + (folder / "pid-") + "$RANK; wait";
  std::vector<std::string> command = tessera("launch -n 2 --logs " + folder / "ranks" + " -- /bin/sh -c");
  command.push_back(script);
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  int pipe[2];
  ASSERT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, pipe[1], 9);
  pid_t launcher = 0;
  const int failed = ::posix_spawn(&launcher, arguments[0], &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(pipe[1]);
  ASSERT_EQ(failed, 0);
  const bool trains = came(pipe[0], "step 1/");
  ::kill(launcher, SIGKILL);
  int status = 0;
  // The launcher, the scripts, which become this process's children with its end, and then their programs.
  std::map<pid_t, int> ended;
  for (pid_t pid; (pid = ::waitpid(-1, &status, 0)) > 0;) ended[pid] = status;
  ::close(pipe[0]);
  ASSERT_TRUE(trains) << log_of(folder, 0);
  // Of a program that ended before its script, the script alone knows how.
  for (const char* const rank : {"0", "1"})
    if (const auto found = ended.find(std::stoi(folder.get(std::string("pid-") + rank)));
        found != ended.end())
      EXPECT_TRUE(WIFSIGNALED(found->second) && WTERMSIG(found->second) == SIGKILL)
          << "rank " << rank << " ended by itself";
  EXPECT_EQ(folder.get("runs/fault/report.html"), "") << "the run has finished";
}

TEST(LaunchFaults, AFullDiskOnRankZeroIsTheCauseOnAll) {
  const TemporaryFolder folder;
  // Of 512 bytes each; a write beyond that is an error then, not a signal.
  const Said said = launched(folder, {.ranks = 2,
                                      .command = after("trap '' XFSZ; [ $RANK = 0 ] && ulimit -f 16",
                                                       run_flags(folder, kEndless + " --save-every 1"))});
  EXPECT_EQ(said.end.code, 1) << said.err;
  expect_parts(log_of(folder, 0), {"File too large"});
  expect_parts(log_of(folder, 1), {"rank 0 (pid ", "File too large"});
  EXPECT_FALSE(fs::exists(folder / "runs/fault/checkpoints/step-1000000.safetensors"));
}

/// The most KiB of addresses that a process has had.
int64_t peak_addresses(int pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string word; status >> word;)
    if (int64_t size = 0; word == "VmPeak:" && status >> size) return size;
  return 0;
}

TEST(LaunchFaults, ARankWithoutMemoryIsTheCauseOnAll) {
  // What a small run takes is enough to start in; a step of 100,000 tasks is planned to take 640 MiB.
  // KiB beyond that: OpenBLAS takes 128 MiB at its first product, whose lack would be another error.
  constexpr int64_t kBeyond = 262144;
  int64_t enough = 0;
  {
    const TemporaryFolder folder;
    launched_and(folder, {.ranks = 2, .command = after(":", run_flags(folder, kEndless)), .grace = 0.01},
                 [&](int pid) {
                   enough = peak_addresses(pid) + kBeyond;
                   ::kill(pid, SIGKILL);
                 });
  }
  ASSERT_GT(enough, kBeyond);
  const TemporaryFolder folder;
  const Said said = launched(
      folder,
      {.ranks = 2,
       .command = after("export TESSERA_THREADS=1; [ $RANK = 1 ] && ulimit -v " + std::to_string(enough),
                        run_flags(folder, " --m 4 --batch-size 100000 --steps 3"))});
  EXPECT_EQ(said.end.code, 1) << said.err;
  expect_parts(said.end.cause, {"rank 1 (pid ", "out of memory on cpu"});
  expect_parts(log_of(folder, 0), {"rank 1 (pid ", "out of memory on cpu"});
}

}  // namespace
}  // namespace tessera::dist::test
#endif
