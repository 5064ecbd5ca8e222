#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera::dist {

struct LaunchOptions {
  int ranks = 1;            // on this machine
  int nodes = 1, node = 0;  // machines, and which of them this is
  std::string master = {};  // "host:port" of node 0; "": this machine, any free port
  /// Attempts after a failure. On one machine the last is the one that ends, before a run began, with the
  /// error of the attempt before: the next would, too.
  int restarts = 0;
  std::string logs = "ranks";  // directory of the log files, rank-<N>.log
  /// The program and its arguments.
  std::vector<std::string> command;
  /// Command line to resume the run in directory `run` after a failure; empty: `command` again.
  std::function<std::vector<std::string>(const std::string& run)> resumed = {};
  double grace =
      5;  // seconds in which the other ranks end by themselves after a failure; then they are killed
  /// Called for each rank that was started, with its process.
  std::function<void(int rank, int pid)> started = {};
  /// Receives the ranks' output line by line, tagged "[2] ", and the launcher's own messages.
  std::function<void(const std::string&line)> out = [](const std::string&) {}, err = out;
};

struct LaunchEnd {
  int code = 0;       // exit status: 0, that of the failed rank, or 128 + its signal
  std::string cause;  // one line about the rank that failed first; "": none failed
  int restarted = 0;
};

/// The environment variable with the file descriptor and the inode of a pipe whose other end this process
/// keeps: end_with_launcher() waits for its end.
inline constexpr const char* kLauncherVariable = "TESSERA_LAUNCHER_PIPE";

/// Lets the kernel kill this process when the launcher that started it, or the script that runs it, is gone;
/// without one does nothing.
void end_with_launcher();

/// Starts the ranks of a job on this machine as processes with torchrun's environment variables
/// (dist/place.h), waits for them, tags their output and writes it to logs. When a rank fails, those that
/// have not ended within `grace` are killed with all that they started, and the rank that failed first is
/// reported: its pid, its signal or exit status, and the step and call it was in. SIGINT, SIGTERM and SIGHUP
/// are forwarded once to all processes of the ranks, also to those that a script runs; what outlives such a
/// script has a minute to end. The ranks are killed when this process dies, and so are programs of scripts
/// that have joined the world (World::join).
///
/// Sets the CPU threads of each rank to its share of the cores unless TESSERA_THREADS or OMP_NUM_THREADS is
/// set; sets NCCL_NVLS_ENABLE=0. Adds to logs of an earlier launch. Throws if the options contradict each
/// other, if a process or a log cannot be created, or if another launch that lives writes to one of the logs.
LaunchEnd launch(const LaunchOptions& options);

}  // namespace tessera::dist
