#include "dist/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "dist/child_status.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::dist {
namespace {

constexpr std::initializer_list<int> kHandled = {SIGINT, SIGTERM, SIGHUP};  // by InterruptGuard

/// What the new process needs, made before the fork: between fork and exec nothing may be allocated.
struct Start {
  std::vector<std::string> words, variables;
  std::vector<char*> arguments, environment;

  Start(const std::string& program, const std::vector<std::string>& given,
        const std::vector<std::pair<std::string, std::string>>& more) {
    words.push_back(program);
    words.insert(words.end(), given.begin(), given.end());
    for (char** variable = environ; *variable; ++variable) {
      const std::string text = *variable, name = text.substr(0, text.find('='));
      bool replaced = false;
      for (const auto& [other, value] : more) replaced |= other == name;
      if (!replaced) variables.push_back(text);
    }
    for (const auto& [name, value] : more) variables.push_back(name + "=" + value);
    for (std::string& word : words) arguments.push_back(word.data());
    for (std::string& variable : variables) environment.push_back(variable.data());
    arguments.push_back(nullptr), environment.push_back(nullptr);
  }
};

/// The new process, from the fork to the program. Only functions that are safe after a fork. Signals are held
/// back until it no longer has the handlers of this process: they would take one that asks it to end for one
/// of this process's, and the program would never learn of it.
[[noreturn]] void become(const Start& start, int in, int log, pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(128 + SIGTERM);  // it ended before that
  for (const int signal : kHandled) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) ::signal(signal, SIG_DFL);
  }
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  ::dup2(in, STDIN_FILENO), ::dup2(log, STDOUT_FILENO), ::dup2(log, STDERR_FILENO);
  ::execve(start.arguments.front(), start.arguments.data(), start.environment.data());
  constexpr char kFailed[] = "tessera: the program could not be started\n";
  if (::write(STDERR_FILENO, kFailed, sizeof kFailed - 1) < 0) ::_exit(126);
  ::_exit(127);
}

}  // namespace

ChildProcess::ChildProcess(const std::string& program, const std::vector<std::string>& arguments,
                           const std::filesystem::path& log,
                           const std::vector<std::pair<std::string, std::string>>& environment) {
  const Start start(program, arguments, environment);
  const int in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const int error = errno;
  int ends[2] = {-1, -1};
  const bool ready = in >= 0 && out >= 0 && ::pipe2(ends, O_CLOEXEC) == 0;
  if (ready) {
    dist::keep_child_status();
    const WithoutSignals held(kHandled);  // a new process has our handlers at first
    const pid_t parent = ::getpid();
    id_ = ::fork();
    if (id_ == 0) {
      ::fcntl(ends[1], F_SETFD, 0);  // stays open in the program, and is closed with its end
      become(start, in, out, parent);
    }
    if (id_ > 0) alive_ = std::exchange(ends[0], -1);
  }
  for (const int file : {in, out, ends[0], ends[1]})
    if (file >= 0) ::close(file);
  check(out >= 0, "process: ", log.string(), ": ", std::strerror(error));
  check(id_ > 0, "process: ", program, " could not be started: ", std::strerror(errno));
  ::setpgid(id_, id_);  // whichever of the two is first
}

ChildProcess::~ChildProcess() {
  if (id_ > 0) {
    ask_to_end(SIGTERM);
    while (::waitpid(id_, nullptr, 0) < 0 && errno == EINTR) continue;
  }
  if (alive_ >= 0) ::close(alive_);
}

void ChildProcess::ask_to_end(int signal) {
  if (id_ > 0 && std::exchange(asked_, asked_ != 0 ? asked_ : signal) == 0) ::kill(id_, signal);
}

std::optional<size_t> wait_any(std::vector<ChildProcess>& children,
                               std::optional<std::chrono::steady_clock::time_point> deadline) {
  const WithoutSignals held(kHandled);  // so that none arrives between signal_received() and the wait
  for (;;) {
    std::vector<pollfd> ends;
    for (const ChildProcess& child : children) ends.push_back({child.alive_, POLLIN, 0});
    timespec left{};
    if (deadline) {
      const auto rest = std::chrono::duration_cast<std::chrono::nanoseconds>(std::max(
          *deadline - std::chrono::steady_clock::now(), std::chrono::steady_clock::duration::zero()));
      left = {.tv_sec = rest.count() / 1'000'000'000, .tv_nsec = rest.count() % 1'000'000'000};
    }
    if (InterruptGuard::signal_received() != 0) return {};
    const int ready = ::ppoll(ends.data(), ends.size(), deadline ? &left : nullptr, &held.before());
    if (ready == 0) return {};
    if (ready < 0 && errno == EINTR) continue;  // the guard has noted what came, or it was for others
    check(ready > 0, "process: ppoll: ", std::strerror(errno));
    for (size_t i = 0; i < ends.size(); ++i)
      if (ends[i].revents != 0) return i;
  }
}

ChildEnd collect(ChildProcess& child) {
  int status = 0;
  pid_t found = 0;
  do found = ::waitpid(child.id_, &status, 0);
  while (found < 0 && errno == EINTR);
  check(found == child.id_, "process: waitpid: ", std::strerror(errno));
  child.id_ = -1;
  if (WIFSIGNALED(status)) return {128 + WTERMSIG(status), WTERMSIG(status)};
  return {WEXITSTATUS(status), 0};
}

}  // namespace tessera::dist
