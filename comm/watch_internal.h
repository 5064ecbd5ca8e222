#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/call.h"
#include "comm/rendezvous.h"

namespace tessera::comm {

struct Failure {
  int rank;  // which failed first; -1: the ranks disagree
  std::string text;
};

/// Propagates the failure of one rank to all. Every rank has a connection to rank 0 that carries only
/// notices, and a thread that listens to it; rank 0 forwards the first failure that it learns of. A rank
/// whose connection closes without a notice has died. A closed data connection is less conclusive: a rank
/// that ends because of another rank's failure closes them as well.
class Watch {
 public:
  /// `lost` and `grace` as in TcpOptions.
  Watch(const RendezvousOptions& options, std::vector<Member> members, std::vector<File> notices,
        std::function<void(const std::string&)> lost, double grace);
  /// Tells the other ranks that this one leaves or, during stack unwinding, that it failed.
  ~Watch();
  Watch(const Watch&) = delete;

  /// Readable once there is a failure.
  int alarm() const { return alarm_.number(); }
  std::optional<Failure> failure() const;
  /// The rank as messages name it: "rank 2 (pid 4711 on node7)".
  std::string describe_rank(int rank) const;
  /// Reports a failure to all ranks, unless there has been one already.
  void fail(const Failure& failure);
  /// Call this when an exception has reported the failure to the program.
  void failure_reported();

  /// From set_peer() to its destruction, this rank waits in `call` for a message from `peer`. One at a time.
  class Waiting {
   public:
    Waiting(Watch& watch, const Call& call) : watch_(watch), call_(call) {}
    ~Waiting() { watch_.set_waiting(-1, nullptr); }
    Waiting(const Waiting&) = delete;
    void set_peer(int peer) { watch_.set_waiting(peer, &call_); }

   private:
    Watch& watch_;
    const Call& call_;
  };

  /// A rank that others wait for, and the call in which one of them waits for it.
  struct BlockingRank {
    int rank;
    std::string call;
  };
  /// Finds the rank that this rank ultimately waits for. The peer may itself wait for another rank: each is
  /// asked in turn, until one waits for none or does not answer within three seconds (its process is
  /// stopped). Only while a Waiting is alive.
  BlockingRank find_blocking_rank();
  /// The same for a wait that is not a Waiting.
  BlockingRank find_blocking_rank(const BlockingRank& first);
  /// What this rank waits for while no Waiting is alive, such as a call whose result the GPU waits for: asked
  /// on the thread of the watch. Empty: nothing, and the function before it is not running any more.
  void set_other_wait(std::function<std::optional<BlockingRank>()> wait);
  /// Whether rank 0 passes on what the others say; it may take three seconds to see that it does not.
  bool hears_rank_zero() { return rank_ == 0 || ask(0); }

 private:
  struct Incoming {
    int rank;
    const File* file;
    Notice notice = {};
    size_t got = 0;
  };
  /// What another rank is doing.
  struct Answer {
    int awaited;  // the rank it waits for; -1: none
    std::string call;
  };

  void set_waiting(int peer, const Call* call);
  std::optional<Answer> ask(int rank);
  void forward(const Notice& notice);
  void take(const Notice& notice);
  bool set_failure(const Failure& failure);
  void send_to_all(const Notice& notice);
  void listen();
  bool read(Incoming& from);
  void await_failure_reported();

  const int rank_, size_;
  const std::vector<Member> members_;
  const std::vector<File> notices_;
  const std::function<void(const std::string&)> lost_;
  const double grace_;
  const File alarm_, stop_;
  const int exceptions_;
  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::optional<Failure> failure_;
  bool failure_reported_ = false;
  int awaited_ = -1;
  const Call* call_ = nullptr;
  int asked_ = -1;
  std::optional<Answer> answer_;
  std::mutex sending_;
  std::mutex asking_;
  std::mutex other_waiting_;
  std::function<std::optional<BlockingRank>()> other_wait_;
  std::jthread thread_;  // last: it uses all the others
};

}  // namespace tessera::comm
