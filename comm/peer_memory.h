#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace tessera::comm {

/// A block of GPU memory on each rank that kernels of all ranks of the machine write to: each rank exports
/// its own by CUDA IPC and maps those of the others (CUDA Runtime API, "Device Management",
/// cudaIpcGetMemHandle). For operators that exchange messages within a kernel (ops/all_reduce_rmsnorm). No
/// multicast.
class PeerMemory {
 public:
  /// Why the ranks of `host` cannot map each other's memory, the same text on all of them; "" if they can.
  /// All ranks call it. `host` takes the CPU.
  static std::string lacks(const Communicator& host, Device device);

  /// So many zeros on each rank. All ranks call it with the same number, where lacks() is "".
  PeerMemory(const Communicator& host, Device device, size_t bytes);
  /// All ranks end it together. After a failure the memory stays until the process ends: others may still
  /// write to it.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;

  /// Where this process sees the block of that rank.
  std::byte* of(int rank) const { return static_cast<std::byte*>(blocks_[size_t(rank)]); }

 private:
  const Communicator host_;
  const Device device_;
  std::vector<void*> blocks_;
};

}  // namespace tessera::comm
