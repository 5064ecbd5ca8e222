#pragma once

#include <sys/types.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/socket.h"
#include "comm/status.h"
#include "dist/launch.h"
#include "dist/launch_signals_internal.h"

/// The ranks of a launch on this machine, from their start to their end.

namespace tessera::dist {

/// Where rank 0 listens.
struct MasterAddress {
  std::string host;
  int port = 0;
};

/// The page in which a rank notes what it does.
class StatusPage {
 public:
  StatusPage();
  ~StatusPage();
  StatusPage(const StatusPage&) = delete;
  int file() const { return file_.number(); }
  const comm::Status& operator*() const { return *status_; }
  const comm::Status* operator->() const { return status_; }

 private:
  comm::File file_;
  comm::Status* status_ = nullptr;
};

/// What a rank writes to one of its standard files, cut into lines.
struct RankOutput {
  comm::File from = comm::File();
  bool is_error = false;
  std::string rest = {};
};

struct RankProcess {
  int rank = 0;
  pid_t pid = -1;       // and the id of the process group of all that it starts
  comm::File end;       // readable once the process has ended
  comm::File lifeline;  // the end of a pipe that closes when this process dies (kLauncherVariable)
  std::unique_ptr<StatusPage> page;
  std::array<RankOutput, 2> streams;
  int log = -1;
  bool waited_for = false, ended = false, killed_by_us = false;
  std::optional<comm::Deadline> leftover;  // for what its script left in the group when a signal ended it
  int status = 0;                          // of waitpid
  int order = 0;                           // in which the failed ones ended; 0: not failed

  bool failed() const { return ended && status != 0; }
};

/// One start of all ranks of this machine, to their end.
class LaunchJob {
 public:
  /// `logs`: by the ranks' local numbers. `listener`: for rank 0. `attempt`: of the starts, from 0.
  LaunchJob(const LaunchOptions& options, const std::vector<std::string>& command,
            const LaunchSignals& signals, const std::vector<comm::File>& logs, const comm::File& listener,
            const MasterAddress& master, const std::string& token, int attempt);
  ~LaunchJob();
  LaunchJob(const LaunchJob&) = delete;
  /// For the end of all, passing output and signals on.
  void wait();

  bool interrupted() const { return interrupted_; }
  /// The rank that failed first; null if none did.
  const RankProcess* first_failed() const;
  int code() const;
  static int code_of(const RankProcess& p);
  /// The folder of the run, if there is one already.
  std::string run() const;
  /// The error with which a rank ended before a run began; "" if that is not how it ended.
  std::string error_at_start(const RankProcess& p) const;
  /// What became of a rank that failed, in a line.
  std::string cause(const RankProcess& p) const;

 private:
  std::map<std::string, std::string> variables_of(int local, const MasterAddress& master,
                                                  const std::string& token, int attempt) const;
  void start(int local, const std::vector<std::string>& command,
             const std::map<std::string, std::string>& variables, const comm::File& log,
             const comm::File& listener);
  /// In the child: the rank's group, files and variables.
  static void become(pid_t parent, int out, int err, int page, int lifeline, int listener,
                     const std::map<std::string, std::string>& variables);
  void read_streams(bool to_the_end);
  void pass_lines(const RankProcess& p, RankOutput& stream) const;
  int milliseconds_to_wait() const;
  /// To all processes of the ranks, as a terminal does: a shell script does not pass it on to the program
  /// that it runs.
  void pass_on(int signal);
  static void send(const RankProcess& p, int signal);
  /// Whether processes are left in the group of a rank that was waited for. They are this process's children
  /// (OrphanReaper).
  static bool group_left(const RankProcess& p);
  void collect();
  void kill_rest();
  /// Ends what ranks that have ended left behind, which would go on next to a restart.
  void end_groups() const;

  const LaunchOptions& options_;
  const LaunchSignals& signals_;
  std::vector<RankProcess> processes_;
  bool interrupted_ = false;
  int failed_ = 0;
  std::optional<comm::Deadline> patience_;  // with the ranks that have not ended, after a failure
};

}  // namespace tessera::dist
