#include "tests/comm/ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <stdexcept>

namespace tessera::comm::test {
namespace {

constexpr char kArrival = '\1';

long read_byte(int file, char& byte) {
  long got;
  while ((got = ::read(file, &byte, 1)) < 0 && errno == EINTR) {
  }
  return got;
}

void write_bytes(int file, const std::string& bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const long put = ::write(file, bytes.data() + done, bytes.size() - done);
    if (put <= 0 && errno != EINTR) return;
    done += put > 0 ? size_t(put) : 0;
  }
}

}  // namespace

void Rank::arrive() const {
  write_bytes(out_, std::string(1, kArrival));
}

void Rank::await() const {
  char byte;
  if (read_byte(in_, byte) != 1) ::_exit(4);
}

Ranks::Ranks(int size, const Main& main, const Change& change) {
  start(size, [&](const Rank& rank, const RendezvousOptions& where) {
    RendezvousOptions rendezvous = where;
    if (change) change(rendezvous);
    Communicator communicator = connect_tcp({.rendezvous = rendezvous});
    try {
      main(communicator, rank);
    } catch (const RankFailure&) {
      throw;
    } catch (const std::exception& error) {
      communicator.fail(error.what());
      throw;
    }
  });
}

Ranks::Ranks(int size, const std::function<void(const Rank&, const RendezvousOptions&)>& main) {
  start(size, main);
}

void Ranks::start(int size, const std::function<void(const Rank&, const RendezvousOptions&)>& main) {
  const File listener = listen_on(0, false);
  const int port = port_of(listener);
  for (int r = 0; r < size; ++r) {
    int up[2], down[2];
    if (::pipe2(up, O_CLOEXEC) != 0 || ::pipe2(down, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(up[0]), ::close(down[1]);
      for (const Process& other : processes_) ::close(other.from), ::close(other.to);
      RendezvousOptions rendezvous{.rank = r, .size = size, .port = port, .token = "test"};
      const int own = r == 0 ? ::dup(listener.number()) : -1;
      if (r == 0) rendezvous.listener = own;
      ::close(listener.number());
      int code = 0;
      try {
        main(Rank(r, up[1], down[0]), rendezvous);
      } catch (const Error& error) {
        write_bytes(up[1], error.message());
        code = 1;
      } catch (const std::exception& error) {
        write_bytes(up[1], error.what());
        code = 1;
      }
      ::_exit(::testing::Test::HasFailure() ? 3 : code);
    }
    ::close(up[1]), ::close(down[0]);
    processes_.push_back({.pid = pid, .from = up[0], .to = down[1]});
  }
}

Ranks::~Ranks() {
  for (Process& process : processes_) {
    if (!process.ended) ::kill(process.pid, SIGKILL), ::waitpid(process.pid, nullptr, 0);
    ::close(process.from), ::close(process.to);
  }
}

void Ranks::send(int rank, int signal) const {
  ::kill(pid(rank), signal);
}

bool Ranks::await_arrival(int rank) {
  Process& process = processes_[size_t(rank)];
  char byte;
  while (read_byte(process.from, byte) == 1) {
    if (byte == kArrival) return true;
    process.said += byte;
  }
  return false;
}

void Ranks::release(int rank) const {
  write_bytes(processes_[size_t(rank)].to, "x");
}

void Ranks::await_sleep(int rank) const {
  for (std::string state; state != "S"; ::usleep(1000)) {
    std::ifstream stat("/proc/" + std::to_string(pid(rank)) + "/stat");
    std::string word;
    while (stat >> word && word.back() != ')') {
    }
    ASSERT_TRUE(stat >> state);
  }
}

Ended Ranks::wait(int rank) {
  Process& process = processes_[size_t(rank)];
  if (process.ended) return process.end;
  while (await_arrival(rank)) {
  }
  int status = 0;
  while (::waitpid(process.pid, &status, 0) < 0 && errno == EINTR) {
  }
  process.ended = true;
  process.end.said = process.said;
  if (WIFSIGNALED(status)) process.end.signal = WTERMSIG(status);
  if (WIFEXITED(status)) process.end.code = WEXITSTATUS(status);
  return process.end;
}

std::vector<Ended> Ranks::wait_all() {
  std::vector<Ended> all;
  for (size_t r = 0; r < processes_.size(); ++r) all.push_back(wait(int(r)));
  return all;
}

}  // namespace tessera::comm::test
