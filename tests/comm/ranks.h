#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/tcp.h"

/// Ranks as processes: forked here, joined by the transport tcp. Nothing has a time limit; that is ctest's.

namespace tessera::comm::test {

/// How a rank's process ended: by a signal, or with 0, 1 (an error, which it said) or 3 (a test failed).
struct Ended {
  int code = -1, signal = 0;
  std::string said;  // the error's message
};

/// What a rank can do besides its calls.
class Rank {
 public:
  Rank(int number, int out, int in) : number_(number), out_(out), in_(in) {}
  int number() const { return number_; }
  /// Tells the test that this rank has reached this point.
  void arrive() const;
  /// Waits for the test's word (Ranks::release).
  void await() const;

 private:
  int number_, out_, in_;
};

class Ranks {
 public:
  using Main = std::function<void(Communicator&, const Rank&)>;
  /// Changes what a rank says of itself.
  using Change = std::function<void(RendezvousOptions&)>;
  Ranks(int size, const Main& main, const Change& change = {});
  /// Processes that run main(rank, where rank 0 listens), each independently.
  Ranks(int size, const std::function<void(const Rank&, const RendezvousOptions&)>& main);
  ~Ranks();
  Ranks(const Ranks&) = delete;

  void send(int rank, int signal) const;
  /// Waits until the rank arrives; false if it ended instead.
  bool await_arrival(int rank);
  void release(int rank) const;
  /// Until the rank's first thread waits for something.
  void await_sleep(int rank) const;
  /// The rank's process, once it has ended.
  Ended wait(int rank);
  std::vector<Ended> wait_all();
  pid_t pid(int rank) const { return processes_[size_t(rank)].pid; }

 private:
  struct Process {
    pid_t pid = -1;
    int from = -1, to = -1;
    std::string said;
    bool arrived = false, ended = false;
    Ended end;
  };
  void start(int size, const std::function<void(const Rank&, const RendezvousOptions&)>& main);
  std::vector<Process> processes_;
};

}  // namespace tessera::comm::test
