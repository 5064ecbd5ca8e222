#pragma once

#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/call.h"

namespace tessera::comm {

class CallCheck;

/// A call failed because of another rank, or because the ranks disagree. Every rank of the job gets it, with
/// the same cause: the message names the rank that failed first.
class RankFailure : public Error {
 public:
  RankFailure(const std::string& message, int rank, const char* file, int line)
      : Error(message, file, line), rank_(rank) {}
  /// The rank that failed first; -1 if none of them did (the ranks disagree).
  int rank() const { return rank_; }

 private:
  int rank_;
};

[[noreturn]] void fail_for(int rank, const std::string& message, Site site = Site::here());

/// What carries out the calls of a Communicator (comm/communicator.h), which has checked the tensors: packed,
/// on a device that the transport takes. One thread at a time.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual bool takes(Device device) const = 0;
  /// This rank's device: for data that a call exchanges in addition to the caller's tensors.
  virtual Device device() const { return Device::cpu(); }
  /// `in`: the tensor that this rank passes; `out`: the result. all_reduce and broadcast are in place (in =
  /// out); send has no `out` and receive no `in`.
  virtual void run(const Call& call, const Tensor& in, const Tensor& out) = 0;
  /// The calls with these names, which take more than two tensors.
  virtual void reduce_parts(const Call& call, const Tensor& x, std::span<const int64_t> ends) = 0;
  virtual void share(const Call& call, std::span<const Tensor> tensors, std::span<const int> owners) = 0;
  /// A transport for a subset of the ranks: ranks[i] is the rank here of its rank i. Called by those ranks
  /// only; `id` is the same for all of them.
  virtual std::shared_ptr<Transport> part(const std::vector<int>& ranks, uint64_t id) = 0;
  /// Until it is called with no thread's id, calls of other threads throw, those of transports made by part()
  /// too: only where two threads' calls would mix, that is on the host.
  virtual void keep_to(std::thread::id) {}
  /// Throws if a call of this thread would throw because of keep_to(). For a call that is about to be
  /// counted: the count of a refused one is the other thread's.
  virtual void check_thread(Kind) const {}
  /// See Links::call_check; of transports on the host.
  virtual CallCheck& call_check() {
    fail_at(Site::here(), name(), ": calls cannot be compared after they were made");
  }
  /// Tells the other ranks that this one has failed and why; any thread.
  virtual void fail(const std::string& cause) = 0;
};

}  // namespace tessera::comm
