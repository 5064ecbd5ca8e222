#include "runtime/device.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/capture.h"
#include "runtime/device_context.h"
#include "runtime/error.h"
#include "runtime/has_cuda.h"
#include "runtime/host_memory_internal.h"
#include "runtime/parallel.h"
#include "runtime/stream_scope.h"

#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"
#include "runtime/wait.h"
#endif

namespace tessera {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

DeviceContext* make_cpu_context() {
  auto* context = new DeviceContext{};
  context->name = "cpu";
  context->info.name = "cpu";
  context->info.multiprocessors = cpu_threads();
  context->info.memory_bytes = memory_limits().total();
  context->allocator =
      std::make_unique<Allocator>(host_memory([] { return memory_limits().within_reach(); }));
  return context;
}

#if defined(TESSERA_WITH_CUDA)
/// The one place that switches the thread's current GPU. It asks which one is current, since another program
/// in this process may have switched.
void activate_gpu(int index) {
  thread_local bool set = false;  // which gives the thread a context
  int current = -1;
  if (set && cudaGetDevice(&current) == cudaSuccess && current == index) return;
  check(cudaSetDevice(index));
  set = true;
}

/// Memory of this GPU, but for where it comes from.
MemorySource memory_of(DeviceContext* context) {
  const int index = context->index;
  MemorySource source;
  source.name = context->name;
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
    wait_for_stream(stream, "reading a guard band");
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
    wait_for_stream(stream, "reading a guard band");
  };
  source.mark = [context, index]() -> std::shared_ptr<const Fence> {
    if (context->capturing && context->captured == context->stream) return nullptr;
    activate_gpu(index);
    return fence_of(context->stream);
  };
  return source;
}

DeviceContext* make_cuda_context(int index) {
  auto* context = new DeviceContext{};
  context->kind = DeviceKind::cuda;
  context->index = index;
  context->name = "cuda:" + std::to_string(index);
  context->info = Device::gpu_info(index);
  activate_gpu(index);
  check(cudaStreamCreateWithFlags(&context->stream, cudaStreamNonBlocking));
  MemorySource source = memory_of(context);
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
  context->allocator = std::make_unique<Allocator>(std::move(source));
  return context;
}

/// New counters, all zero.
unsigned* make_counters(int index) {
  activate_gpu(index);
  unsigned* counters = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&counters), Device::kCounters * sizeof(unsigned)));
  cudaStream_t stream = nullptr;  // of its own: the others may be capturing, or be busy
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const std::unique_ptr<CUstream_st, void (*)(cudaStream_t)> owner(
      stream, [](cudaStream_t made) { cudaStreamDestroy(made); });
  check(cudaMemsetAsync(counters, 0, Device::kCounters * sizeof(unsigned), stream));
  wait_for_stream(stream, "zeroing the counters of a stream");
  return counters;
}

/// Counters that no work uses: some that were returned, or new ones.
unsigned* borrow_counters(DeviceContext& context) {
  const RelaxedCapture relaxed;
  CounterPool& pool = context.counter_pool;
  std::vector<CounterPool::Free> free;
  {
    const std::lock_guard lock(pool.mutex);
    free.swap(pool.free);
  }
  unsigned* counters = nullptr;
  const auto found =
      std::ranges::find_if(free, [](const auto& one) { return !one.last_use || one.last_use->done(); });
  if (found != free.end()) {
    counters = found->counters;
    free.erase(found);
  }
  {
    const std::lock_guard lock(pool.mutex);
    std::ranges::move(free, std::back_inserter(pool.free));
  }
  return counters ? counters : make_counters(context.index);
}

/// Counters that a graph owns, as a user object of CUDA, which ends after the graph's last launch.
struct CountersOfGraph {
  DeviceContext* context;
  unsigned* counters;

  static void release(void* object) {
    const std::unique_ptr<CountersOfGraph> gone(static_cast<CountersOfGraph*>(object));
    CounterPool& pool = gone->context->counter_pool;
    const std::lock_guard lock(pool.mutex);
    std::erase_if(pool.captured, [&](const auto& one) { return one.counters == gone->counters; });
    pool.free.push_back({gone->counters, nullptr});
  }
};

/// Branches of a graph run at the same time, so each stream that is captured has counters of its own.
unsigned* counters_of_capture(DeviceContext& context, unsigned long long capture, StreamHandle stream,
                              cudaGraph_t graph) {
  CounterPool& pool = context.counter_pool;
  {
    const std::lock_guard lock(pool.mutex);
    for (const auto& one : pool.captured)
      if (one.id == capture && one.stream == stream) return one.counters;
  }
  auto owned = std::make_unique<CountersOfGraph>(&context, borrow_counters(context));
  unsigned* const counters = owned->counters;
  {
    const std::lock_guard lock(pool.mutex);
    pool.captured.push_back({capture, stream, counters});
  }
  cudaUserObject_t object = nullptr;
  check(cudaUserObjectCreate(&object, owned.get(), CountersOfGraph::release, 1,
                             cudaUserObjectNoDestructorSync));
  owned.release();
  check(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  return counters;
}
#endif

}  // namespace

MemorySource Device::memory_of_another_program(std::function<void*(size_t)> allocate,
                                               std::function<void(void*)> release) const {
  check(is_cuda(), "memory of another program on ", name(), ": only CUDA devices take it");
  MemorySource source;
#if defined(TESSERA_WITH_CUDA)
  source = memory_of(context_);
#endif
  source.name = name() + ", memory of another program";
  source.allocate = std::move(allocate);
  source.release = std::move(release);
  source.caches = false;
  return source;
}

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

DeviceInfo Device::gpu_info(int index) {
  check(index >= 0 && index < cuda_count(), "gpu_info: GPU ", index, " of ", cuda_count());
  DeviceInfo info;
#if defined(TESSERA_WITH_CUDA)
  cudaDeviceProp prop{};
  check(cudaGetDeviceProperties(&prop, index));
  info = {prop.name,           prop.major,
          prop.minor,          prop.multiProcessorCount,
          prop.totalGlobalMem, size_t(prop.l2CacheSize)};
#endif
  return info;
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
const DeviceInfo& Device::info() const {
  return context_->info;
}
int Device::multiprocessors() const {
  const StreamScope* const scope = StreamScope::current(*this);
  return scope && scope->options_.multiprocessors > 0 ? scope->options_.multiprocessors
                                                      : context_->info.multiprocessors;
}
Allocator& Device::allocator() const {
  const StreamScope* const scope = StreamScope::current(*this);
  if (!scope) return *context_->allocator;
  if (scope->options_.allocator) return *scope->options_.allocator;
  check(!scope->foreign_capture(), "device ", name(),
        ": a graph is being captured on the stream of this StreamScope, which has no allocator that keeps "
        "memory "
        "for the graph; pass one in StreamOptions::allocator");
  return *context_->allocator;
}
StreamHandle Device::stream() const {
  const StreamScope* const scope = StreamScope::current(*this);
  const StreamHandle stream = scope ? scope->stream_ : context_->stream;
  if (context_->capturing.load(std::memory_order_relaxed) && context_->captured == stream) [[unlikely]] {
    const CaptureSession* const session = CaptureSession::current();
    check(session && session->device() == *this, "device ", name(),
          ": another thread is capturing a graph on the compute stream, so that work issued now would become "
          "part of it; wait until the capture is done (allocations need not wait)");
  }
  return stream;
}

unsigned* Device::counters([[maybe_unused]] int64_t count) const {
  check(is_cuda() && 0 <= count && count <= kCounters, "counters: ", count, " on ", name(), "; at most ",
        kCounters, ", on CUDA");
#if defined(TESSERA_WITH_CUDA)
  StreamScope* const scope = StreamScope::current(*this);
  const StreamHandle stream = this->stream();
  if (scope || context_->capturing) {
    cudaStreamCaptureStatus status{};
    unsigned long long capture = 0;
    cudaGraph_t graph = nullptr;
    check(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph));
    if (status == cudaStreamCaptureStatusActive)
      return counters_of_capture(*context_, capture, stream, graph);
  }
  if (scope && scope->id_ != 0) {
    if (!scope->counters_) scope->counters_ = borrow_counters(*context_);
    return scope->counters_;
  }
  unsigned* own = context_->counters;
  if (!own) {
    unsigned* const made = borrow_counters(*context_);
    if (context_->counters.compare_exchange_strong(own, made)) return made;
    const std::lock_guard lock(context_->counter_pool.mutex);
    context_->counter_pool.free.push_back({made, nullptr});
  }
  return own;
#else
  return nullptr;
#endif
}

std::shared_ptr<const Fence> Device::fence() const {
#if defined(TESSERA_WITH_CUDA)
  if (is_cuda() && !capturing()) {
    activate();
    return fence_of(stream());
  }
#endif
  return nullptr;
}

bool Device::capturing() const {
  const StreamScope* const scope = StreamScope::current(*this);
  if (scope && scope->foreign_capture()) return true;
  return context_->capturing && context_->captured == (scope ? scope->stream_ : context_->stream);
}

void Device::synchronize() const {
  check(!capturing(), "synchronize on ", name(),
        " while a graph is being captured; move it out of the captured step (item(), host copies and timing "
        "wait too)");
#if defined(TESSERA_WITH_CUDA)
  if (is_cuda()) observed_wait([&] { wait_for_stream(stream(), "the work of " + name()); });
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
  if (event_) observed_wait([&] { wait_until([&] { return done(); }, "an event on " + device_.name()); });
#endif
}

bool Event::done() const {
#if defined(TESSERA_WITH_CUDA)
  if (event_) return is_done(cudaEventQuery(event_));
#endif
  return true;
}

double Event::milliseconds_since(const Event& start) const {
#if defined(TESSERA_WITH_CUDA)
  if (event_) {
    start.wait();
    wait();
    float elapsed = 0;
    check(cudaEventElapsedTime(&elapsed, start.event_, event_));
    return elapsed;
  }
#endif
  return (seconds_ - start.seconds_) * 1e3;
}

}  // namespace tessera
