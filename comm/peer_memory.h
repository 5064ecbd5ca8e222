#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace tessera::comm {

/// A block of GPU memory per rank that all ranks of the machine can write to: each rank exports its own block
/// by CUDA IPC and maps the others' (CUDA Runtime API, "Device Management", cudaIpcGetMemHandle). For kernels
/// that exchange messages (ops/all_reduce_rmsnorm) and for sums by copies (comm/peer_sums.h). Without NVLink
/// multicast.
class PeerMemory {
 public:
  /// Why the ranks of `host` cannot map each other's memory, the same text on all of them; "" if they can.
  /// All ranks call it. `host` takes the CPU.
  static std::string lacks(const Communicator& host, Device device);

  /// Allocates `bytes` zeros on each rank. All ranks call it with the same number; requires lacks() to be "".
  PeerMemory(const Communicator& host, Device device, size_t bytes);
  /// The memory of a tensor of each rank, which stays allocated as long as this lives.
  PeerMemory(const Communicator& host, const Tensor& own);
  /// Collective: all ranks destroy it together, or none does, while an exception unwinds their stacks. After
  /// a failure the memory is leaked, since other ranks may still write to it.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;

  /// Address in this process of rank `rank`'s block.
  std::byte* of(int rank) const { return static_cast<std::byte*>(blocks_[size_t(rank)]); }

 private:
  /// Exports the allocation at `base`, where the block starts at byte `offset`, and maps the others'.
  void exchange(void* base, size_t offset);

  const Communicator host_;
  const Device device_;
  const Tensor kept_;                  // undefined if the memory was allocated here
  std::vector<void*> bases_, blocks_;  // by rank: allocations, and where the blocks begin in them
};

}  // namespace tessera::comm
