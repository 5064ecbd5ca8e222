#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"

#include <map>
#include <mutex>
#include <utility>

#include "runtime/wait.h"

namespace tessera {
namespace {

class EventFence : public Fence {
 public:
  explicit EventFence(cudaStream_t stream) {
    const RelaxedCapture relaxed;
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    if (const cudaError_t code = cudaEventRecord(event_, stream); code != cudaSuccess) {
      cudaEventDestroy(event_);
      check(code);
    }
  }
  ~EventFence() override { cudaEventDestroy(event_); }
  EventFence(const EventFence&) = delete;
  bool done() const noexcept override {
    const RelaxedCapture relaxed;
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaSuccess) return true;
    cudaGetLastError();  // do not leave it for the check of the next launch
    return code != cudaErrorNotReady;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

bool is_done(CudaStatus status) {
  if (status.code == cudaErrorNotReady) {
    cudaGetLastError();  // do not leave it for the check of the next launch
    return false;
  }
  check(status);
  return true;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

void wait_for_stream(cudaStream_t stream, std::string_view what) {
  wait_until([&] { return is_done(cudaStreamQuery(stream)); }, what);
}

std::shared_ptr<const Fence> fence_of(cudaStream_t stream) {
  return std::make_shared<EventFence>(stream);
}

void allow_shared_bytes(const void* kernel, int device, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  const std::lock_guard lock(mutex);
  size_t& limit = allowed[{kernel, device}];
  if (bytes <= limit) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
  limit = bytes;
}

void fail_cuda(CudaStatus status) {
  cudaGetLastError();  // clears the error unless it is sticky
  fail_at(status.site, "CUDA: ", cudaGetErrorName(status.code), ": ", cudaGetErrorString(status.code));
}

}  // namespace tessera
#endif
