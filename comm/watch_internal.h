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

/// Sees to it that a failure of one rank becomes known to all. Every rank has a connection to rank 0 on which
/// nothing but notices travels, and a thread that listens to it; rank 0 passes on the first failure it hears
/// of. A rank whose connection ends without a notice was killed. That connections for messages end, too,
/// tells less: a rank that stops because of another one closes them just so.
class Watch {
 public:
  /// `lost` and `grace` as in TcpOptions.
  Watch(const Meeting& meeting, std::vector<Member> members, std::vector<File> notices,
        std::function<void(const std::string&)> lost, double grace);
  /// Takes leave of the others, or tells them of an exception that is being unwound.
  ~Watch();
  Watch(const Watch&) = delete;

  /// Readable once there is a failure.
  int alarm() const { return alarm_.number(); }
  std::optional<Failure> failure() const;
  /// The rank as messages name it: "rank 2 (pid 4711 on node7)".
  std::string named(int rank) const;
  /// Makes it the job's failure, unless there is one already.
  void fail(const Failure& failure);
  /// The program knows of the failure: an exception says so.
  void told();

  /// From set_peer() on, while it lives, this rank waits in `call` for a message of `peer`. One at a time.
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

  /// A rank that keeps others waiting, and the call that one of them waits in for it.
  struct Absent {
    int rank;
    std::string call;
  };
  /// Finds out on whom this rank waits in the end. The one whose message is missing may itself wait for
  /// another rank: each is asked in turn, until one waits for none or does not answer within three seconds
  /// (its process is stopped). Only while this rank is Waiting.
  Absent find_absent();
  /// Whether rank 0 passes on what the others say; it may take three seconds to see that it does not.
  bool hears_rank_zero() { return rank_ == 0 || ask(0); }

 private:
  struct Incoming {
    int rank;
    const File* file;
    Notice notice = {};
    size_t got = 0;
  };
  /// What another rank says of itself.
  struct Answer {
    int awaited;  // -1: it waits for no rank
    std::string call;
  };

  void set_waiting(int peer, const Call* call);
  std::optional<Answer> ask(int rank);
  void pass_on(const Notice& notice);
  void take(const Notice& notice);
  bool note(const Failure& failure);
  void send_to_all(const Notice& notice);
  void listen();
  bool read(Incoming& from);
  void await_told();

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
  bool told_ = false;
  int awaited_ = -1;
  const Call* call_ = nullptr;
  int asked_ = -1;
  std::optional<Answer> answer_;
  std::mutex sending_;
  std::jthread thread_;  // last: it uses all the others
};

}  // namespace tessera::comm
