#include "runtime/stream_scope.h"

#include <mutex>
#include <utility>

#include "runtime/device_context.h"
#include "runtime/error.h"

#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"
#endif

namespace tessera {
namespace {

thread_local StreamScope* t_scope = nullptr;

/// Set in the numbers of captures, which CUDA counts apart from streams.
constexpr uint64_t kCapture = uint64_t{1} << 63;

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

}  // namespace

StreamScope::StreamScope(Device device, StreamHandle stream, StreamOptions options)
    : device_(device),
      stream_(stream),
      options_(options),
      id_((check(device.is_cuda(), "StreamScope on ", device.name(), ": only CUDA devices have streams"),
           device.activate(), id_of(stream, device.context_->stream))),
      mark_(id_),
      outer_(std::exchange(t_scope, this)) {}

StreamScope::~StreamScope() {
  t_scope = outer_;
#if defined(TESSERA_WITH_CUDA)
  const bool needs_end = counters_ || !used_.empty();
  // Memory used in a graph that another program captures is kept by that program; counters taken before its
  // capture began are not reused.
  if (!needs_end || foreign_capture()) return;
  std::shared_ptr<const Fence> end;
  try {
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

StreamScope* StreamScope::current(Device device) {
  StreamScope* scope = t_scope;
  while (scope && !(scope->device_ == device)) scope = scope->outer_;
  return scope;
}

bool StreamScope::foreign_capture() const {
#if defined(TESSERA_WITH_CUDA)
  const DeviceContext& context = *device_.context_;
  if (context.capturing && context.captured == stream_) return false;  // our own
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream_, &status));
  return status != cudaStreamCaptureStatusNone;
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
