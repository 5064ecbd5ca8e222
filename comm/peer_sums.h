#pragma once

#include <memory>
#include <span>
#include <string>

#include "comm/communicator.h"

namespace tessera::comm {

/// Sums, over the ranks of one machine, of ranges of a tensor, for GPUs with peer access to each other. The
/// copy engines copy the data (cudaMemcpyAsync), and streams wait for flags in memory; only the
/// additions take SMs. Compute kernels that run at the same time keep their SMs, where NCCL's kernels hold
/// some as long as the links are busy.
///
/// Each rank owns a part of a range. It receives the other ranks' values of that part in a buffer of
/// kReceived bytes, adds them, and writes the sums to the other ranks' tensors. Bitwise equal to
/// Communicator::all_reduce.
///
/// Calls are issued to the device's stream (runtime/stream_scope.h) and can be captured. All ranks must make
/// the same calls in the same order. Construction and destruction are collective. When the job fails, streams
/// that wait for another rank go on, with values that are not sums: the next wait for the device throws the
/// failure (comm/nccl.h).
class PeerSums {
 public:
  /// Bytes of the receive buffer of a rank, divided equally among the other ranks; a rank that owns more
  /// elements of a range receives them in several rounds.
  static constexpr size_t kReceived = size_t{64} << 20;

  /// Why the ranks cannot add up tensors on their devices this way, the same text on all of them; "" if they
  /// can. All ranks call it. `host` takes the CPU.
  static std::string lacks(const Communicator& host, Device device);

  /// `arena`: packed, one dimension, f32, bf16 or f16, as large on all ranks, of which there are several;
  /// where lacks() is "".
  PeerSums(const Communicator& host, const Tensor& arena);
  ~PeerSums();
  PeerSums(const PeerSums&) = delete;

  /// x = the sum of all ranks' x, a range of the arena.
  void all_reduce(const Tensor& x) const;
  /// On rank r, elements ends[r - 1] (0 for r = 0) to ends[r] of x become their sum over all ranks; the rest
  /// of x is undefined afterwards.
  void reduce_parts(const Tensor& x, std::span<const int64_t> ends) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::comm
