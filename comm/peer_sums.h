#pragma once

#include <memory>
#include <span>
#include <string>

#include "comm/communicator.h"

namespace tessera::comm {

/// Sums over the ranks of one machine of ranges of one tensor, for GPUs that reach each other's memory. The
/// bytes are moved by the GPUs' copy engines and waited for by their streams; only the additions take SMs.
/// Kernels that compute at the same time keep all of theirs, where the kernels of a communicator hold some
/// for as long as the links are busy.
///
/// Each rank owns a part of a range. It receives the others' values of that part in memory set aside for
/// them (64 MiB), adds them, and writes the sums to the others' tensors. Bits are those of
/// Communicator::all_reduce.
///
/// Calls are issued to the device's stream (runtime/stream_scope.h) and can be captured in a graph. The ranks
/// must make the same calls in the same order. All ranks make and end it together.
class PeerSums {
 public:
  /// Why the ranks cannot add up tensors on their devices this way, the same text on all of them; "" if they
  /// can. All ranks call it. `host` takes the CPU.
  static std::string lacks(const Communicator& host, Device device);

  /// `arena`: packed, one dimension, f32, bf16 or f16, as large on all ranks, of which there are several;
  /// where lacks() is "".
  PeerSums(const Communicator& host, const Tensor& arena);
  /// After a failure, streams that wait for another rank are released first.
  ~PeerSums();
  PeerSums(const PeerSums&) = delete;

  /// x = the sum of all ranks' x, a range of the arena.
  void all_reduce(const Tensor& x) const;
  /// Elements ends[r - 1] (0 for r = 0) to ends[r] of x = their sum over all ranks, on rank r; what x holds
  /// elsewhere is undefined then.
  void reduce_parts(const Tensor& x, std::span<const int64_t> ends) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::comm
