#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "dist/launch_logs_internal.h"
#include "runtime/error.h"

namespace tessera::dist {

using comm::File;

int rank_of(const LaunchOptions& options, int local) {
  return options.node * options.ranks + local;
}

std::string log_of(const LaunchOptions& options, int rank) {
  return options.logs + "/rank-" + std::to_string(rank) + ".log";
}

std::vector<File> open_logs(const LaunchOptions& options) {
  std::error_code error;
  std::filesystem::create_directories(options.logs, error);
  check(!error, "launch: --logs ", options.logs, ": ", error.message());
  std::vector<File> logs;
  for (int local = 0; local < options.ranks; ++local) {
    const std::string path = log_of(options, rank_of(options, local));
    File log(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    check(log.open(), "launch: ", path, ": ", std::strerror(errno));
    // Where there are no locks, nothing tells.
    check(::flock(log.number(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, "launch: another launch is ",
          "writing ", path, "; give this one a directory of its own with --logs");
    logs.push_back(std::move(log));
  }
  return logs;
}

void write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(file, bytes.data(), bytes.size());
    if (put < 0 && errno != EINTR) return;  // a full disk: what the rank said is still shown
    bytes.remove_prefix(put > 0 ? size_t(put) : 0);
  }
}

void begin_logs(const std::vector<File>& logs, const std::vector<std::string>& command) {
  std::string line = "\n==== tessera launch --";
  for (const std::string& word : command) line += " " + word;
  for (const File& log : logs) {
    struct stat facts {};
    if (::fstat(log.number(), &facts) == 0 && facts.st_size > 0) write_all(log.number(), line + " ====\n");
  }
}

}  // namespace tessera::dist
