#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string_view>

#include "runtime/allocator.h"
#include "runtime/error.h"

/// Included only by files that are compiled when the CUDA toolkit is present.

namespace tessera {

/// A CUDA status that remembers where it was tested.
struct CudaStatus {
  CudaStatus(cudaError_t code, const char* file = __builtin_FILE(), int line = __builtin_LINE())  // NOLINT
      : code(code), site{file, line} {}
  cudaError_t code;
  Site site;
};

[[noreturn]] void fail_cuda(CudaStatus status);

/// Throws `Error` with the CUDA name and text of the status unless it is cudaSuccess.
inline void check(CudaStatus status) {
  if (status.code != cudaSuccess) [[unlikely]]
    fail_cuda(status);
}

/// The result of a query of a stream or an event: true for cudaSuccess, false for cudaErrorNotReady. Throws
/// any other status.
bool is_done(CudaStatus status);
/// Whether work issued to the stream becomes a part of a graph.
bool is_capturing(cudaStream_t stream);
/// The host waits for all work of the stream (wait_until). `what` says what for, in the message of a wait
/// that takes too long.
void wait_for_stream(cudaStream_t stream, std::string_view what);
/// A fence after the work issued to the stream so far.
std::shared_ptr<const Fence> fence_of(cudaStream_t stream);
/// Lets `kernel` take up to `bytes` of dynamic shared memory on the current device, GPU number `device`. The
/// limit only grows, whichever threads call this, so no launch loses what it has been allowed.
void allow_shared_bytes(const void* kernel, int device, size_t bytes);

/// While it lives, this thread may allocate and query although a graph is being captured, in whatever mode
/// another program does that.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace tessera
