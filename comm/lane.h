#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/peer_sums.h"

namespace tessera::comm {

/// Calls of a communicator that run next to the computation: each begins when the work that this thread has
/// issued before it is done, in the order in which they are given, and what is issued after join() begins
/// when all of them are done. In between, their tensors may not be read or written, nor other calls made of
/// the communicator.
///
/// On the CPU a thread of its own makes the calls, on copies of the tensors, which are as large as the
/// largest of them. On a GPU they are issued to a stream of their own; within a graph that is being captured
/// they become branches of it. Sums of a communicator over more than two GPUs need memory of the compute
/// stream: there the calls run in line.
class Lane {
 public:
  /// `peers`, if not null, makes the sums in place of the communicator and outlives this.
  Lane(const Communicator& communicator, Device device, const PeerSums* peers = nullptr);
  /// Calls that were not joined have failed: the other ranks are told.
  ~Lane();
  Lane(const Lane&) = delete;

  /// As those of the communicator, which they are. What one throws on the CPU, join() throws; calls between
  /// the two are not made.
  void all_reduce(const Tensor& x);
  void reduce_parts(const Tensor& x, std::vector<int64_t> ends);
  /// The same with this rank's part in `own`, which has as many elements; x is undefined then.
  void reduce_parts(const Tensor& x, std::vector<int64_t> ends, const Tensor& own);
  void join();
  /// Calls since the last join().
  size_t posted() const { return posted_; }
  /// What this thread issues from here on begins when the first `calls` of them are done: their tensors may
  /// be written again.
  void wait(size_t calls);
  /// Milliseconds for which the last join(), and wait() before it, held up the computation: the part of the
  /// communication that nothing hid. Waits for the device. Negative before the first join().
  double exposed_ms() const;

  using Act = std::function<void(const Communicator&, const Tensor&)>;
  /// Where elements of a call's tensor go, from `begin` on, instead of back to it; undefined: they go back.
  struct Target {
    Tensor tensor;
    int64_t begin = 0;
  };
  /// How the calls are made to run next to.
  class Way {
   public:
    virtual ~Way() = default;
    virtual void post(Act act, const Tensor& x, const Target& target) = 0;
    virtual void wait(size_t calls) = 0;
    virtual void join() = 0;
    virtual double exposed_ms() const = 0;
  };

 private:
  void post(Act act, const Tensor& x, const Target& target);
  const int rank_;
  const PeerSums* const peers_;
  size_t posted_ = 0;
  std::unique_ptr<Way> way_;
};

}  // namespace tessera::comm
