#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "dist/launch_job_internal.h"
#include "dist/launch_logs_internal.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/parallel.h"

namespace tessera::dist {

using comm::File;
using comm::Status;

namespace {

/// Seconds that the program of a script has to save and end after a signal that ended the script at once.
constexpr double kLeftover = 60;

template <size_t N>
std::string terminated(const char (&text)[N]) {
  return std::string(text, ::strnlen(text, N));
}

}  // namespace

StatusPage::StatusPage() : file_(::memfd_create("tessera-status", MFD_CLOEXEC)) {
  check(file_.open() && ::ftruncate(file_.number(), sizeof(Status)) == 0,
        "launch: memfd_create: ", std::strerror(errno));
  void* const page = ::mmap(nullptr, sizeof(Status), PROT_READ | PROT_WRITE, MAP_SHARED, file_.number(), 0);
  check(page != MAP_FAILED, "launch: mmap: ", std::strerror(errno));
  status_ = ::new (page) Status();
}

StatusPage::~StatusPage() {
  ::munmap(status_, sizeof(Status));
}

LaunchJob::LaunchJob(const LaunchOptions& options, const std::vector<std::string>& command,
                     const LaunchSignals& signals, const std::vector<File>& logs, const File& listener,
                     const MasterAddress& master, const std::string& token, int attempt)
    : options_(options), signals_(signals) {
  for (int local = 0; local < options.ranks; ++local) {
    const std::map<std::string, std::string> variables = variables_of(local, master, token, attempt);
    start(local, command, variables, logs[size_t(local)], listener);
  }
}

LaunchJob::~LaunchJob() {
  for (RankProcess& process : processes_)
    if (!process.ended) {
      send(process, SIGKILL);
      if (!process.waited_for) ::waitpid(process.pid, nullptr, 0);
    }
}

void LaunchJob::wait() {
  while (!std::ranges::all_of(processes_, [](const RankProcess& p) { return p.ended; })) {
    std::vector<pollfd> files{{signals_.file(), POLLIN, 0}};
    for (const RankProcess& p : processes_) {
      if (!p.waited_for) files.push_back({p.end.number(), POLLIN, 0});
      for (const RankOutput& stream : p.streams) files.push_back({stream.from.number(), POLLIN, 0});
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

const RankProcess* LaunchJob::first_failed() const {
  const RankProcess* first = nullptr;
  for (const RankProcess& p : processes_)
    if (p.failed() && !p.killed_by_us && (!first || p.order < first->order)) first = &p;
  if (!first) return nullptr;
  // It may have ended because of another one, which is collected after it.
  const int blamed = (*first->page)->caused_by;
  for (const RankProcess& p : processes_)
    if (p.rank == blamed && p.failed() && !p.killed_by_us) return &p;
  return first;
}

int LaunchJob::code() const {
  int code = 0;
  for (const RankProcess& p : processes_)
    if (code == 0) code = code_of(p);
  return code;
}

int LaunchJob::code_of(const RankProcess& p) {
  return WIFSIGNALED(p.status) ? 128 + WTERMSIG(p.status) : WEXITSTATUS(p.status);
}

std::string LaunchJob::run() const {
  const auto& text = (*processes_.front().page)->run;
  return std::string(text, ::strnlen(text, sizeof(text)));
}

std::string LaunchJob::error_at_start(const RankProcess& p) const {
  const Status& status = **p.page;
  return WIFEXITED(p.status) && status.step < 0 && run().empty() ? terminated(status.error) : "";
}

std::string LaunchJob::cause(const RankProcess& p) const {
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

std::map<std::string, std::string> LaunchJob::variables_of(int local, const MasterAddress& master,
                                                           const std::string& token, int attempt) const {
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

void LaunchJob::start(int local, const std::vector<std::string>& command,
                      const std::map<std::string, std::string>& variables, const File& log,
                      const File& listener) {
  RankProcess process;
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

void LaunchJob::become(pid_t parent, int out, int err, int page, int lifeline, int listener,
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

void LaunchJob::read_streams(bool to_the_end) {
  for (RankProcess& p : processes_)
    for (RankOutput& stream : p.streams) {
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

void LaunchJob::pass_lines(const RankProcess& p, RankOutput& stream) const {
  size_t end;
  while ((end = stream.rest.find('\n')) != std::string::npos) {
    (stream.is_error ? options_.err
                     : options_.out)("[" + std::to_string(p.rank) + "] " + stream.rest.substr(0, end + 1));
    stream.rest.erase(0, end + 1);
  }
}

int LaunchJob::milliseconds_to_wait() const {
  constexpr int kLook = 50;  // nothing tells that a group has ended
  if (std::ranges::any_of(processes_, [](const RankProcess& p) { return p.waited_for && !p.ended; }))
    return kLook;
  return patience_ ? patience_->milliseconds() : -1;
}

void LaunchJob::pass_on(int signal) {
  interrupted_ = true;
  for (const RankProcess& p : processes_)
    if (!p.ended) send(p, signal);
}

void LaunchJob::send(const RankProcess& p, int signal) {
  // A rank may have left its group.
  if (::kill(-p.pid, signal) != 0 && !p.waited_for) ::kill(p.pid, signal);
}

bool LaunchJob::group_left(const RankProcess& p) {
  pid_t one;
  while ((one = ::waitpid(-p.pid, nullptr, WNOHANG)) > 0) {
  }
  return one == 0;
}

void LaunchJob::collect() {
  for (RankProcess& p : processes_) {
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

void LaunchJob::kill_rest() {
  patience_.reset();
  for (RankProcess& p : processes_)
    if (!p.ended) p.killed_by_us = true, send(p, SIGKILL);
}

void LaunchJob::end_groups() const {
  for (const RankProcess& p : processes_) {
    if (!group_left(p)) continue;
    ::kill(-p.pid, SIGKILL);
    while (::waitpid(-p.pid, nullptr, 0) > 0) {
    }
  }
}

}  // namespace tessera::dist
