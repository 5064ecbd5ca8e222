#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera::dist {

struct LaunchOptions {
  int ranks = 1;               // on this machine
  int nodes = 1, node = 0;     // machines, and which of them this is
  std::string master;          // "host:port" of node 0; "": this machine, any free port
  int restarts = 0;            // after a failure
  std::string logs = "ranks";  // folder of rank-<N>.log
  /// The program and its arguments.
  std::vector<std::string> command;
  /// Those to continue the run in this folder with, after a failure; empty: `command` again.
  std::function<std::vector<std::string>(const std::string& run)> resumed = {};
  double grace =
      5;  // seconds in which the other ranks end by themselves after a failure; then they are killed
  /// Called for each rank that was started, with its process.
  std::function<void(int rank, int pid)> started = {};
  /// Where whole lines of the ranks go, tagged "[2] ", and what is said besides.
  std::function<void(const std::string&line)> out = [](const std::string&) {}, err = out;
};

struct LaunchEnd {
  int code = 0;       // what to exit with: 0, the failed rank's, or 128 + its signal
  std::string cause;  // one line on the rank that failed first; "": none failed
  int restarted = 0;
};

/// Starts the ranks of a job on this machine, each a process of its own with the variables of torchrun
/// (dist/place.h), waits for them, and tags and keeps what they say. When a rank fails, those that have not
/// ended within the grace are killed, and the rank that failed first is named: its process, its signal or
/// status, and the step and call in which it was. SIGINT, SIGTERM and SIGHUP are passed on to all ranks, once
/// each. The ranks die with this process, however it ends.
///
/// CPU threads are shared out unless TESSERA_THREADS or OMP_NUM_THREADS is set; NVLink multicast is off for
/// all ranks (NCCL_NVLS_ENABLE=0). Throws if the options contradict each other, or a process or a log cannot
/// be made.
LaunchEnd launch(const LaunchOptions& options);

}  // namespace tessera::dist
