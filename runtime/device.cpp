#include "runtime/device.h"

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/capture.h"
#include "runtime/device_context.h"
#include "runtime/error.h"
#include "runtime/host_memory_internal.h"
#include "runtime/parallel.h"

#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"
#endif

namespace tessera {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

DeviceContext* make_cpu_context() {
  auto* context = new DeviceContext{};
  context->name = "cpu";
  context->card.name = "cpu";
  context->card.multiprocessors = cpu_threads();
  context->card.memory_bytes = total_memory();
  context->allocator = std::make_unique<Allocator>(host_memory(memory_within_reach));
  return context;
}

#if defined(TESSERA_WITH_CUDA)
/// The one place that switches the thread's current GPU: it knows what is current and skips the call.
void activate_gpu(int index) {
  thread_local int active = -1;
  if (active == index) return;
  check(cudaSetDevice(index));
  active = index;
}

DeviceContext* make_cuda_context(int index) {
  auto* context = new DeviceContext{};
  context->kind = DeviceKind::cuda;
  context->index = index;
  context->name = "cuda:" + std::to_string(index);
  activate_gpu(index);
  cudaDeviceProp prop{};
  check(cudaGetDeviceProperties(&prop, index));
  context->card = {prop.name,           prop.major,
                   prop.minor,          prop.multiProcessorCount,
                   prop.totalGlobalMem, size_t(prop.l2CacheSize)};
  check(cudaStreamCreateWithFlags(&context->stream, cudaStreamNonBlocking));
  check(cudaStreamCreateWithFlags(&context->copy_stream, cudaStreamNonBlocking));
  MemorySource source;
  source.name = context->name;
  source.allocate = [index](size_t bytes) -> void* {
    activate_gpu(index);
    void* data = nullptr;
    const cudaError_t code = cudaMalloc(&data, bytes);
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    check(code);
    return data;
  };
  source.release = [](void* data) { cudaFree(data); };
  source.usage = [index] {
    size_t free = 0, total = 0;
    activate_gpu(index);
    check(cudaMemGetInfo(&free, &total));
    return std::pair(free, total);
  };
  source.fill = [index, stream = context->stream](void* data, int byte, size_t bytes) {
    activate_gpu(index);
    check(cudaMemsetAsync(data, byte, bytes, stream));
  };
  source.read = [index, stream = context->stream](void* to, const void* from, size_t bytes) {
    activate_gpu(index);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
  };
  context->allocator = std::make_unique<Allocator>(std::move(source));
  return context;
}
#endif

}  // namespace

Device Device::cpu() {
  static DeviceContext* const context = make_cpu_context();
  return Device(context);
}

int Device::cuda_count() {
#if defined(TESSERA_WITH_CUDA)
  static const int count = [] {
    int found = 0;
    if (cudaGetDeviceCount(&found) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return found;
  }();
  return count;
#else
  return 0;
#endif
}

Device Device::cuda(int index) {
  check(kCuda, "device cuda:", index,
        ": this build has no CUDA; configure with a CUDA toolkit (12.8 or newer)");
  check(cuda_count() > 0, "device cuda:", index, ": no usable GPU or driver on this machine; use device cpu");
  check(index >= 0 && index < cuda_count(), "device cuda:", index, ": this machine has ", cuda_count(),
        " GPU(s), numbered from 0");
#if defined(TESSERA_WITH_CUDA)
  static std::mutex mutex;
  static auto& contexts = *new std::vector<DeviceContext*>(size_t(cuda_count()), nullptr);
  const std::lock_guard lock(mutex);
  if (!contexts[size_t(index)]) contexts[size_t(index)] = make_cuda_context(index);
  return Device(contexts[size_t(index)]);
#else
  return cpu();  // not reached
#endif
}

Device Device::best() {
  return cuda_count() > 0 ? cuda(0) : cpu();
}

Device Device::parse(std::string_view text) {
  if (text == "cpu") return cpu();
  if (text == "cuda") return cuda(0);
  if (text.starts_with("cuda:")) {
    int index = -1;
    const auto [end, code] = std::from_chars(text.data() + 5, text.data() + text.size(), index);
    if (code == std::errc{} && end == text.data() + text.size()) return cuda(index);
  }
  fail_at(Site::here(), "device \"", text, "\": expected cpu, cuda or cuda:<index>");
}

DeviceKind Device::kind() const {
  return context_->kind;
}
int Device::index() const {
  return context_->index;
}
std::string Device::name() const {
  return context_->name;
}
const CardInfo& Device::card() const {
  return context_->card;
}
Allocator& Device::allocator() const {
  return *context_->allocator;
}
StreamHandle Device::stream() const {
  if (context_->capturing.load(std::memory_order_relaxed)) [[unlikely]] {
    const CaptureSession* const session = CaptureSession::current();
    check(session && session->device() == *this, "device ", name(),
          ": another thread is capturing a graph on the compute stream, so that work issued now would become "
          "part of it; wait until the capture is done (allocations need not wait)");
  }
  return context_->stream;
}
StreamHandle Device::copy_stream() const {
  return context_->copy_stream;
}
bool Device::capturing() const {
  return context_->capturing;
}

void Device::synchronize() const {
  check(!capturing(), "synchronize on ", name(),
        " while a graph is being captured; move it out of the captured step (item(), host copies and timing "
        "wait too)");
#if defined(TESSERA_WITH_CUDA)
  if (is_cuda()) check(cudaStreamSynchronize(stream()));
#endif
}

void Device::activate() const {
#if defined(TESSERA_WITH_CUDA)
  if (is_cuda()) activate_gpu(index());
#endif
}

Event::Event(Device device) : device_(device) {
#if defined(TESSERA_WITH_CUDA)
  if (device.is_cuda()) {
    device.activate();
    check(cudaEventCreate(&event_));
  }
#endif
}

Event::~Event() {
#if defined(TESSERA_WITH_CUDA)
  if (event_) cudaEventDestroy(event_);
#endif
}

Event::Event(Event&& other) noexcept
    : device_(other.device_), event_(std::exchange(other.event_, nullptr)), seconds_(other.seconds_) {}

void Event::record() {
  record(device_.stream());
}

void Event::record([[maybe_unused]] StreamHandle stream) {
#if defined(TESSERA_WITH_CUDA)
  if (event_) {
    check(cudaEventRecord(event_, stream));
    return;
  }
#endif
  seconds_ = now_seconds();
}

void Event::block([[maybe_unused]] StreamHandle stream) const {
#if defined(TESSERA_WITH_CUDA)
  if (event_) check(cudaStreamWaitEvent(stream, event_, 0));
#endif
}

void Event::wait() const {
#if defined(TESSERA_WITH_CUDA)
  if (event_) check(cudaEventSynchronize(event_));
#endif
}

bool Event::done() const {
#if defined(TESSERA_WITH_CUDA)
  if (event_) {
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) {
      cudaGetLastError();  // no error of the launch that asks next
      return false;
    }
    check(code);
  }
#endif
  return true;
}

double Event::milliseconds_since(const Event& start) const {
#if defined(TESSERA_WITH_CUDA)
  if (event_) {
    check(cudaEventSynchronize(event_));
    float elapsed = 0;
    check(cudaEventElapsedTime(&elapsed, start.event_, event_));
    return elapsed;
  }
#endif
  return (seconds_ - start.seconds_) * 1e3;
}

}  // namespace tessera
