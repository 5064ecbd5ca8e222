#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "gpu/barrier.cuh"
#include "gpu/launch.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma_sparse.cuh"
#include "tensor/tensor.h"

/// MMAs with a 2:4 A, alone: one warpgroup multiplies 64 x 64 by 64 x N, in both sparsity selectors, both
/// orders of b and all widths, and each pair of positions occurs.

namespace tessera::gpu {
namespace {

constexpr int kRows = 64, kDepth = 64;

template <class T, int kN, TileOrder kB>
__global__ void __launch_bounds__(128, 1)
    sparse_kernel(const __grid_constant__ TensorMap map, const uint4* a, const uint32_t* metadata, float* d) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier.init(1);
    fence_barrier_init();
    barrier.arrive_expect(kN * 128);
    for (int box = 0; box < (kB == TileOrder::k_major ? 1 : kN / 64); ++box)
      tma_load(shared + box * 8192, map, barrier, kB == TileOrder::k_major ? 0 : box * 64, 0);
  }
  uint32_t fragments[2][4];
  for (int step = 0; step < 2; ++step) {
    const uint4 words = a[step * 128 + threadIdx.x];
    fragments[step][0] = words.x, fragments[step][1] = words.y;
    fragments[step][2] = words.z, fragments[step][3] = words.w;
  }
  const uint32_t word = metadata[threadIdx.x];
  __syncthreads();
  barrier.wait(0);
  float sum[kN / 2];
  const uint64_t b = tile_descriptor<kB>(shared_address(shared), 8192);
  warpgroup_fence_operand(sum);
  warpgroup_arrive();
  wgmma_sparse<T, 0, kB>(sum, fragments[0], b, word, 0);
  wgmma_sparse<T, 1, kB>(sum, fragments[1], b + kSparseDescriptorStep<kB>, word);
  warpgroup_commit();
  warpgroup_wait<0>();
  warpgroup_fence_operand(sum);
  const int warp = int(threadIdx.x) / 32, g = int(threadIdx.x) % 32 / 4, c = int(threadIdx.x) % 4;
  for (int i = 0; i < kN / 2; ++i)
    d[(warp * 16 + g + i / 2 % 2 * 8) * kN + i / 4 * 8 + c * 2 + i % 2] = sum[i];
}

/// Small integers, exact in both types.
int small(int i) {
  return (i * 7 + i / 13) % 9 - 4;
}

template <class T, int kN, TileOrder kB>
void check_sparse() {
  const Device gpu = Device::cuda(0);
  std::vector<float> a(kRows * kDepth, 0.0f), b(kDepth * kN);
  std::vector<uint16_t> values(kRows * kDepth / 2);
  std::vector<int32_t> metadata(128, 0);
  for (int row = 0; row < kRows; ++row)
    for (int group = 0; group < kDepth / 4; ++group) {
      constexpr int kPairs[6][2] = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}};
      const auto& pair = kPairs[(row * 5 + group) % 6];
      const int step = group / 8, in_step = group % 8, warp = row / 16, g = row % 8, down = row % 16 / 8;
      for (int slot = 0; slot < 2; ++slot) {
        const float value = float(small(row * 32 + group * 2 + slot) + 5);
        a[size_t(row * kDepth + group * 4 + pair[slot])] = value;
        const int thread = warp * 32 + g * 4 + in_step % 4, word = down + in_step / 4 * 2;
        values[size_t(((step * 128 + thread) * 4 + word) * 2 + slot)] =
            std::bit_cast<uint16_t>(T(value).bits);
        metadata[size_t(warp * 32 + g * 4 + step * 2 + in_step / 4)] |=
            pair[slot] << (down * 16 + in_step % 4 * 4 + slot * 2);
      }
    }
  for (size_t i = 0; i < b.size(); ++i) b[i] = float(small(int(i) + 3));
  // b [k, n], or [n, k] if k is dense.
  const Tensor matrix = Tensor::from(b, {kDepth, kN}).to(dtype_of<T>);
  const Tensor on_gpu = (kB == TileOrder::k_major ? matrix.transpose(0, 1).clone() : matrix.clone()).to(gpu);
  const TensorMap map = kB == TileOrder::k_major
                            ? tensor_map<T, 2>(on_gpu.data<T>(), {kDepth, kN}, {on_gpu.layout().stride(0)},
                                               {64, kN}, Swizzle::k128)
                            : tensor_map<T, 2>(on_gpu.data<T>(), {kN, kDepth}, {on_gpu.layout().stride(0)},
                                               {64, 64}, Swizzle::k128);
  std::vector<int32_t> words(values.size() / 2);
  for (size_t i = 0; i < words.size(); ++i)
    words[i] = int32_t(values[2 * i] | uint32_t(values[2 * i + 1]) << 16);
  const Tensor fragments = Tensor::from(words, {int64_t(words.size())}).to(gpu),
               positions = Tensor::from(metadata, {128}).to(gpu),
               d = Tensor::empty_packed({kRows, kN}, DType::f32, gpu);
  launch(gpu, {dim3(1), dim3(128), size_t(kN) * 128}, sparse_kernel<T, kN, kB>, map,
         reinterpret_cast<const uint4*>(fragments.data<int32_t>()),
         reinterpret_cast<const uint32_t*>(positions.data<int32_t>()), d.data<float>());
  const auto y = d.to_vector<float>();
  for (int row = 0; row < kRows; ++row)
    for (int column = 0; column < kN; ++column) {
      float sum = 0;
      for (int k = 0; k < kDepth; ++k) sum += a[size_t(row * kDepth + k)] * b[size_t(k * kN + column)];
      ASSERT_EQ(y[size_t(row * kN + column)], sum)
          << "N = " << kN << ", row " << row << ", column " << column;
    }
}

TEST(WgmmaSparse, BothSelectorsOrdersAndTypes) {
  if (Device::cuda_count() == 0 || Device::cuda(0).info().major != 9)
    GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  check_sparse<bf16, 128, TileOrder::k_major>();
  check_sparse<bf16, 128, TileOrder::mn_major>();
  check_sparse<bf16, 256, TileOrder::k_major>();
  check_sparse<bf16, 256, TileOrder::mn_major>();
  check_sparse<f16, 128, TileOrder::mn_major>();
  check_sparse<f16, 256, TileOrder::k_major>();
}

}  // namespace
}  // namespace tessera::gpu
