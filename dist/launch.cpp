#include "dist/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "comm/socket.h"
#include "comm/status.h"
#include "dist/child_status.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/parallel.h"

namespace tessera::dist {
namespace {

using comm::Deadline;
using comm::File;
using comm::Status;

/// Makes SIGINT, SIGTERM and SIGHUP readable while it lives, whichever thread of the process receives them.
/// One that was ignored stays so, as nohup asks.
class Signals {
 public:
  Signals() {
    int ends[2];
    check(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "launch: pipe: ", std::strerror(errno));
    arrivals_ = File(ends[0]), notes_ = File(ends[1]);
    g_notes = notes_.number();
    struct sigaction action {};
    action.sa_flags = SA_RESTART;
    action.sa_handler = [](int signal) {
      const int error = errno;
      const auto note = static_cast<unsigned char>(signal);
      // What cannot be written is lost: then the pipe is full, and enough signals wait in it.
      [[maybe_unused]] const ssize_t written = ::write(g_notes, &note, 1);
      errno = error;
    };
    for (size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &action, &former_[i]);
      if (former_[i].sa_handler == SIG_IGN) ::sigaction(kSignals[i], &former_[i], nullptr);
    }
  }
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  int file() const { return arrivals_.number(); }
  /// The next signal that has arrived, or 0.
  int take() const {
    unsigned char signal = 0;
    return ::read(arrivals_.number(), &signal, 1) == 1 ? signal : 0;
  }
  void restore() const {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &former_[i], nullptr);
  }

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  static inline std::atomic<int> g_notes{-1};  // the pipe's end for the handler
  std::array<struct sigaction, kSignals.size()> former_{};
  File arrivals_, notes_;
};

/// While it lives, processes whose parents have ended become children of this one, which can then tell
/// whether any is left of a rank that was a script.
class OrphanReaper {
 public:
  OrphanReaper() {
    ::prctl(PR_GET_CHILD_SUBREAPER, &former_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~OrphanReaper() { ::prctl(PR_SET_CHILD_SUBREAPER, former_); }
  OrphanReaper(const OrphanReaper&) = delete;

 private:
  int former_ = 0;
};

/// The page in which a rank notes what it does.
class StatusPage {
 public:
  StatusPage() : file_(::memfd_create("tessera-status", MFD_CLOEXEC)) {
    check(file_.open() && ::ftruncate(file_.number(), sizeof(Status)) == 0,
          "launch: memfd_create: ", std::strerror(errno));
    void* const page = ::mmap(nullptr, sizeof(Status), PROT_READ | PROT_WRITE, MAP_SHARED, file_.number(), 0);
    check(page != MAP_FAILED, "launch: mmap: ", std::strerror(errno));
    status_ = ::new (page) Status();
  }
  ~StatusPage() { ::munmap(status_, sizeof(Status)); }
  StatusPage(const StatusPage&) = delete;
  int file() const { return file_.number(); }
  const Status& operator*() const { return *status_; }
  const Status* operator->() const { return status_; }

 private:
  File file_;
  Status* status_ = nullptr;
};

/// Seconds that the program of a script has to save and end after a signal that ended the script at once.
constexpr double kLeftover = 60;

/// What a rank writes to one of its standard files, cut into lines.
struct Stream {
  File from = File();
  bool is_error = false;
  std::string rest = {};
};

struct Process {
  int rank = 0;
  pid_t pid = -1;  // and the id of the process group of all that it starts
  File end;        // readable once the process has ended
  File lifeline;   // the end of a pipe that closes when this process dies (kLauncherVariable)
  std::unique_ptr<StatusPage> page;
  std::array<Stream, 2> streams;
  int log = -1;
  bool waited_for = false, ended = false, killed_by_us = false;
  std::optional<Deadline> leftover;  // for what its script left in the group when a signal ended it
  int status = 0;                    // of waitpid
  int order = 0;                     // in which the failed ones ended; 0: not failed

  bool failed() const { return ended && status != 0; }
};

std::string random_token() {
  unsigned char bytes[16];
  check(::getrandom(bytes, sizeof(bytes), 0) == sizeof(bytes), "launch: getrandom: ", std::strerror(errno));
  std::string text;
  for (const unsigned char byte : bytes)
    text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
  return text;
}

struct Address {
  std::string host;
  int port = 0;
};

Address parse_master(const std::string& text) {
  const size_t colon = text.rfind(':');
  Address address{text.substr(0, std::min(colon, text.size()))};
  const std::string port = colon == std::string::npos ? "" : text.substr(colon + 1);
  const auto [end, code] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  check(!address.host.empty() && !port.empty() && code == std::errc() && end == port.data() + port.size() &&
            address.port >= 1 && address.port <= 65535,
        "launch: --master \"", text, "\"; expected HOST:PORT, such as node0:29500");
  return address;
}

int rank_of(const LaunchOptions& options, int local) {
  return options.node * options.ranks + local;
}

std::string log_of(const LaunchOptions& options, int rank) {
  return options.logs + "/rank-" + std::to_string(rank) + ".log";
}

/// The logs of this machine's ranks, in the order of their local numbers, each locked for as long as the
/// launch lives: several machines may share the directory, two jobs may not.
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

/// A line between what an earlier launch left in the logs and what this one adds.
void begin_logs(const std::vector<File>& logs, const std::vector<std::string>& command) {
  std::string line = "\n==== tessera launch --";
  for (const std::string& word : command) line += " " + word;
  for (const File& log : logs) {
    struct stat facts {};
    if (::fstat(log.number(), &facts) == 0 && facts.st_size > 0) write_all(log.number(), line + " ====\n");
  }
}

/// One start of all ranks of this machine, to their end.
class Job {
 public:
  Job(const LaunchOptions& options, const std::vector<std::string>& command, const Signals& signals,
      const std::vector<File>& logs, const File& listener, const Address& master, const std::string& token,
      int attempt)
      : options_(options), signals_(signals) {
    for (int local = 0; local < options.ranks; ++local) {
      const std::map<std::string, std::string> variables = variables_of(local, master, token, attempt);
      start(local, command, variables, logs[size_t(local)], listener);
    }
  }

  ~Job() {
    for (Process& process : processes_)
      if (!process.ended) {
        send(process, SIGKILL);
        if (!process.waited_for) ::waitpid(process.pid, nullptr, 0);
      }
  }
  Job(const Job&) = delete;

  void wait() {
    while (!std::ranges::all_of(processes_, [](const Process& p) { return p.ended; })) {
      std::vector<pollfd> files{{signals_.file(), POLLIN, 0}};
      for (const Process& p : processes_) {
        if (!p.waited_for) files.push_back({p.end.number(), POLLIN, 0});
        for (const Stream& stream : p.streams) files.push_back({stream.from.number(), POLLIN, 0});
      }
      const int ready = ::poll(files.data(), files.size(), milliseconds_to_wait());
      check(ready >= 0 || errno == EINTR, "launch: poll: ", std::strerror(errno));
      read_streams(false);
      while (const int signal = signals_.take()) pass_on(signal);
      collect();
      if (patience_ && patience_->passed()) kill_rest();
    }
    read_streams(true);
    if (failed_ > 0) end_groups();
  }

  bool interrupted() const { return interrupted_; }
  /// The rank that failed first; null if none did.
  const Process* first_failed() const {
    const Process* first = nullptr;
    for (const Process& p : processes_)
      if (p.failed() && !p.killed_by_us && (!first || p.order < first->order)) first = &p;
    if (!first) return nullptr;
    // It may have ended because of another one, which is collected after it.
    const int blamed = (*first->page)->caused_by;
    for (const Process& p : processes_)
      if (p.rank == blamed && p.failed() && !p.killed_by_us) return &p;
    return first;
  }
  int code() const {
    int code = 0;
    for (const Process& p : processes_)
      if (code == 0) code = code_of(p);
    return code;
  }
  static int code_of(const Process& p) {
    return WIFSIGNALED(p.status) ? 128 + WTERMSIG(p.status) : WEXITSTATUS(p.status);
  }
  /// The folder of the run, if there is one already.
  std::string run() const {
    const auto& text = (*processes_.front().page)->run;
    return std::string(text, ::strnlen(text, sizeof(text)));
  }

  /// The error with which a rank ended before a run began; "" if that is not how it ended.
  std::string error_at_start(const Process& p) const {
    const Status& status = **p.page;
    return WIFEXITED(p.status) && status.step < 0 && run().empty() ? terminated(status.error) : "";
  }

  std::string cause(const Process& p) const {
    const Status& status = **p.page;
    MessageStream text;
    text << "rank " << p.rank << " (pid " << p.pid << " on " << comm::host_name() << ") ";
    if (WIFSIGNALED(p.status))
      text << "was killed by signal " << WTERMSIG(p.status) << " (" << ::strsignal(WTERMSIG(p.status)) << ")";
    else
      text << "ended with status " << WEXITSTATUS(p.status);
    if (const int64_t step = status.step; step >= 0) text << " in step " << step;
    if (status.call[0]) text << (status.in_call ? ", in " : ", after ") << terminated(status.call);
    if (status.error[0]) text << ": " << terminated(status.error);
    text << "; see " << log_of(options_, p.rank);
    return text.str();
  }

 private:
  template <size_t N>
  static std::string terminated(const char (&text)[N]) {
    return std::string(text, ::strnlen(text, N));
  }

  std::map<std::string, std::string> variables_of(int local, const Address& master, const std::string& token,
                                                  int attempt) const {
    std::map<std::string, std::string> v = {
        {"RANK", std::to_string(rank_of(options_, local))},
        {"WORLD_SIZE", std::to_string(options_.ranks * options_.nodes)},
        {"LOCAL_RANK", std::to_string(local)},
        {"LOCAL_WORLD_SIZE", std::to_string(options_.ranks)},
        {"MASTER_ADDR", master.host},
        {"MASTER_PORT", std::to_string(master.port)},
        {"TESSERA_JOB",
         token + "-" + std::to_string(attempt)},  // one that was killed may still be in the queue
        {"TESSERA_RESTART", std::to_string(attempt)},
        {"NCCL_NVLS_ENABLE", "0"}};
    const char *own = std::getenv("TESSERA_THREADS"), *openmp = std::getenv("OMP_NUM_THREADS");
    if (!(own && *own) && !(openmp && *openmp))
      v["TESSERA_THREADS"] = std::to_string(std::max(1, cpu_threads() / options_.ranks));
    return v;
  }

  void start(int local, const std::vector<std::string>& command,
             const std::map<std::string, std::string>& variables, const File& log, const File& listener) {
    Process process;
    process.rank = rank_of(options_, local);
    process.page = std::make_unique<StatusPage>();
    process.log = log.number();
    int pipes[2][2];
    for (auto& ends : pipes) check(::pipe2(ends, O_CLOEXEC) == 0, "launch: pipe: ", std::strerror(errno));
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    int lifeline[2];
    check(::pipe2(lifeline, O_CLOEXEC) == 0, "launch: pipe: ", std::strerror(errno));
    const File for_the_rank(lifeline[0]);
    process.lifeline = File(lifeline[1]);
    const pid_t parent = ::getpid();
    // Until the rank has a group of its own: Ctrl-C is passed on to it, and once.
    const WithoutSignals held{SIGINT, SIGTERM, SIGHUP};
    process.pid = ::fork();
    check(process.pid >= 0, "launch: fork: ", std::strerror(errno));
    if (process.pid > 0) ::setpgid(process.pid, process.pid);  // the first of the two that comes to it
    if (process.pid == 0) {
      signals_.restore();
      become(parent, pipes[0][1], pipes[1][1], process.page->file(), for_the_rank.number(),
             local == 0 && options_.node == 0 ? listener.number() : -1, variables);
      ::pthread_sigmask(SIG_SETMASK, &held.before(), nullptr);
      ::execvp(arguments[0], arguments.data());
      const std::string text = "tessera: launch: " + command[0] + ": " + std::strerror(errno) + "\n";
      if (::write(STDERR_FILENO, text.data(), text.size()) < 0) ::_exit(126);
      ::_exit(127);
    }
    for (int i = 0; i < 2; ++i) {
      ::close(pipes[i][1]);
      process.streams[size_t(i)].from = File(pipes[i][0]), process.streams[size_t(i)].is_error = i == 1;
      ::fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
    }
    // Not SIGCHLD: a thread that does not block it, such as one of the CUDA driver, would take it and drop
    // it.
    process.end = File(int(::syscall(SYS_pidfd_open, process.pid, 0)));
    const int error = process.end.open() ? 0 : errno;
    if (options_.started) options_.started(process.rank, int(process.pid));
    processes_.push_back(std::move(process));
    check(error == 0, "launch: pidfd_open: ", std::strerror(error), "; it needs Linux 5.3 or newer");
  }

  /// In the child: the rank's group, files and variables.
  static void become(pid_t parent, int out, int err, int page, int lifeline, int listener,
                     const std::map<std::string, std::string>& variables) {
    // A group of its own: Ctrl-C reaches the launcher alone, which passes it on once.
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(125);  // it died before
    const int nothing = ::open("/dev/null", O_RDONLY);
    ::dup2(nothing, STDIN_FILENO), ::dup2(out, STDOUT_FILENO), ::dup2(err, STDERR_FILENO);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    ::setenv(comm::kStatusVariable, std::to_string(::dup(page)).c_str(), 1);
    // PR_SET_PDEATHSIG ends this process alone, not the programs of a script.
    struct stat facts {};
    ::fstat(lifeline, &facts);
    const std::string pipe = std::to_string(::dup(lifeline)) + ":" + std::to_string(facts.st_ino);
    ::setenv(kLauncherVariable, pipe.c_str(), 1);
    if (listener >= 0)
      ::setenv("TESSERA_LISTENER", std::to_string(::dup(listener)).c_str(), 1);
    else
      ::unsetenv("TESSERA_LISTENER");
  }

  void read_streams(bool to_the_end) {
    for (Process& p : processes_)
      for (Stream& stream : p.streams) {
        std::array<char, 1 << 16> bytes;
        while (stream.from.open()) {
          const ssize_t got = ::read(stream.from.number(), bytes.data(), bytes.size());
          if (got > 0) {
            write_all(p.log, {bytes.data(), size_t(got)});
            stream.rest.append(bytes.data(), size_t(got));
            pass_lines(p, stream);
          } else if (got == 0 || (errno != EINTR && errno != EAGAIN)) {
            stream.from.close();
          } else if (errno == EAGAIN) {
            break;
          }
        }
        if (!stream.rest.empty() && (to_the_end || !stream.from.open())) {
          stream.rest += '\n';
          pass_lines(p, stream);
        }
      }
  }

  void pass_lines(const Process& p, Stream& stream) const {
    size_t end;
    while ((end = stream.rest.find('\n')) != std::string::npos) {
      (stream.is_error ? options_.err
                       : options_.out)("[" + std::to_string(p.rank) + "] " + stream.rest.substr(0, end + 1));
      stream.rest.erase(0, end + 1);
    }
  }

  int milliseconds_to_wait() const {
    constexpr int kLook = 50;  // nothing tells that a group has ended
    if (std::ranges::any_of(processes_, [](const Process& p) { return p.waited_for && !p.ended; }))
      return kLook;
    return patience_ ? patience_->milliseconds() : -1;
  }

  /// To all processes of the ranks, as a terminal does: a shell script does not pass it on to the program
  /// that it runs.
  void pass_on(int signal) {
    interrupted_ = true;
    for (const Process& p : processes_)
      if (!p.ended) send(p, signal);
  }

  static void send(const Process& p, int signal) {
    // A rank may have left its group.
    if (::kill(-p.pid, signal) != 0 && !p.waited_for) ::kill(p.pid, signal);
  }

  /// Whether processes are left in the group of a rank that was waited for. They are this process's children
  /// (OrphanReaper).
  static bool group_left(const Process& p) {
    pid_t one;
    while ((one = ::waitpid(-p.pid, nullptr, WNOHANG)) > 0) {
    }
    return one == 0;
  }

  void collect() {
    for (Process& p : processes_) {
      if (p.ended) continue;
      if (!p.waited_for && ::waitpid(p.pid, &p.status, WNOHANG) != p.pid) continue;
      p.waited_for = true;
      if (interrupted_ && group_left(p)) {
        if (!p.leftover) p.leftover.emplace(kLeftover);
        if (!p.leftover->passed()) continue;
        ::kill(-p.pid, SIGKILL);
      }
      p.ended = true;
      if (p.status == 0) continue;
      p.order = ++failed_;
      if (!patience_) patience_.emplace(options_.grace);
    }
  }

  void kill_rest() {
    patience_.reset();
    for (Process& p : processes_)
      if (!p.ended) p.killed_by_us = true, send(p, SIGKILL);
  }

  /// Ends what ranks that have ended left behind, which would go on next to a restart.
  void end_groups() const {
    for (const Process& p : processes_) {
      if (!group_left(p)) continue;
      ::kill(-p.pid, SIGKILL);
      while (::waitpid(-p.pid, nullptr, 0) > 0) {
      }
    }
  }

  const LaunchOptions& options_;
  const Signals& signals_;
  std::vector<Process> processes_;
  bool interrupted_ = false;
  int failed_ = 0;
  std::optional<Deadline> patience_;  // with the ranks that have not ended, after a failure
};

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
  Address master = options.master.empty() ? Address{"127.0.0.1", 0} : parse_master(options.master);
  File listener;
  if (options.node == 0) {
    listener = comm::listen_on(master.port, !comm::is_loopback(master.host));
    master.port = comm::port_of(listener);
  }
  const std::vector<File> logs = open_logs(options);
  begin_logs(logs, options.command);
  const std::string token = token_of(options);
  keep_child_status();
  const Signals signals;
  const OrphanReaper reaper;
  LaunchEnd end;
  std::vector<std::string> command = options.command;
  std::string error_before;  // Job::error_at_start of the start before
  while (true) {
    Job job(options, command, signals, logs, listener, master, token, end.restarted);
    job.wait();
    const Process* const failed = job.first_failed();
    end.code = job.code();
    end.cause.clear();
    if (!failed || job.interrupted()) return end;
    end.code = Job::code_of(*failed);
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
