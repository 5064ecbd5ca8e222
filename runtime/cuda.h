#pragma once

#include <cuda_runtime_api.h>

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

}  // namespace tessera
