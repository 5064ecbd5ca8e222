#include "comm/peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>

#if defined(TESSERA_WITH_CUDA)
#include <cuda.h>

#include "comm/ending_internal.h"
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

/// Waits for the GPU. If that fails, the other ranks are told.
bool finishes(const Communicator& host, Device device) {
  try {
    device.synchronize();
    return true;
  } catch (const std::exception& error) {
    host.fail(message_of(error));
    return false;
  }
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

PeerMemory::PeerMemory(const Communicator& host, Device device, size_t bytes) : host_(host), device_(device) {
  device.activate();
  void* own = nullptr;
  check(cudaMalloc(&own, bytes));
  check(cudaMemset(own, 0, bytes));
  check(cudaDeviceSynchronize());  // before the others can write to it
  exchange(own, 0);
}

PeerMemory::PeerMemory(const Communicator& host, const Tensor& own)
    : host_(host), device_(own.device()), kept_(own) {
  device_.activate();
  using Range = CUresult(CUdeviceptr*, size_t*, CUdeviceptr);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(
      cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault, &found));
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const auto start = reinterpret_cast<CUdeviceptr>(own.raw());
  check(found == cudaDriverEntryPointSuccess &&
            reinterpret_cast<Range*>(function)(&base, &bytes, start) == CUDA_SUCCESS,
        "peer memory: ", describe(own), " is not within an allocation of the GPU");
  exchange(reinterpret_cast<void*>(base), start - base);
}

void PeerMemory::exchange(void* base, size_t offset) {
  struct Export {
    cudaIpcMemHandle_t handle;
    uint64_t offset;
  };
  bases_.assign(size_t(host_.size()), nullptr), blocks_ = bases_;
  const auto set_block = [&](int rank, void* base, uint64_t offset) {
    bases_[size_t(rank)] = base, blocks_[size_t(rank)] = static_cast<std::byte*>(base) + offset;
  };
  Export record{{}, offset};
  check(cudaIpcGetMemHandle(&record.handle, base));
  constexpr int64_t kBytes = sizeof(record);
  const Tensor mine = Tensor::empty_packed({kBytes}, DType::u8, Device::cpu()),
               all = Tensor::empty_packed({host_.size() * kBytes}, DType::u8, Device::cpu());
  std::memcpy(mine.raw(), &record, sizeof(record));
  host_.all_gather(mine, all);
  set_block(host_.rank(), base, offset);
  for (int r = 0; r < host_.size(); ++r) {
    if (r == host_.rank()) continue;
    std::memcpy(&record, static_cast<const std::byte*>(all.raw()) + r * kBytes, sizeof(record));
    void* mapped = nullptr;
    check(cudaIpcOpenMemHandle(&mapped, record.handle, cudaIpcMemLazyEnablePeerAccess));
    set_block(r, mapped, record.offset);
  }
}

PeerMemory::~PeerMemory() {
  // A rank that unwinds waits for no other: they may be in any call, until they are told why it ends.
  const auto all_here = [this] { return std::uncaught_exceptions() == 0 && all_end(host_); };
  // First, since the work of a GPU may wait for that of a rank that has failed.
  if (all_here() && finishes(host_, device_) && all_end(host_)) {  // no rank writes any more
    for (int r = 0; r < host_.size(); ++r)
      if (r != host_.rank()) cudaIpcCloseMemHandle(bases_[size_t(r)]);
    if (all_end(host_)) {  // no rank maps it any more
      if (!kept_.defined()) cudaFree(bases_[size_t(host_.rank())]);
      return;
    }
  }
  if (kept_.defined()) new Tensor(kept_);  // another rank may still write to it
}

#else

std::string PeerMemory::lacks(const Communicator&, Device) {
  return "this build has no CUDA";
}
PeerMemory::PeerMemory(const Communicator& host, Device device, size_t) : host_(host), device_(device) {
  fail_at(Site::here(), "peer memory: this build has no CUDA");
}
PeerMemory::PeerMemory(const Communicator& host, const Tensor& own) : PeerMemory(host, own.device(), 0) {}
PeerMemory::~PeerMemory() = default;

#endif

}  // namespace tessera::comm
