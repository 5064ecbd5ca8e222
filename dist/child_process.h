#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// Runs this program in separate processes: a crash ends one of them only.

namespace tessera::dist {

/// How a process ended.
struct ChildEnd {
  int code = 0;    // the exit code; if a signal ended it 128 + the signal, as shells say it
  int signal = 0;  // that ended it; 0: it ended by itself
};

class ChildProcess {
 public:
  /// Starts `program` with these arguments, in a separate process group: Ctrl-C reaches only this process,
  /// which decides. Its output and its errors are appended to the file `log`, its input is empty. It gets
  /// SIGTERM if the thread that made it ends. `environment`: variables that it has besides ours. Throws if it
  /// cannot be started.
  ChildProcess(const std::string& program, const std::vector<std::string>& arguments,
               const std::filesystem::path& log,
               const std::vector<std::pair<std::string, std::string>>& environment = {});
  /// Ends it with SIGTERM, if it still runs, and waits for that.
  ~ChildProcess();
  ChildProcess(ChildProcess&& other) noexcept
      : id_(std::exchange(other.id_, -1)), alive_(std::exchange(other.alive_, -1)), asked_(other.asked_) {}
  ChildProcess& operator=(ChildProcess&& other) noexcept {
    std::swap(id_, other.id_), std::swap(alive_, other.alive_), std::swap(asked_, other.asked_);
    return *this;
  }

  /// Sends the signal, unless one was sent before: to a second one it would end without saving.
  void ask_to_end(int signal);
  /// The signal that was sent.
  int asked() const { return asked_; }

 private:
  friend std::optional<size_t> wait_any(std::vector<ChildProcess>& children,
                                        std::optional<std::chrono::steady_clock::time_point> deadline);
  friend ChildEnd collect(ChildProcess& child);
  pid_t id_ = -1;
  int alive_ = -1;  // the reading end of a pipe that the system closes when the process ends
  int asked_ = 0;
};

/// Waits until one of the processes has ended, and returns its index; nothing if before that the deadline has
/// passed or InterruptGuard has noted a signal. With no process it waits for the deadline or a signal alone.
std::optional<size_t> wait_any(std::vector<ChildProcess>& children,
                               std::optional<std::chrono::steady_clock::time_point> deadline);
/// How the process ended; waits for that.
ChildEnd collect(ChildProcess& child);

}  // namespace tessera::dist
