#include "gpu/launch.cuh"
#include "ops/random/random_kernels.h"
#include "tensor/elementwise.h"

/// One Philox block per element, a thread each: bound by integer arithmetic; used for inputs of benchmarks
/// and checks.

namespace tessera::ops {
namespace {

template <class T>
__global__ void random_kernel(StridedLoop<1> loop, T* out, RandomFill fill) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < loop.count;
       i += int64_t(gridDim.x) * blockDim.x) {
    int64_t rest = i, offset = 0;
    for (int dim = loop.rank - 1; dim >= 0; --dim) {
      offset += rest % loop.sizes[dim] * loop.strides[0][dim];
      rest /= loop.sizes[dim];
    }
    out[offset] = random_element<T>(fill, uint64_t(i));
  }
}

}  // namespace

void random_fill_cuda(const Tensor& tensor, const RandomFill& fill) {
  const auto run = [&]<class T>() {
    const int64_t blocks = std::min<int64_t>(gpu::ceil_div(tensor.count(), 256), 65536);
    gpu::launch(tensor.device(), {dim3(unsigned(blocks)), 256}, random_kernel<T>,
                make_loop(tensor.shape(), tensor), tensor.data<T>(), fill);
  };
  if (is_floating(tensor.dtype())) {
    dispatch_floating_cuda(tensor.dtype(), "random fill", run);
  } else {
    dispatch_index(tensor.dtype(), "random fill", run);
  }
}

}  // namespace tessera::ops
