#include <algorithm>

#include "gpu/sum.cuh"
#include "ops/reduce/persistent.cuh"
#include "optim/elementwise.cuh"

/// The optimizers' kernels.
///
/// The update of elementwise rules is in optim/elementwise.cuh.
///
/// Norm: all gradients once, 4 bytes per element, in norm blocks of 64 KiB of one parameter (with the zeros
/// between its rows). A block of threads takes one after the other: squares are added in f64 (the
/// multiply-adds hide behind the reads), each thread over its own elements, then a butterfly. Three blocks
/// per SM have 96 KiB in flight, three times what an H200 needs by Little's law (36 bytes per ns and SM, some
/// 0.8 us), so that the memory stays busy while one of them sums. The block that ends last adds the norm
/// blocks' sums in their order, and its first thread decides about the step. Orders depend on the parameters
/// and their order alone: neither on the places in the arena nor on the number of SMs.

namespace tessera::optim {
namespace {

using elementwise::kPack;
using elementwise::kThreads;
constexpr int kNormBlocks = 3;  // a processor, for the norm: 42 registers a thread
constexpr int kInFlight = 4;    // packs a thread reads at once for the norm

__global__ void __launch_bounds__(kThreads, kNormBlocks)
    measure_kernel(StepArgs args, double* partials, PrepareOptions options, unsigned* arrived) {
  gpu::wait_and_launch_dependents();
  using Pack = gpu::Pack<float, kPack>;
  const auto squares = [](const Pack& pack) {
    double sum = 0;
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum += double(pack.at[k]) * double(pack.at[k]);
    return sum;
  };
  for (int64_t i = blockIdx.x; i < args.norm_block_count; i += gridDim.x) {
    const NormBlock block = args.norm_blocks[i];
    const auto* const from =
        reinterpret_cast<const Pack*>(static_cast<const float*>(args.gradients) + block.offset);
    const int packs = block.elements / kPack;
    double sum = 0;
    int at = int(threadIdx.x);
    for (; at + (kInFlight - 1) * kThreads < packs; at += kInFlight * kThreads) {
      Pack values[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) values[u] = from[at + u * kThreads];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) sum += squares(values[u]);
    }
    for (; at < packs; at += kThreads) sum += squares(from[at]);
    sum = gpu::block_sum(sum);
    if (threadIdx.x == 0) partials[i] = sum;
    __syncthreads();  // block_sum's shared memory may be written again
  }
  if (!gpu::last_block(arrived)) return;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < args.norm_block_count; i += kThreads) sum += partials[i];
  sum = gpu::block_sum(sum);
  if (threadIdx.x == 0) prepare(args.status, args.counts, args.scaling, sum, options, args.restarts);
}

/// Of states that are spread over ranks: the squares of this rank's norm blocks, each into its slot. The
/// order within a block is that of measure_kernel.
__global__ void __launch_bounds__(kThreads, kNormBlocks) squares_kernel(StepArgs args, double* partials) {
  gpu::wait_and_launch_dependents();
  using Pack = gpu::Pack<float, kPack>;
  for (int64_t i = blockIdx.x; i < args.norm_block_count; i += gridDim.x) {
    const NormBlock block = args.norm_blocks[i];
    const auto* const from =
        reinterpret_cast<const Pack*>(static_cast<const float*>(args.gradients) + block.offset);
    double sum = 0;
#pragma unroll 4
    for (int at = int(threadIdx.x); at < block.elements / kPack; at += kThreads) {
      const Pack pack = from[at];
      double squares = 0;
#pragma unroll
      for (int k = 0; k < kPack; ++k) squares += double(pack.at[k]) * double(pack.at[k]);
      sum += squares;
    }
    sum = gpu::block_sum(sum);
    if (threadIdx.x == 0) partials[block.slot] = sum;
    __syncthreads();  // block_sum's shared memory may be written again
  }
}

/// The end of measure_kernel, by the sums of all ranks. One block.
__global__ void __launch_bounds__(kThreads)
    decision_kernel(StepArgs args, const double* partials, PrepareOptions options) {
  gpu::wait_and_launch_dependents();
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < args.norm_slots; i += kThreads) sum += partials[i];
  sum = gpu::block_sum(sum);
  if (threadIdx.x == 0) prepare(args.status, args.counts, args.scaling, sum, options, args.restarts);
}

/// Has not run on a GPU yet.
__global__ void prepare_parameters_kernel(StepArgs args, PrepareOptions options) {
  gpu::wait_and_launch_dependents();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < args.place_count)
    prepare_parameter(args.status, args.arrived[i], args.parameter_steps[i], args.parameter_bias + 2 * i,
                      options);
}

__global__ void commit_kernel(unsigned char* to, const unsigned char* from, int64_t words, int64_t bytes,
                              const double* status) {
  gpu::wait_and_launch_dependents();
  if (status[kApply] == 0) return;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = thread; i < words; i += step)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (int64_t i = words * int64_t(sizeof(uint4)) + thread; i < bytes; i += step) to[i] = from[i];
}

__global__ void prepare_average_kernel(StepArgs args, double decay, bool warmup) {
  gpu::wait_and_launch_dependents();
  prepare_average(args.status, args.counts, decay, warmup);
}

__global__ void write_status_kernel(double* status, int slot, double value) {
  gpu::wait_and_launch_dependents();
  status[slot] = value;
}

}  // namespace

template void update_cuda(Device, const StepArgs&, const AdamWRule&);
template void update_cuda(Device, const StepArgs&, const SgdRule&);
template void update_cuda(Device, const StepArgs&, const MomentumRule&);
template void update_cuda(Device, const StepArgs&, const TakeRule&);
template void update_cuda(Device, const StepArgs&, const DescendRule&);
template void update_cuda(Device, const StepArgs&, const DirectionRule&);
template void update_cuda(Device, const StepArgs&, const MomentsRule&);
template void update_cuda(Device, const StepArgs&, const AverageRule&);

void commit_cuda(Device device, void* to, const void* from, size_t bytes, const double* status) {
  if (bytes == 0) return;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % sizeof(uint4) == 0;
  const int64_t words = aligned ? int64_t(bytes / sizeof(uint4)) : 0;
  const int64_t blocks =
      std::clamp<int64_t>((std::max(words, int64_t(bytes) - words * 16) + kThreads - 1) / kThreads, 1,
                          int64_t(device.multiprocessors()) * 4);
  gpu::launch_dependent(device, {dim3(unsigned(blocks)), kThreads}, commit_kernel,
                        static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), words,
                        int64_t(bytes), status);
}

void measure_cuda(Device device, const StepArgs& args, double* partials, const PrepareOptions& options,
                  Measure part) {
  const int64_t resident = int64_t(device.multiprocessors()) * kNormBlocks;
  const int64_t blocks = std::clamp<int64_t>(args.norm_block_count, 1, resident);
  if (part == Measure::squares)
    return gpu::launch_dependent(device, {dim3(unsigned(blocks)), kThreads}, squares_kernel, args, partials);
  if (part == Measure::decision)
    return gpu::launch_dependent(device, {1, kThreads}, decision_kernel, args,
                                 static_cast<const double*>(partials), options);
  gpu::launch_dependent(device, {dim3(unsigned(blocks)), kThreads}, measure_kernel, args, partials, options,
                        device.counters(1));
}

void prepare_parameters_cuda(Device device, const StepArgs& args, const PrepareOptions& options) {
  if (args.place_count == 0) return;
  gpu::launch_dependent(device, {dim3(unsigned((args.place_count + kThreads - 1) / kThreads)), kThreads},
                        prepare_parameters_kernel, args, options);
}

void prepare_average_cuda(Device device, const StepArgs& args, double decay, bool warmup) {
  gpu::launch_dependent(device, {1, 1}, prepare_average_kernel, args, decay, warmup);
}

void write_status_cuda(Device device, double* status, StatusSlot slot, double value) {
  gpu::launch_dependent(device, {1, 1}, write_status_kernel, status, int(slot), value);
}

}  // namespace tessera::optim
