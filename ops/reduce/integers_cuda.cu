#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/reduce/reduce_integers.h"

/// Reductions of whole numbers. y begins as the identity, and blocks add their part of an output to it by
/// integer atomics, whose order changes no bit.
///
///   rows     The reduced dimension is the innermost in memory: a block takes an output, or a chunk of one if
///            there are few.
///   columns  A dimension that stays is innermost, or outputs have few elements: a thread takes an output, or
///            a chunk of one, its neighbours the next ones.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / gpu::kWarp;
constexpr int64_t kTargetBlocks = 2048, kTargetThreads = 1 << 17;  // what fills the GPU
constexpr int64_t kRowChunk = 4096, kColumnChunk = 64;             // least elements of a chunk

template <ReduceKind kKind>
__device__ __forceinline__ void add_to(int64_t* to, int64_t value) {
  auto* const word = reinterpret_cast<long long*>(to);
  if constexpr (kKind == ReduceKind::max) atomicMax(word, static_cast<long long>(value));
  if constexpr (kKind == ReduceKind::min) atomicMin(word, static_cast<long long>(value));
  if constexpr (kKind == ReduceKind::sum)
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}
template <ReduceKind kKind>
__device__ __forceinline__ void add_to(int32_t* to, int32_t value) {
  if constexpr (kKind == ReduceKind::max) atomicMax(to, value);
  if constexpr (kKind == ReduceKind::min) atomicMin(to, value);
}

struct Chunks {
  int64_t count, length;  // of an output
};

template <ReduceKind kKind, class T, class Y>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const ReducePlan plan, const Chunks chunks, Y* y, const T* x) {
  __shared__ Y parts[kWarps];
  gpu::wait_and_launch_dependents();
  for (int64_t unit = blockIdx.x; unit < plan.outputs * chunks.count; unit += gridDim.x) {
    const int64_t output = unit / chunks.count, begin = (unit - output * chunks.count) * chunks.length;
    const int64_t end = begin + chunks.length < plan.length ? begin + chunks.length : plan.length;
    int64_t x_offset, y_offset;
    plan.offsets(output, x_offset, y_offset);
    Y all = kIntegerIdentity<kKind, Y>;
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads)
      all = combine_integers<kKind>(all, Y(x[x_offset + plan_offset(plan, i)]));
    for (int step = gpu::kWarp / 2; step > 0; step /= 2)
      all = combine_integers<kKind>(all, __shfl_xor_sync(0xFFFFFFFFu, all, step));
    if (threadIdx.x % gpu::kWarp == 0) parts[threadIdx.x / gpu::kWarp] = all;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kWarps; ++warp) all = combine_integers<kKind>(all, parts[warp]);
      add_to<kKind>(y + y_offset, all);
    }
    __syncthreads();  // before the next unit writes
  }
}

template <ReduceKind kKind, class T, class Y>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const ReducePlan plan, const Chunks chunks, Y* y, const T* x) {
  gpu::wait_and_launch_dependents();
  for (int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x; unit < plan.outputs * chunks.count;
       unit += int64_t(gridDim.x) * kThreads) {
    const int64_t chunk = unit / plan.outputs, output = unit - chunk * plan.outputs;
    const int64_t begin = chunk * chunks.length;
    const int64_t end = begin + chunks.length < plan.length ? begin + chunks.length : plan.length;
    int64_t x_offset, y_offset;
    plan.offsets(output, x_offset, y_offset);
    Y all = kIntegerIdentity<kKind, Y>;
#pragma unroll 4
    for (int64_t i = begin; i < end; ++i)
      all = combine_integers<kKind>(all, Y(x[x_offset + plan_offset(plan, i)]));
    add_to<kKind>(y + y_offset, all);
  }
}

}  // namespace

void reduce_integers_cuda(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind) {
  const Device device = x.device();
  const bool rows =
      plan.kept_rank == 0 || (plan.length >= 2 * gpu::kWarp &&
                              plan.reduced_x[plan.reduced_rank - 1] < plan.kept_x[plan.kept_rank - 1]);
  const int64_t wanted = std::min(gpu::ceil_div(plan.length, rows ? kRowChunk : kColumnChunk),
                                  gpu::ceil_div(rows ? kTargetBlocks : kTargetThreads, plan.outputs));
  Chunks chunks{1, gpu::ceil_div(plan.length, wanted)};
  chunks.count = gpu::ceil_div(plan.length, chunks.length);
  const int64_t units = plan.outputs * chunks.count, blocks = rows ? units : gpu::ceil_div(units, kThreads);
  const gpu::LaunchShape shape{
      gpu::grid_of(std::min<int64_t>(blocks, int64_t(device.multiprocessors()) * 32)), kThreads};
  dispatch_integer_reduction(x.dtype(), kind, [&]<ReduceKind kKind, class T, class Y>() {
    y.fill(double(kIntegerIdentity<kKind, Y>));  // the ends of i64 are exact, or saturate to it
    gpu::launch_dependent(device, shape, rows ? rows_kernel<kKind, T, Y> : columns_kernel<kKind, T, Y>, plan,
                          chunks, y.data<Y>(), x.data<T>());
  });
}

}  // namespace tessera::ops
