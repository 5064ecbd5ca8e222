#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::bench {

/// A GPU of this machine, as CUDA numbers those that this process sees.
struct LinkedGpu {
  int index = 0;
  std::string name, bus_id;
  int nvlinks = -1;  // active NVLinks; -1: NVML cannot be asked
};

/// From one GPU to another.
struct GpuLink {
  int from = 0, to = 0;
  std::string path;   // "NVLink", "PCIe", "PCIe through the CPU", "PCIe across CPUs"; "unknown" without NVML
  bool peer = false;  // cudaDeviceCanAccessPeer; without it copies go through host memory
  double gbs = 0;     // of large copies from `from` to `to`
  double both_gbs = 0;    // of both directions at once, together
  double latency_us = 0;  // of copies of 8 bytes, back to back
};

struct MachineLinks {
  std::vector<LinkedGpu> gpus;
  std::vector<GpuLink> links;  // of all ordered pairs
};

/// Copies `bytes` between all pairs of GPUs, several times; some milliseconds for each pair. Nothing without
/// GPUs.
MachineLinks measure_links(int64_t bytes = int64_t{256} << 20);

}  // namespace tessera::bench
