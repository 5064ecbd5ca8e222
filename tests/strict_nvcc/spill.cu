/// Must fail to build: more live values than the 32 registers that two blocks of 1,024 threads leave to a
/// thread.
__global__ void __launch_bounds__(1024, 2) planted_spill_kernel(const float* x, float* y) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = x[threadIdx.x + i * 1024];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) y[threadIdx.x + i * 1024] = v[i] * v[95 - i];
}
