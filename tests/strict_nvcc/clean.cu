/// Must build, without a word.
__global__ void clean_kernel(float* y) {
  y[threadIdx.x] += 1;
}
