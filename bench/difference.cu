#include "bench/difference.h"
#include "gpu/reduce.cuh"

/// The largest |y - ref| and the largest |ref| of two arrays. Reads 2 + 4 bytes per element once; memory
/// bound. Both maxima are of numbers that are not negative, whose bits order as unsigned integers do: an
/// integer atomicMax combines the blocks, whatever their order. NaN and infinity where the reference has
/// another value count as an infinite difference.

namespace tessera::bench {
namespace {

constexpr int kThreads = 512;

template <class T>
__global__ void __launch_bounds__(kThreads)
    difference_kernel(const T* y, const float* reference, int64_t count, unsigned* largest) {
  __shared__ float scratch[32];
  float error = 0, size = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const float got = float(y[i]), want = reference[i];
    if (isfinite(want)) size = fmaxf(size, fabsf(want));
    const bool same = got == want || (isnan(got) && isnan(want));
    const float apart = fabsf(got - want);
    if (!same) error = fmaxf(error, isnan(apart) ? INFINITY : apart);
  }
  error = gpu::block_reduce<gpu::Max>(error, scratch);
  size = gpu::block_reduce<gpu::Max>(size, scratch);
  if (threadIdx.x == 0) {
    atomicMax(&largest[0], __float_as_uint(error));
    atomicMax(&largest[1], __float_as_uint(size));
  }
}

}  // namespace

ops::Errors difference_cuda(const Tensor& y, const Tensor& reference) {
  check(y.shape() == reference.shape() && reference.dtype() == DType::f32, "difference: y is ", describe(y),
        ", the reference ", describe(reference), "; expected one shape, and a reference in f32");
  const Tensor a = y.packed(), b = reference.packed();
  const Tensor largest = Tensor::zeros({2}, DType::f32, y.device());
  const int64_t blocks = std::min<int64_t>(gpu::ceil_div(a.count(), kThreads), 4096);
  const auto run = [&]<class T>(T) {
    gpu::launch(y.device(), {dim3(unsigned(blocks)), dim3(kThreads)}, difference_kernel<T>,
                static_cast<const T*>(a.raw()), b.data<float>(), a.count(),
                static_cast<unsigned*>(largest.raw()));
  };
  switch (y.dtype()) {
    case DType::bf16:
      run(bf16{});
      break;
    case DType::f16:
      run(f16{});
      break;
    default:
      check(y.dtype() == DType::f32, "difference: y is ", describe(y), "; expected bf16, f16 or f32");
      run(float{});
  }
  const std::vector<float> values = largest.to_vector<float>();
  return {values[0], values[1], -1};
}

}  // namespace tessera::bench
