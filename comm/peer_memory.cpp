#include "comm/peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>

#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"
#endif

namespace tessera::comm {

#if defined(TESSERA_WITH_CUDA)

namespace {

/// The machine and the GPU of this rank, "node0 0000:1b:00.0".
std::string own_name(Device device) {
  char host[256] = {}, bus[64] = {};
  ::gethostname(host, sizeof(host) - 1);
  check(cudaDeviceGetPCIBusId(bus, sizeof(bus), device.index()));
  return std::string(host) + " " + bus;
}

/// Why this rank cannot map the memory of the GPU called `theirs`, or "".
std::string cannot_map(const std::string& own, const std::string& theirs, Device device, int rank) {
  const size_t end = own.find(' ');
  const std::string who = "rank " + std::to_string(rank);
  if (theirs.substr(0, theirs.find(' ')) != own.substr(0, end))
    return who + " is on another machine, " + theirs.substr(0, theirs.find(' '));
  int index = -1, can = 0;
  if (cudaDeviceGetByPCIBusId(&index, theirs.c_str() + end + 1) != cudaSuccess) {
    cudaGetLastError();  // an answer, not an error
    return "the GPU of " + who + " is hidden from this process (CUDA_VISIBLE_DEVICES)";
  }
  if (index == device.index()) return who + " has the same GPU";
  check(cudaDeviceCanAccessPeer(&can, device.index(), index));
  return can ? "" : "the GPU of " + who + " cannot be reached from " + device.name();
}

}  // namespace

std::string PeerMemory::lacks(const Communicator& host, Device device) {
  std::string reason;
  if (device.is_cuda()) {
    const std::string own = own_name(device);
    const std::vector<std::string> all = host.gather_texts(own);
    for (int r = 0; r < host.size() && reason.empty(); ++r)
      if (r != host.rank()) reason = cannot_map(own, all[size_t(r)], device, r);
  } else {
    host.gather_texts("");  // the same calls as the others'
    reason = "rank " + std::to_string(host.rank()) + " computes on the CPU";
  }
  const std::vector<std::string> reasons = host.gather_texts(reason);
  const auto first = std::ranges::find_if(reasons, [](const std::string& text) { return !text.empty(); });
  return first == reasons.end() ? "" : *first;
}

PeerMemory::PeerMemory(const Communicator& host, Device device, size_t bytes)
    : host_(host), device_(device), blocks_(size_t(host.size()), nullptr) {
  device.activate();
  void*& own = blocks_[size_t(host.rank())];
  check(cudaMalloc(&own, bytes));
  check(cudaMemset(own, 0, bytes));
  check(cudaDeviceSynchronize());  // before the others can write to it
  cudaIpcMemHandle_t handle{};
  check(cudaIpcGetMemHandle(&handle, own));
  constexpr int64_t kBytes = sizeof(handle);
  const Tensor mine = Tensor::empty_packed({kBytes}, DType::u8, Device::cpu()),
               all = Tensor::empty_packed({host.size() * kBytes}, DType::u8, Device::cpu());
  std::memcpy(mine.raw(), &handle, sizeof(handle));
  host.all_gather(mine, all);
  for (int r = 0; r < host.size(); ++r) {
    if (r == host.rank()) continue;
    std::memcpy(&handle, static_cast<const std::byte*>(all.raw()) + r * kBytes, sizeof(handle));
    check(cudaIpcOpenMemHandle(&blocks_[size_t(r)], handle, cudaIpcMemLazyEnablePeerAccess));
  }
}

PeerMemory::~PeerMemory() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    device_.synchronize();
    host_.barrier();  // no rank writes any more
    for (int r = 0; r < host_.size(); ++r)
      if (r != host_.rank()) cudaIpcCloseMemHandle(blocks_[size_t(r)]);
    host_.barrier();  // no rank maps it any more
    cudaFree(blocks_[size_t(host_.rank())]);
  } catch (const std::exception&) {  // a rank has failed: the memory stays, as the header says
  }
}

#else

std::string PeerMemory::lacks(const Communicator&, Device) {
  return "this build has no CUDA";
}
PeerMemory::PeerMemory(const Communicator& host, Device device, size_t) : host_(host), device_(device) {
  fail_at(Site::here(), "peer memory: this build has no CUDA");
}
PeerMemory::~PeerMemory() = default;

#endif

}  // namespace tessera::comm
