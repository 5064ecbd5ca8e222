#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace tessera::comm {

/// A block of GPU memory on each rank that all ranks of the machine write to: each rank exports its own by
/// CUDA IPC and maps those of the others (CUDA Runtime API, "Device Management", cudaIpcGetMemHandle). For
/// operators that exchange messages within a kernel (ops/all_reduce_rmsnorm) and for sums over copy engines
/// (comm/peer_sums.h). No multicast.
class PeerMemory {
 public:
  /// Why the ranks of `host` cannot map each other's memory, the same text on all of them; "" if they can.
  /// All ranks call it. `host` takes the CPU.
  static std::string lacks(const Communicator& host, Device device);

  /// So many zeros on each rank. All ranks call it with the same number, where lacks() is "".
  PeerMemory(const Communicator& host, Device device, size_t bytes);
  /// The memory of a tensor of each rank, which stays allocated as long as this lives.
  PeerMemory(const Communicator& host, const Tensor& own);
  /// All ranks end it together. After a failure the memory stays until the process ends: others may still
  /// write to it.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;

  /// Where this process sees the block of that rank.
  std::byte* of(int rank) const { return static_cast<std::byte*>(blocks_[size_t(rank)]); }

 private:
  /// Exports [base, ...), of which the block begins `offset` bytes behind, and maps those of the others.
  void exchange(void* base, size_t offset);

  const Communicator host_;
  const Device device_;
  const Tensor kept_;                  // undefined if the memory was allocated here
  std::vector<void*> bases_, blocks_;  // by rank: allocations, and where the blocks begin in them
};

}  // namespace tessera::comm
