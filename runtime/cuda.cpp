#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"

namespace tessera {

void fail_cuda(CudaStatus status) {
  cudaGetLastError();  // a sticky error stays, any other is ours now
  fail_at(status.site, "CUDA: ", cudaGetErrorName(status.code), ": ", cudaGetErrorString(status.code));
}

}  // namespace tessera
#endif
