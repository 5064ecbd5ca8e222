#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/peer_sums.h"

namespace tessera::comm {

/// Asynchronous collectives, overlapped with computation. Calls run in the order in which they are posted;
/// each starts when the work that this thread issued before it is done, and work issued after join() starts
/// when all calls are done. Until then their tensors must not be read or written, and the communicator must
/// not be used otherwise.
///
/// On the CPU a worker thread makes the calls, on a scratch copy (as large as the largest tensor). On a GPU
/// they are issued to a separate stream; in a graph being captured they become parallel branches. Exception:
/// a communicator of more than two GPUs needs memory of the compute stream, so without `peers` its calls are
/// issued there and do not overlap.
class Lane {
 public:
  /// `peers`, if not null, computes the sums instead of the communicator, and must outlive this.
  Lane(const Communicator& communicator, Device device, const PeerSums* peers = nullptr);
  /// Calls posted and not joined count as failed: the other ranks are told.
  ~Lane();
  Lane(const Lane&) = delete;

  /// Same contract as the calls of Communicator. On the CPU an exception of one is thrown by join(), and
  /// calls posted after it are dropped.
  void all_reduce(const Tensor& x);
  void reduce_parts(const Tensor& x, std::vector<int64_t> ends);
  /// The same, with this rank's part written to `own` (as many elements); x is undefined afterwards.
  void reduce_parts(const Tensor& x, std::vector<int64_t> ends, const Tensor& own);
  void join();
  /// Number of calls posted so far.
  size_t posted() const { return joined_ + posted_; }
  /// Work that this thread issues from here on starts when the first `calls` calls are done: their tensors
  /// may be written again.
  void wait(size_t calls);
  /// Exposed communication: milliseconds for which the last join(), and the wait()s before it, blocked the
  /// computation. Waits for the device. Negative before the first join().
  double exposed_ms() const;

  using Collective = std::function<void(const Communicator&, const Tensor&)>;
  /// Where a call's result goes, from element `begin` of it on, instead of back to x; undefined: back to x.
  struct Target {
    Tensor tensor;
    int64_t begin = 0;
  };
  /// How the calls run concurrently: a worker thread or a stream. Counts calls from the last join() on.
  class Backend {
   public:
    virtual ~Backend() = default;
    virtual void post(Collective collective, const Tensor& x, const Target& target) = 0;
    virtual void wait(size_t calls) = 0;
    virtual void join() = 0;
    virtual double exposed_ms() const = 0;
  };

 private:
  void post(Collective collective, const Tensor& x, const Target& target);
  const int rank_;
  const PeerSums* const peers_;
  size_t joined_ = 0, posted_ = 0;  // calls up to the last join(), and since then
  std::unique_ptr<Backend> backend_;
};

}  // namespace tessera::comm
