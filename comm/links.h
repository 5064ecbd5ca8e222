#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport.h"

namespace tessera::comm {

class CallCheck;

/// One message of an exchange.
struct Transfer {
  enum class Direction { send, receive } direction;
  int peer;
  void* data;  // only read if it is sent
  size_t bytes;
};

/// Point-to-point messages between the ranks of a job, from which collectives are built (host_transport.cpp).
class Links {
 public:
  virtual ~Links() = default;
  virtual const char* name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Does all transfers concurrently, none to this rank itself; messages from one rank to another keep the
  /// order of the list. Every message carries its sender's call. Throws RankFailure on all ranks if that is
  /// not what `call` expects (Call::agrees_with), if a rank fails, or at the deadline. `ranks[i]` is the rank
  /// in these links of rank i of the communicator, for error messages.
  virtual void exchange(const Call& call, std::span<const Transfer> transfers,
                        std::span<const int> ranks) = 0;
  /// Sums x over all ranks in place, in the order of sum_in_tree, if the links have a native way to do that;
  /// otherwise returns false and does nothing.
  virtual bool sum(const Call&, const Tensor&, std::span<const int>) { return false; }
  /// out = the sum over all ranks of the part of `in` at this rank's place, likewise; out may be that part.
  virtual bool sum_scatter(const Call&, const Tensor& /*in*/, const Tensor& /*out*/, std::span<const int>) {
    return false;
  }
  /// Sums parts[r] over all ranks on rank r alone, likewise.
  virtual bool sum_parts(const Call&, std::span<const Tensor>, std::span<const int>) { return false; }
  /// The device of the messages' memory.
  virtual Device device() const { return Device::cpu(); }
  virtual void fail(const std::string& cause) = 0;
  /// The comparison of calls that do not wait for the other ranks on the host (comm/call_check.h). The first
  /// call of this function makes it: by all ranks, at the same point of their calls.
  virtual CallCheck& call_check();
  /// Whether the function above has been called. Then it compares the calls of these links, too: their order
  /// among the others.
  bool has_call_check() const { return has_call_check_; }

  /// Makes the calls of all threads but this one throw; of none, if it is no thread's. See
  /// Transport::keep_to, check_thread.
  void keep_to(std::thread::id thread) { only_ = thread; }
  void check_thread(Kind kind) const;

 protected:
  std::atomic<bool> has_call_check_ = false;

 private:
  std::atomic<std::thread::id> only_ = {};
};

/// Collectives on top of point-to-point messages. A sum over ranks is a fixed binary tree over the
/// ranks, ((0 + 1) + (2 + 3)) + ..., each addition rounded to the tensor's dtype: bitwise the same
/// whatever the sizes of messages and their timing. An all_reduce is a reduce-scatter (each rank
/// receives its elements from all others and sums them) and an all-gather: each rank sends 2 (n - 1) / n
/// of the tensor's bytes.
std::shared_ptr<Transport> make_host_transport(std::shared_ptr<Links> links);

/// The message for two ranks whose calls differ, the lower rank first.
std::string disagreement(const Call& ours, int our_rank, const Call& theirs, int their_rank);

/// parts[0] = the sum by the binary tree; overwrites the other parts. Any device.
void sum_in_tree(std::vector<Tensor>& parts);

}  // namespace tessera::comm
