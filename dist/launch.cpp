#include "dist/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "comm/socket.h"
#include "dist/child_status.h"
#include "dist/launch_job_internal.h"
#include "dist/launch_logs_internal.h"
#include "runtime/error.h"

namespace tessera::dist {
namespace {

using comm::File;

void check_options(const LaunchOptions& o) {
  check(o.ranks >= 1 && o.ranks <= 4096, "launch: -n ", o.ranks, "; expected 1 to 4096 ranks per machine");
  check(o.nodes >= 1, "launch: --nodes ", o.nodes, "; expected at least 1");
  check(o.node >= 0 && o.node < o.nodes, "launch: --node ", o.node, " of --nodes ", o.nodes,
        "; nodes count from 0");
  check(o.nodes == 1 || !o.master.empty(), "launch: --nodes ", o.nodes,
        " needs --master HOST:PORT, the name of node 0 and a free port there, the same on all nodes");
  check(o.restarts >= 0, "launch: --restarts ", o.restarts, "; expected 0 or more");
  check(!o.command.empty(), "launch: nothing to run; name it after --, such as -- train gpt --text FILE");
}

MasterAddress parse_master(const std::string& text) {
  const size_t colon = text.rfind(':');
  MasterAddress address{text.substr(0, std::min(colon, text.size()))};
  const std::string port = colon == std::string::npos ? "" : text.substr(colon + 1);
  const auto [end, code] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  check(!address.host.empty() && !port.empty() && code == std::errc() && end == port.data() + port.size() &&
            address.port >= 1 && address.port <= 65535,
        "launch: --master \"", text, "\"; expected HOST:PORT, such as node0:29500");
  return address;
}

std::string random_token() {
  unsigned char bytes[16];
  check(::getrandom(bytes, sizeof(bytes), 0) == sizeof(bytes), "launch: getrandom: ", std::strerror(errno));
  std::string text;
  for (const unsigned char byte : bytes)
    text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
  return text;
}

/// Nodes share no secret but what they were all told.
std::string token_of(const LaunchOptions& options) {
  if (options.nodes == 1) return random_token();
  std::string text =
      options.master + " " + std::to_string(options.nodes) + "x" + std::to_string(options.ranks);
  for (size_t i = 1; i < options.command.size(); ++i) text += " " + options.command[i];
  return std::to_string(std::hash<std::string>()(text));
}

}  // namespace

void end_with_launcher() {
  const char* const text = std::getenv(kLauncherVariable);
  if (!text) return;
  int file = -1;
  ino_t inode = 0;
  struct stat facts {};
  // The number may be another file's by now: programs between the launcher and this one may have closed it.
  if (std::sscanf(text, "%d:%lu", &file, &inode) != 2 || ::fstat(file, &facts) != 0 ||
      !S_ISFIFO(facts.st_mode) || facts.st_ino != inode)
    return;
  ::fcntl(file, F_SETOWN, ::getpid());
  ::fcntl(file, F_SETSIG, SIGKILL);
  ::fcntl(file, F_SETFL, O_ASYNC);
  pollfd closed{file, POLLIN, 0};
  if (::poll(&closed, 1, 0) == 1 && (closed.revents & POLLHUP)) ::kill(::getpid(), SIGKILL);  // it was before
}

LaunchEnd launch(const LaunchOptions& options) {
  check_options(options);
  MasterAddress master =
      options.master.empty() ? MasterAddress{"127.0.0.1", 0} : parse_master(options.master);
  File listener;
  if (options.node == 0) {
    listener = comm::listen_on(master.port, !comm::is_loopback(master.host));
    master.port = comm::port_of(listener);
  }
  const std::vector<File> logs = open_logs(options);
  begin_logs(logs, options.command);
  const std::string token = token_of(options);
  keep_child_status();
  const LaunchSignals signals;
  const OrphanReaper reaper;
  LaunchEnd end;
  std::vector<std::string> command = options.command;
  std::string error_before;  // LaunchJob::error_at_start of the start before
  while (true) {
    LaunchJob job(options, command, signals, logs, listener, master, token, end.restarted);
    job.wait();
    const RankProcess* const failed = job.first_failed();
    end.code = job.code();
    end.cause.clear();
    if (!failed || job.interrupted()) return end;
    end.code = LaunchJob::code_of(*failed);
    end.cause = job.cause(*failed);
    if (end.restarted >= options.restarts) return end;
    const std::string error = job.error_at_start(*failed);
    // Other machines may not be there yet, which looks the same each time.
    if (options.nodes == 1 && !error.empty() && error == error_before) {
      options.err("tessera: the restart ended with the same error before a run began: no further one\n");
      return end;
    }
    error_before = error;
    end.restarted += 1;
    options.err("tessera: " + end.cause + "\ntessera: restart " + std::to_string(end.restarted) + " of " +
                std::to_string(options.restarts) + "\n");
    if (options.resumed && !job.run().empty()) command = options.resumed(job.run());
  }
}

}  // namespace tessera::dist
