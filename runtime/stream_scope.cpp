#include "runtime/stream_scope.h"

#include <mutex>
#include <utility>

#include "runtime/device_context.h"
#include "runtime/error.h"

#if defined(TESSERA_WITH_CUDA)
#include <cuda.h>

#include "runtime/cuda.h"
#endif

namespace tessera {
namespace {

thread_local StreamScope* t_scope = nullptr;

/// Set in the numbers of captures, which CUDA counts apart from streams.
constexpr uint64_t kCapture = uint64_t{1} << 63;
/// Set in the numbers of streams of several devices.
constexpr uint64_t kSeveral = uint64_t{1} << 62;

/// 0 for the device's own stream; otherwise 1 + CUDA's stream id, which is unique. CUDA cannot tell the id of
/// a stream that is being captured (the query would invalidate the capture): then it is the capture's id, so
/// that captured work counts as another stream than the work issued before and after.
uint64_t id_of([[maybe_unused]] StreamHandle stream, [[maybe_unused]] StreamHandle own) {
#if defined(TESSERA_WITH_CUDA)
  if (stream == own) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id));
  if (status == cudaStreamCaptureStatusActive) return kCapture | uint64_t(id);
  check(cudaStreamGetId(stream, &id));
  return uint64_t(id) + 1;
#else
  return 0;
#endif
}

#if defined(TESSERA_WITH_CUDA)
/// Whether this process uses the GPU. cudaSetDevice would make a context on one that it does not use.
bool has_context(int gpu) {
  static void* const function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 12000, cudaEnableDefault, &result);
    return result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  unsigned flags = 0;
  int active = 0;
  using State = CUresult(CUdevice, unsigned*, int*);
  return function && reinterpret_cast<State*>(function)(gpu, &flags, &active) == CUDA_SUCCESS && active != 0;
}
#endif

}  // namespace

StreamScope::CurrentGpu::CurrentGpu() {
#if defined(TESSERA_WITH_CUDA)
  check(cudaGetDevice(&index_));
#endif
}

StreamScope::CurrentGpu::~CurrentGpu() {
#if defined(TESSERA_WITH_CUDA)
  int now = index_;
  cudaGetDevice(&now);
  if (now != index_ && has_context(index_)) cudaSetDevice(index_);
#endif
}

StreamScope::StreamScope(Device device, StreamHandle stream, StreamOptions options)
    : device_((check(device.is_cuda(), "StreamScope on ", device.name(), ": only CUDA devices have streams"),
               device)),
      stream_(stream),
      options_(options),
      id_((device.activate(), id_of(stream, device.context_->stream))),
      mark_(number_of_streams()),
      outer_(std::exchange(t_scope, this)) {}

StreamScope::~StreamScope() {
  t_scope = outer_;
#if defined(TESSERA_WITH_CUDA)
  if (!counters_ && used_.empty()) return;
  std::shared_ptr<const Fence> end;
  try {
    // Memory used in a graph that another program captures is kept by that program; counters taken before its
    // capture began are not reused.
    if (foreign_capture()) return;
    device_.activate();
    end = fence_of(stream_);
  } catch (const Error&) {  // the context is broken: nothing runs any more
  }
  for (const Used& one : used_)
    if (end) one.allocator->hold(one.block, stream_, end);
  if (!counters_) return;
  CounterPool& pool = device_.context_->counter_pool;
  const std::lock_guard lock(pool.mutex);
  pool.free.push_back({counters_, std::move(end)});
#endif
}

/// The number of this thread's streams for allocators (StreamOfThread), when this scope begins. Those of
/// several devices have one together, so that it stands for one stream of each.
uint64_t StreamScope::number_of_streams() const {
  uint64_t number = id_;
  for (const StreamScope* scope = t_scope; scope; scope = scope->outer_) {
    if (scope->device_ == device_ || current(scope->device_) != scope) continue;
    number = (number ^ (scope->id_ + uint64_t(scope->device_.index()) * 0x9E37'79B9'7F4A'7C15u)) *
             0xBF58'476D'1CE4'E5B9u;
    number = (number ^ (number >> 29)) | kSeveral;
  }
  return number;
}

StreamScope* StreamScope::current(Device device) {
  StreamScope* scope = t_scope;
  while (scope && !(scope->device_ == device)) scope = scope->outer_;
  return scope;
}

bool StreamScope::foreign_capture() const {
#if defined(TESSERA_WITH_CUDA)
  const DeviceContext& context = *device_.context_;
  if (context.capturing && context.captured == stream_) return false;  // our own
  return is_capturing(stream_);
#else
  return false;
#endif
}

void StreamScope::uses(Allocator& allocator, MemoryBlock* block, std::shared_ptr<const void> owner) {
  if (used_blocks_.insert(block).second) used_.push_back({&allocator, block, std::move(owner)});
}

void use_block(Device device, Allocator& allocator, MemoryBlock* block,
               const std::shared_ptr<const void>& owner) {
  if (device.is_cpu()) return;
  if (StreamScope* const scope = StreamScope::current(device)) {
    scope->uses(allocator, block, owner);
  } else if (block->stream != 0) {
    allocator.crosses(block);
  }
}

}  // namespace tessera
