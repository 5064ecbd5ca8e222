#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "gpu/approx.cuh"
#include "gpu/barrier.cuh"
#include "gpu/global.cuh"
#include "gpu/halves.cuh"
#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/reread.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "tensor/tensor.h"

/// The vocabulary of the sm_90a kernels, each word alone: one warpgroup multiplies 64 x N x 128 tiles that
/// TMA brought, in every order and width; boxes over an odd edge; clusters and what their blocks
/// send each other; additions by TMA; stmatrix; halves; flags and loads in global memory; small
/// products and transposed matrices in registers; approximations.

namespace tessera::gpu {
namespace {

constexpr int kK = 128;  // two boxes along k

bool no_hopper() {
  return Device::cuda_count() == 0 || Device::cuda(0).info().major != 9;
}

/// Brings an operand of `extent` rows (m or n) and kK of k, 64 of them a box.
template <TileOrder kOrder>
__device__ void load_operand(void* to, const TensorMap& map, Barrier& barrier, int extent) {
  char* const at = static_cast<char*>(to);
  if constexpr (kOrder == TileOrder::k_major) {
    for (int k = 0; k < kK; k += 64) tma_load(at + k / 64 * extent * 128, map, barrier, k, 0);
  } else {
    for (int row = 0; row < extent; row += 64) tma_load(at + row / 64 * kK * 128, map, barrier, row, 0);
  }
}
template <TileOrder kOrder>
__device__ uint64_t operand_at(const void* tile, int extent, int step) {
  if constexpr (kOrder == TileOrder::k_major)
    return tile_descriptor<kOrder>(shared_address(tile) + step / 4 * extent * 128) +
           step % 4 * kDescriptorStep<kOrder>;
  else
    return tile_descriptor<kOrder>(shared_address(tile), kK * 128) + step * kDescriptorStep<kOrder>;
}

/// d [64, N] = a b, all of it in one block of one warpgroup.
template <class T, int kN, TileOrder kA, TileOrder kB, bool kRegisters>
__global__ void __launch_bounds__(128, 1)
    gemm_kernel(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* d) {
  constexpr int kBoxedN = (kN + 63) / 64 * 64;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barrier barrier;
  char* const a_tile = shared;
  char* const b_tile = shared + 64 * kK * 2;
  if (threadIdx.x == 0) {
    barrier.init(1);
    fence_barrier_init();
    barrier.arrive_expect((64 + kBoxedN) * kK * 2);
    load_operand<kA>(a_tile, map_a, barrier, 64);
    load_operand<kB>(b_tile, map_b, barrier, kBoxedN);
  }
  __syncthreads();
  barrier.wait(0);
  float sum[kN / 2];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  uint32_t fragments[kK / 16][4];
  if constexpr (kRegisters) {
    for (int step = 0; step < kK / 16; ++step) {
      const int row = warp * 16 + lane % 16, chunk = step % 4 * 2 + lane / 16;
      ldmatrix_x4(fragments[step],
                  shared_address(a_tile) + step / 4 * 64 * 128 + swizzled_offset(row, chunk));
    }
  }
  warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    const uint64_t b = operand_at<kB>(b_tile, kBoxedN, step);
    if constexpr (kRegisters)
      wgmma<T, kB>(sum, fragments[step], b, step > 0);
    else
      wgmma<T, kA, kB>(sum, operand_at<kA>(a_tile, 64, step), b, step > 0);
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  warpgroup_fence_operand(sum);
#pragma unroll
  for (int j = 0; j < kN / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      d[(warp * 16 + lane / 4 + e / 2 * 8) * kN + j * 8 + lane % 4 * 2 + e % 2] = sum[4 * j + e];
}

Tensor on_gpu(const std::vector<float>& values, Shape shape, DType dtype) {
  return Tensor::from(values, shape, Device::cpu()).to(dtype).to(Device::cuda(0));
}

template <class T, int kN, TileOrder kA, TileOrder kB, bool kRegisters>
void check_product() {
  constexpr int kBoxedN = (kN + 63) / 64 * 64;
  const Device gpu = Device::cuda(0);
  const DType dtype = std::is_same_v<T, bf16> ? DType::bf16 : DType::f16;
  // Small integers: exact in both types, so that the sums are too.
  std::vector<float> a(64 * kK), b(size_t(kN) * kK);
  uint32_t state = 12345u + kN;
  const auto next = [&] { return float(int((state = state * 1664525u + 1013904223u) >> 28) - 8); };
  for (float& value : a) value = next();
  for (float& value : b) value = next();
  const auto stored = [&](const std::vector<float>& x, int extent, TileOrder order) {
    std::vector<float> lies(x.size());
    for (int row = 0; row < extent; ++row)
      for (int k = 0; k < kK; ++k)
        lies[size_t(order == TileOrder::k_major ? row * kK + k : k * extent + row)] = x[size_t(row * kK + k)];
    return order == TileOrder::k_major ? on_gpu(lies, {extent, kK}, dtype)
                                       : on_gpu(lies, {kK, extent}, dtype);
  };
  const Tensor left = stored(a, 64, kA), right = stored(b, kN, kB);
  const auto map = [&](const Tensor& x, int boxed, TileOrder order) {
    const int rows = order == TileOrder::k_major ? std::min(boxed, 256) : kK;
    return tensor_map<T, 2>(x.data<T>(), {x.size(1), x.size(0)}, {x.row_stride()}, {64, rows}, Swizzle::k128);
  };
  const Tensor d = Tensor::empty_packed({64, kN}, DType::f32, gpu);
  launch(gpu, {dim3(1), dim3(128), size_t(64 + kBoxedN) * kK * 2}, gemm_kernel<T, kN, kA, kB, kRegisters>,
         map(left, 64, kA), map(right, kBoxedN, kB), d.data<float>());
  const std::vector<float> result = d.to_vector<float>();
  for (int row = 0; row < 64; ++row)
    for (int column = 0; column < kN; ++column) {
      float expected = 0;
      for (int k = 0; k < kK; ++k) expected += a[size_t(row * kK + k)] * b[size_t(column * kK + k)];
      ASSERT_EQ(result[size_t(row * kN + column)], expected)
          << "row " << row << " column " << column << " of N " << kN;
    }
}

template <int kN>
void check_orders() {
  using enum TileOrder;
  check_product<bf16, kN, k_major, k_major, false>();
  check_product<bf16, kN, k_major, k_major, true>();
  if constexpr (kN % 8 == 0) {
    check_product<bf16, kN, k_major, mn_major, false>();
    check_product<bf16, kN, mn_major, k_major, false>();
    check_product<f16, kN, mn_major, mn_major, false>();
    check_product<f16, kN, k_major, mn_major, true>();
  }
}

TEST(Hopper, ProductsOfEveryWidth) {
  if (no_hopper()) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  check_orders<8>();
  check_orders<64>();
  check_orders<80>();
  check_orders<128>();
  check_orders<152>();
  check_orders<192>();
  check_orders<256>();
}

/// Each block of a cluster of two brings half the tile for both; then block 1 adds its rank to block 0's.
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128, 1)
    multicast_kernel(const __grid_constant__ TensorMap map, float* out) {
  __shared__ __align__(1024) float tile[2][8][32];
  __shared__ Barrier landed, other;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    landed.init(1);
    other.init(2);
    fence_barrier_init();
  }
  cluster_sync();
  if (threadIdx.x == 0) {
    landed.arrive_expect(sizeof tile);
    tma_load_multicast(tile[rank], map, landed, 3, 0, int(rank) * 8);
    other.arrive();
    other.arrive_remote(rank ^ 1);
  }
  landed.wait(0);
  other.wait(0);
  for (int i = int(threadIdx.x); i < 512; i += 128) out[rank * 512 + i] = tile[i / 256][i / 32 % 8][i % 32];
  cluster_sync();
}

TEST(Hopper, MulticastReachesEveryBlockAndReadsZerosOutside) {
  if (no_hopper()) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  const Device gpu = Device::cuda(0);
  constexpr int kRows = 13, kColumns = 29;
  std::vector<float> values(kRows * kColumns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i + 1);
  const Tensor wide = Tensor::full({kRows, kColumns + 3}, NAN, DType::f32, gpu),
               x = wide.slice(1, 0, kColumns);
  x.copy_from(on_gpu(values, {kRows, kColumns}, DType::f32));
  const Tensor out = Tensor::empty_packed({2, 16, 32}, DType::f32, gpu);
  launch(gpu, {dim3(2), dim3(128)}, multicast_kernel,
         tensor_map<float, 2>(x.data<float>(), {kColumns, kRows}, {x.row_stride()}, {32, 8}, Swizzle::none),
         out.data<float>());
  const Tensor result = out.to(Device::cpu());
  for (int block = 0; block < 2; ++block)
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 32; ++column)
        ASSERT_EQ(result.data<float>()[(block * 16 + row) * 32 + column],
                  row < kRows && column < kColumns ? values[size_t(row * kColumns + column)] : 0.0f)
            << block << " " << row << " " << column;
}

/// Stores a 16 x 16 tile by stmatrix into a swizzled box, writes it out with TMA, clipped to 11
/// rows and 13 columns, and adds 32 floats twice.
__global__ void __launch_bounds__(32, 1) store_kernel(const __grid_constant__ TensorMap map, float* sums) {
  __shared__ __align__(1024) char box[16 * 128];
  __shared__ __align__(128) float numbers[32];
  const int lane = int(threadIdx.x);
  for (int i = lane; i < 16 * 128 / 4; i += 32) reinterpret_cast<uint32_t*>(box)[i] = 0;
  numbers[lane] = float(lane);
  __syncwarp();
  uint32_t values[4];
  const int g = lane / 4, c = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {  // matrix i: rows (i % 2) * 8 + g, columns i / 2 * 8 + c
    const int row = i % 2 * 8 + g, column = i / 2 * 8 + c;
    values[i] = pack_halves<bf16>(float(row * 16 + column), float(row * 16 + column + 1));
  }
  stmatrix_x4(shared_address(box) + swizzled_offset(lane % 16, lane / 16), values);
  fence_async_shared();
  __syncwarp();
  if (elect_one()) {
    tma_store(map, box, 0, 0);
    bulk_reduce_add(sums, numbers, sizeof numbers);
    bulk_reduce_add(sums, numbers, sizeof numbers);
    commit_stores();
    wait_stores<0>();
  }
}

TEST(Hopper, StoresClipAndAdd) {
  if (no_hopper()) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  const Device gpu = Device::cuda(0);
  const Tensor out = Tensor::empty_packed({16, 64}, DType::bf16, gpu),
               sums = Tensor::empty_packed({32}, DType::f32, gpu);
  out.fill(-1);
  sums.fill(1);
  launch(gpu, {dim3(1), dim3(32)}, store_kernel,
         tensor_map<bf16, 2>(out.data<bf16>(), {13, 11}, {64}, {64, 16}, Swizzle::k128), sums.data<float>());
  const Tensor result = out.to(DType::f32).to(Device::cpu()), added = sums.to(Device::cpu());
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 64; ++column)
      ASSERT_EQ(result.data<float>()[row * 64 + column],
                row < 11 && column < 16 ? float(row * 16 + column) : -1.0f)
          << row << " " << column;  // 13 columns, rounded up to 16 bytes
  for (int i = 0; i < 32; ++i) EXPECT_EQ(added.data<float>()[i], 1.0f + 2.0f * float(i));
}

/// Adds a box of 8 x 32 floats to a tensor of 5 x 27, twice; asks for it in L2 first.
__global__ void __launch_bounds__(32, 1) add_kernel(const __grid_constant__ TensorMap map) {
  __shared__ __align__(128) float box[8][32];
  for (int row = 0; row < 8; ++row) box[row][threadIdx.x] = float(row * 32 + int(threadIdx.x));
  fence_async_shared();
  __syncwarp();
  if (elect_one()) {
    tma_prefetch(map, 0, 0);
    tma_reduce_add(map, box, 0, 0);
    tma_reduce_add(map, box, 0, 0);
    commit_stores();
    wait_stores<0>();
  }
}

TEST(Hopper, BoxesAreAddedInsideTheTensorAlone) {
  if (no_hopper()) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  const Tensor sums = Tensor::empty_packed({8, 32}, DType::f32, Device::cuda(0));
  sums.fill(1);
  launch(sums.device(), {dim3(1), dim3(32)}, add_kernel,
         tensor_map<float, 2>(sums.data<float>(), {27, 5}, {32}, {32, 8}, Swizzle::none));
  const Tensor result = sums.to(Device::cpu());
  for (int row = 0; row < 8; ++row)
    for (int column = 0; column < 32; ++column)
      ASSERT_EQ(result.data<float>()[row * 32 + column],
                row < 5 && column < 28 ? 1.0f + 2.0f * float(row * 32 + column) : 1.0f)
          << row << " " << column;  // 27 columns, rounded up to 16 bytes
}

/// Each block of a cluster of two sends the other 16 bytes per thread, and reads what came.
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128, 1) send_kernel(uint32_t* out) {
  __shared__ __align__(16) uint32_t mail[128][4];
  __shared__ Barrier came;
  const uint32_t thread = uint32_t(reread_thread()), rank = uint32_t(reread_cluster_rank());
  if (thread == 0) {
    came.init(1);
    fence_barrier_init();
    came.arrive_expect(sizeof mail);
  }
  cluster_sync();
  const uint32_t words[4] = {rank * 1000 + thread, thread * 3, 0xFFFFFFFFu - thread, 7};
  st_async(cluster_address(shared_address(mail[thread]), rank ^ 1), words,
           reread_cluster_address(shared_address(&came), int(rank) ^ 1));
  came.wait(0);
  uint32_t found[4];
  load_shared(found, shared_address(mail[thread]));
  for (int i = 0; i < 4; ++i) out[(rank * 128 + thread) * 4 + uint32_t(i)] = found[i];
  cluster_sync();
}

TEST(Hopper, BlocksOfAClusterSendEachOtherWords) {
  if (no_hopper()) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  const Tensor out = Tensor::empty_packed({2, 128, 4}, DType::i32, Device::cuda(0));
  launch(out.device(), {dim3(2), dim3(128)}, send_kernel, reinterpret_cast<uint32_t*>(out.data<int32_t>()));
  const Tensor result = out.to(Device::cpu());
  for (uint32_t rank = 0; rank < 2; ++rank)
    for (uint32_t thread = 0; thread < 128; ++thread) {
      const int32_t* const words = result.data<int32_t>() + (rank * 128 + thread) * 4;
      ASSERT_EQ(words[0], int32_t((rank ^ 1) * 1000 + thread));
      ASSERT_EQ(words[1], int32_t(thread * 3));
      ASSERT_EQ(words[2], int32_t(0xFFFFFFFFu - thread));
      ASSERT_EQ(words[3], 7);
    }
}

/// Block 0 writes numbers and raises a flag; the others wait for it, copy them and are counted, for which
/// block 0 waits.
__global__ void __launch_bounds__(32, 1) flag_kernel(float* numbers, int* flag, float* out) {
  const int lane = reread_lane(), block = reread_block();
  if (block == 0) {
    numbers[lane * 4] = float(lane + 1);
    __threadfence();
    __syncwarp();
    if (lane == 0) red_max_release(flag, reread_grid());
    while (load_acquire(flag + 1) != reread_grid() - 1) {
    }
    out[lane] = out[32 + lane];  // written by another block before it was counted
  } else {
    while (load_acquire(flag) != reread_grid()) {
    }
    prefetch_l2(numbers);
    bulk_prefetch_l2(numbers, 512);
    out[block * 32 + lane] = std::bit_cast<float>(load_no_allocate(numbers + lane * 4).word[0]);
    __syncwarp();
    if (lane == 0) atomic_add_acq_rel(flag + 1, 1);
  }
}

TEST(Hopper, FlagsOrderWhatBlocksWrite) {
  if (no_hopper()) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  const Device gpu = Device::cuda(0);
  constexpr int kBlocks = 20;
  const Tensor numbers = Tensor::empty_packed({128}, DType::f32, gpu),
               flag = Tensor::empty_packed({2}, DType::i32, gpu),
               out = Tensor::empty_packed({kBlocks, 32}, DType::f32, gpu);
  numbers.fill(-1);
  flag.fill(0);
  launch(gpu, {dim3(kBlocks), dim3(32)}, flag_kernel, numbers.data<float>(), flag.data<int32_t>(),
         out.data<float>());
  const Tensor result = out.to(Device::cpu());
  for (int i = 0; i < kBlocks * 32; ++i) ASSERT_EQ(result.data<float>()[i], float(i % 32 + 1)) << i;
}

/// d [16, 8] = a [16, 8] b [8, 8] of small integers, and the transposed 8 x 8 matrix of b's words.
template <class T>
__global__ void __launch_bounds__(32, 1) fragment_kernel(float* d, uint32_t* turned) {
  const int g = reread_lane() / 4, c = reread_lane() % 4;
  const auto a = [](int row, int k) { return float(row - 2 * k); };
  const auto b = [](int k, int column) { return float(k * 8 + column - 30); };
  float sums[4] = {1, 2, 3, 4};
  mma_m16n8k8<T>(sums, pack_halves<T>(a(g, 2 * c), a(g, 2 * c + 1)),
                 pack_halves<T>(a(g + 8, 2 * c), a(g + 8, 2 * c + 1)),
                 pack_halves<T>(b(2 * c, g), b(2 * c + 1, g)));
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * c + i % 2] = sums[i];
  const float2 halves = unpack_halves<T>(movmatrix_trans(pack_halves<T>(b(g, 2 * c), b(g, 2 * c + 1))));
  turned[reread_lane() * 2] = std::bit_cast<uint32_t>(halves.x);
  turned[reread_lane() * 2 + 1] = std::bit_cast<uint32_t>(halves.y);
}

template <class T>
void check_fragments() {
  const Device gpu = Device::cuda(0);
  const Tensor d = Tensor::empty_packed({16, 8}, DType::f32, gpu),
               turned = Tensor::empty_packed({8, 8}, DType::f32, gpu);
  launch(gpu, {dim3(1), dim3(32)}, fragment_kernel<T>, d.data<float>(),
         reinterpret_cast<uint32_t*>(turned.data<float>()));
  const Tensor sums = d.to(Device::cpu()), columns = turned.to(Device::cpu());
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float expected = float(1 + row / 8 * 2 + column % 2);
      for (int k = 0; k < 8; ++k) expected += float(row - 2 * k) * float(k * 8 + column - 30);
      ASSERT_EQ(sums.data<float>()[row * 8 + column], expected) << row << " " << column;
      if (row < 8) ASSERT_EQ(columns.data<float>()[row * 8 + column], float(column * 8 + row - 30));
    }
}

TEST(Hopper, SmallProductsAndTransposedMatrices) {
  if (no_hopper()) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  check_fragments<bf16>();
  check_fragments<f16>();
}

/// Each lane stores one of 32 halves, from behind, next to a word that stays.
__global__ void __launch_bounds__(32, 1) half_kernel(uint32_t* words) {
  __shared__ uint32_t shared[17];
  if (threadIdx.x < 17) shared[threadIdx.x] = 0xABCDABCDu;
  __syncwarp();
  store_shared(shared_address(shared) + (31 - threadIdx.x) * 2, uint16_t(1000 + threadIdx.x));
  __syncwarp();
  if (threadIdx.x < 17) words[threadIdx.x] = shared[threadIdx.x];
}

TEST(Hopper, HalvesAreStoredAlone) {
  if (no_hopper()) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  const Device gpu = Device::cuda(0);
  const Tensor words = Tensor::empty_packed({17}, DType::i32, gpu);
  launch(gpu, {dim3(1), dim3(32)}, half_kernel, reinterpret_cast<uint32_t*>(words.raw()));
  const auto values = words.to_vector<int32_t>();
  for (uint32_t i = 0; i < 16; ++i)
    EXPECT_EQ(uint32_t(values[i]), (1000 + 30 - 2 * i) << 16 | (1000 + 31 - 2 * i)) << i;
  EXPECT_EQ(uint32_t(values[16]), 0xABCDABCDu);
}

__global__ void approx_kernel(float* out, int count) {
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
    const float x = (float(i) - 0.5f * float(count)) * 0.01f;
    out[i * 3] = exp2_approx(x);
    out[i * 3 + 1] = reciprocal_approx(x + 0.003f);
    out[i * 3 + 2] = tanh_approx(x);
  }
}

TEST(Hopper, ApproximationsAreAsGoodAsTheySay) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  constexpr int kCount = 4000;
  const Tensor out = Tensor::empty_packed({kCount, 3}, DType::f32, Device::cuda(0));
  launch(out.device(), {dim3(1), dim3(256)}, approx_kernel, out.data<float>(), kCount);
  const Tensor result = out.to(Device::cpu());
  for (int i = 0; i < kCount; ++i) {
    const float x = (float(i) - 0.5f * float(kCount)) * 0.01f, shifted = x + 0.003f;
    const float* const found = result.data<float>() + i * 3;
    const double power = std::exp2(double(x)), quotient = 1.0 / double(shifted),
                 tangent = std::tanh(double(x));
    EXPECT_NEAR(found[0], power, power * 0x1p-22) << x;
    EXPECT_NEAR(found[1], quotient, std::abs(quotient) * 0x1p-22) << shifted;
    EXPECT_NEAR(found[2], tangent, std::abs(tangent) * 0x1.01p-11) << x;
  }
}

}  // namespace
}  // namespace tessera::gpu
