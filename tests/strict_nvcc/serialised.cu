/// Must fail to build: the accumulator is touched while the product is in flight, so ptxas serialises it.
__global__ void __launch_bounds__(128)
    planted_serialised_kernel(float* y, unsigned long long a, unsigned long long b) {
  float d[4] = {1, 2, 3, 4};
  asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;");
    d[i % 2] += float(i);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = d[i];
}
