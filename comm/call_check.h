#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/call.h"
#include "comm/deadline.h"
#include "comm/socket.h"

namespace tessera::comm {

/// Compares the calls of all ranks after they were made, so that a call does not wait for the other ranks on
/// the host. A rank posts each call and goes on; a thread sends the descriptions to all other ranks, receives
/// theirs, and compares the first with the first, the second with the second, and so on. Where two differ, or
/// a rank has not made a call in time, the job fails on all ranks with the message of a synchronous call.
///
/// A call is confirmed when all other ranks are known to have made the same one. At most kMost calls are
/// unconfirmed: the next post() waits.
class CallCheck {
 public:
  static constexpr uint64_t kMost = 1024;

  /// What it needs of the links between the ranks. The functions may be called by any thread.
  class Job {
   public:
    virtual ~Job() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    /// A connection to the rank that nothing else uses.
    virtual const File& connection_for_check(int rank) = 0;
    /// File descriptor that is readable once the job has failed.
    virtual int alarm() const = 0;
    /// Reports to all ranks, unless the job has failed before: that the ranks disagree, that `rank` left the
    /// job before `call`, or that it did not make it within `seconds`.
    virtual void report_disagreement(const std::string& text) = 0;
    virtual void report_left(int rank, const Call& call) = 0;
    virtual void report_late(int rank, const Call& call, double seconds) = 0;
    /// Throws the RankFailure of a job that has failed.
    [[noreturn]] virtual void throw_failure(const Call& call) = 0;
  };

  /// All ranks construct it at the same point of their calls. `job` must outlive it.
  explicit CallCheck(Job& job);
  /// Sends what was posted, for at most a second.
  ~CallCheck();
  CallCheck(const CallCheck&) = delete;

  /// Adds a call that all ranks make. `seconds`: deadline for the other ranks to make it; 0: none. Throws
  /// RankFailure if the job has failed.
  void post(const Call& call, double seconds = call_timeout());
  /// Returns when all calls posted so far are confirmed; throws RankFailure if the job has failed, whichever
  /// call it was.
  void confirm();
  /// Throws RankFailure if the job fails within so many seconds.
  void throw_failure_within(double seconds);
  /// Sends what was posted at once, instead of with later calls: a wait for its confirmation is near.
  void send_now() noexcept;
  bool failed() const noexcept { return failed_; }
  bool confirmed() const noexcept { return confirmed_ >= posted_; }
  /// The first unconfirmed call, and a rank that has not made it; nothing if all are confirmed.
  struct Late {
    int rank;
    Call call;
  };
  std::optional<Late> late();

  /// Calls f once when the job fails, or at once if it has, on the thread of the comparison. `owner`
  /// identifies it for forget(), after which f is not running and will not be called.
  void on_failure(const void* owner, std::function<void()> f);
  void forget(const void* owner);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kReceived = 32;  // calls that are received at a time
  struct Peer {
    int rank;
    const File* file;
    uint64_t sent = 0;      // bytes
    uint64_t received = 0;  // calls
    std::array<Call, kReceived> incoming;
    size_t got = 0;  // bytes of `incoming`
  };

  void serve();
  bool send(Peer& peer, uint64_t posted);
  bool receive(Peer& peer, uint64_t posted);
  bool exchange(uint64_t posted);
  bool wait(Clock::duration most);
  uint64_t first_with_deadline() const;
  bool report_if_late();
  void publish();
  void end();
  template <class Ready>
  void await(const Ready& ready);
  void throw_failure();

  Job& job_;
  // Calls by number modulo kMost: written by post(), read by the thread until they are confirmed and sent.
  std::vector<Call> calls_{kMost};
  std::vector<Deadline> deadlines_{kMost, Deadline(0)};
  std::vector<Peer> peers_;  // of the thread
  std::atomic<uint64_t> posted_ = 0, confirmed_ = 0, sent_ = 0;
  std::atomic<int> late_rank_ = -1;
  std::atomic<bool> asleep_ = false;  // the thread looks for calls only if it is woken
  std::atomic<bool> failed_ = false, stop_ = false;
  const File wake_;
  std::mutex posting_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mutex listening_;
  std::map<const void*, std::function<void()>> listeners_;
  std::jthread thread_;  // last: it uses all the others
};

}  // namespace tessera::comm
