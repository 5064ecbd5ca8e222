#include "bench/links.h"

#include <chrono>

#include "runtime/device.h"

#if defined(TESSERA_WITH_CUDA)
#include <dlfcn.h>

#include <array>
#include <utility>

#include "runtime/cuda.h"
#endif

namespace tessera::bench {

#if defined(TESSERA_WITH_CUDA)

namespace {

/// What NVML, which comes with the driver, says of GPUs by their bus ids; nothing where it cannot be loaded.
class Nvml {
 public:
  Nvml() {
    void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    int (*init)() = nullptr;
    load(library, "nvmlInit_v2", init), load(library, "nvmlDeviceGetHandleByPciBusId_v2", by_bus_);
    load(library, "nvmlDeviceGetNvLinkState", link_state_), load(library, "nvmlDeviceGetP2PStatus", p2p_);
    load(library, "nvmlDeviceGetTopologyCommonAncestor", ancestor_);
    there_ = init && by_bus_ && link_state_ && p2p_ && ancestor_ && init() == 0;
  }

  /// -1 if it cannot be asked.
  int nvlinks(const std::string& bus) const {
    void* const gpu = handle(bus);
    if (!gpu) return -1;
    constexpr unsigned kMost = 18;
    int active = 0;
    for (unsigned link = 0; link < kMost; ++link) {
      unsigned on = 0;
      if (link_state_(gpu, link, &on) == 0 && on == 1) active += 1;
    }
    return active;
  }

  std::string path(const std::string& a, const std::string& b) const {
    void *const first = handle(a), *const second = handle(b);
    if (!first || !second) return "unknown";
    constexpr unsigned kNvlink = 2;  // NVML_P2P_CAPS_INDEX_NVLINK
    unsigned status = 1;
    if (p2p_(first, second, kNvlink, &status) == 0 && status == 0) return "NVLink";
    // NVML_TOPOLOGY_MULTIPLE, _HOSTBRIDGE, _NODE, _SYSTEM
    unsigned level = 0;
    if (ancestor_(first, second, &level) != 0) return "unknown";
    return level <= 20 ? "PCIe" : level <= 40 ? "PCIe through the CPU" : "PCIe across CPUs";
  }

 private:
  template <class F>
  static void load(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(::dlsym(library, name));
  }
  void* handle(const std::string& bus) const {
    void* gpu = nullptr;
    return there_ && by_bus_(bus.c_str(), &gpu) == 0 ? gpu : nullptr;
  }
  int (*by_bus_)(const char*, void**) = nullptr;
  int (*link_state_)(void*, unsigned, unsigned*) = nullptr;
  int (*p2p_)(void*, void*, unsigned, unsigned*) = nullptr;
  int (*ancestor_)(void*, void*, unsigned*) = nullptr;
  bool there_ = false;
};

/// A GPU's memory and stream for copies.
class End {
 public:
  End(int gpu, int64_t bytes) : gpu_(gpu) {
    activate();
    check(cudaMalloc(&data_, size_t(bytes)));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~End() {
    cudaSetDevice(gpu_);
    cudaStreamDestroy(stream_);
    cudaFree(data_);
  }
  End(const End&) = delete;
  void activate() const { check(cudaSetDevice(gpu_)); }
  void copy_to(const End& other, int64_t bytes) const {
    check(cudaMemcpyPeerAsync(other.data_, other.gpu_, data_, gpu_, size_t(bytes), stream_));
  }
  void wait() const { check(cudaStreamSynchronize(stream_)); }

 private:
  int gpu_;
  void* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

/// While it lives, a GPU may reach the memory of another directly.
class PeerAccess {
 public:
  PeerAccess(int from, int to) : from_(from), to_(to) {
    check(cudaSetDevice(from));
    const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
    enabled_ = status == cudaSuccess;
    if (status == cudaErrorPeerAccessAlreadyEnabled)
      cudaGetLastError();
    else
      check(status);
  }
  ~PeerAccess() {
    if (enabled_) cudaSetDevice(from_), cudaDeviceDisablePeerAccess(to_);
  }
  PeerAccess(const PeerAccess&) = delete;

 private:
  int from_, to_;
  bool enabled_ = false;
};

/// Seconds of one call of `work`, which issues copies on the streams of these ends, of `times`; the first one
/// is not timed.
template <class Work>
double seconds_of(Work&& work, int times, std::initializer_list<const End*> ends) {
  const auto wait = [&] {
    for (const End* end : ends) end->wait();
  };
  work(), wait();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) work();
  wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / times;
}

GpuLink measure(int from, int to, int64_t bytes) {
  int forward = 0, backward = 0;
  check(cudaDeviceCanAccessPeer(&forward, from, to));
  check(cudaDeviceCanAccessPeer(&backward, to, from));
  GpuLink link{.from = from, .to = to, .peer = forward != 0 && backward != 0};
  const End a(from, bytes), b(to, bytes);
  const auto copies = [&] {
    constexpr int kLarge = 10, kSmall = 200;
    link.gbs = double(bytes) / seconds_of([&] { a.copy_to(b, bytes); }, kLarge, {&a}) / 1e9;
    const auto both = [&] { a.copy_to(b, bytes / 2), b.copy_to(a, bytes / 2); };
    link.both_gbs = double(bytes) / seconds_of(both, kLarge, {&a, &b}) / 1e9;
    link.latency_us = 1e6 * seconds_of([&] { a.copy_to(b, 8); }, kSmall, {&a});
  };
  if (!link.peer) return copies(), link;
  const PeerAccess there(from, to), back(to, from);
  copies();
  return link;
}

std::string bus_id(int gpu) {
  std::array<char, 32> text{};
  check(cudaDeviceGetPCIBusId(text.data(), int(text.size()), gpu));
  return text.data();
}

}  // namespace

MachineLinks measure_links(int64_t bytes) {
  MachineLinks found;
  const int gpus = Device::cuda_count();
  if (gpus == 0) return found;
  int before = 0;
  check(cudaGetDevice(&before));
  const Nvml nvml;
  for (int i = 0; i < gpus; ++i) {
    const std::string bus = bus_id(i);
    found.gpus.push_back({i, Device::gpu_info(i).name, bus, nvml.nvlinks(bus)});
  }
  for (int from = 0; from < gpus; ++from)
    for (int to = 0; to < gpus; ++to) {
      if (from == to) continue;
      found.links.push_back(measure(from, to, bytes));
      found.links.back().path = nvml.path(found.gpus[size_t(from)].bus_id, found.gpus[size_t(to)].bus_id);
    }
  check(cudaSetDevice(before));
  return found;
}

#else

MachineLinks measure_links(int64_t) {
  return {};
}

#endif

}  // namespace tessera::bench
