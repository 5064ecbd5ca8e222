#pragma once

#include <memory>
#include <span>
#include <string>

#include "comm/communicator.h"

namespace tessera::comm {

/// Sums over two ranks of ranges of one tensor, for GPUs that reach each other's memory. The bytes are moved
/// by the GPUs' copy engines and waited for by their streams; only the additions take SMs.
/// Kernels that compute at the same time keep all of theirs, where the kernels of a communicator hold some
/// for as long as the links are busy.
///
/// Each rank owns a part of a range. It receives the other's values of that part in memory set aside for it,
/// adds them, and writes the sums to the other's tensor. Bits are those of Communicator::all_reduce.
///
/// Calls are issued to the device's stream (runtime/stream_scope.h) and can be captured in a graph. The ranks
/// must make the same calls in the same order. All ranks make and end it together.
class PeerSums {
 public:
  /// Why the ranks cannot add ranges of such a tensor this way, the same text on all of them; "" if they can.
  /// All ranks call it. `host` takes the CPU.
  static std::string lacks(const Communicator& host, const Tensor& arena);

  /// `arena`: packed, one dimension, f32, bf16 or f16, as large on both ranks; where lacks() is "".
  PeerSums(const Communicator& host, const Tensor& arena);
  /// After a failure, streams that wait for the other rank are released first.
  ~PeerSums();
  PeerSums(const PeerSums&) = delete;

  /// x = the sum of both ranks' x, a range of the arena.
  void all_reduce(const Tensor& x) const;
  /// Elements up to ends[0] of x = their sum on rank 0, the others on rank 1; what x holds elsewhere is
  /// undefined then.
  void reduce_parts(const Tensor& x, std::span<const int64_t> ends) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::comm
