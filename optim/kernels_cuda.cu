#include <algorithm>

#include "gpu/chain.cuh"
#include "gpu/pack.cuh"
#include "gpu/sum.cuh"
#include "ops/reduce/persistent.cuh"
#include "optim/kernels.h"

/// The optimizers' kernels.
///
/// Update: one block a chunk of about 4,096 elements of one parameter, found in a table, so that a step is
/// one launch for all parameters. A thread takes four neighbours of a row: 16 bytes of each f32 stream
/// (gradient, states, master or weight) and 8 of a 16-bit weight; ragged ends of rows and unaligned weights
/// go one by one. AdamW in f32 reads 16 bytes an element and writes 12; with a 16-bit weight beside its
/// master it writes
/// 14. About 15 FLOPs an element: bound by memory. Two blocks of 512 threads a processor with one piece each
/// in flight (64 KiB) are enough; short chunks are better than long ones, for the streams of blocks that run
/// side by side then stay close together in memory (docs/ops/optim.md has the table).
///
/// Norm: all gradients once, 4 bytes an element, in norm blocks of 64 KiB of one parameter (with the zeros
/// between its rows). A block of threads takes one after the other: squares are added in f64 (the
/// multiply-adds hide behind the reads), each thread over its own elements, then a butterfly. Three blocks
/// per SM have 96 KiB in flight, three times what an H200 needs by Little's law (36 bytes per ns and SM, some
/// 0.8 us), so that the memory stays busy while one of them sums. The block that ends last adds the norm
/// blocks' sums in their order, and its first thread decides about the step. Orders depend on the parameters
/// and their order alone: neither on the places in the arena nor on the number of SMs.

namespace tessera::optim {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 2;  // a processor, which bounds the registers of a thread at 64
constexpr int kPack = 4;
constexpr int kNormBlocks = 3;  // a processor, for the norm: 42 registers a thread
constexpr int kInFlight = 4;    // packs a thread reads at once for the norm

__global__ void __launch_bounds__(kThreads, kNormBlocks)
    measure_kernel(StepArgs args, double* partials, PrepareOptions options, unsigned* arrived) {
  gpu::take_turn();
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
  if (threadIdx.x == 0) prepare(args.status, args.counts, args.scaling, sum, options);
}

/// The streams of a parameter, from a chunk's first element on.
template <class W>
struct Streams {
  W* weight;
  float *master, *states[2];  // master: null if the weight is its own
  const float* gradient;
};

/// N neighbours: loaded, changed, stored. N is 4 where all streams are aligned, else 1. `at`: in all streams
/// but the weight.
template <int N, class W, class R>
__device__ __forceinline__ void update_piece(const Streams<W>& streams, const R& rule,
                                             const Scalars<float>& scalars, float clip, int64_t weight_at,
                                             int64_t at) {
  constexpr int kStates = R::kStates;
  gpu::Pack<float, N> w, g, s[2];
  if (streams.master) {
    w = gpu::load_pack<N>(streams.master + at);
  } else {
    const auto raw = gpu::load_pack<N>(streams.weight + weight_at);
#pragma unroll
    for (int k = 0; k < N; ++k) w.at[k] = float(raw.at[k]);
  }
  if constexpr (R::kGradient) g = gpu::load_pack<N>(streams.gradient + at);
#pragma unroll
  for (int n = 0; n < kStates; ++n) s[n] = gpu::load_pack<N>(streams.states[n] + at);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float states[2] = {};
#pragma unroll
    for (int n = 0; n < kStates; ++n) states[n] = s[n].at[k];
    float gradient = 0;
    if constexpr (R::kGradient) gradient = clip * g.at[k];
    rule(w.at[k], gradient, states, scalars);
#pragma unroll
    for (int n = 0; n < kStates; ++n) s[n].at[k] = states[n];
  }
#pragma unroll
  for (int n = 0; n < kStates; ++n) gpu::store_pack<N>(streams.states[n] + at, s[n]);
  if constexpr (R::kWritesWeight) {
    if (streams.master) gpu::store_pack<N>(streams.master + at, w);
    gpu::Pack<W, N> rounded;
#pragma unroll
    for (int k = 0; k < N; ++k) rounded.at[k] = W(w.at[k]);
    gpu::store_pack<N>(streams.weight + weight_at, rounded);
  }
}

template <class W, class R>
__device__ __forceinline__ void update_chunk(const StepArgs& args, const R& rule, const Chunk& chunk,
                                             const Place& place) {
  const Scalars<float> scalars{float(args.status[kRate] * place.lr_scale), float(place.weight_decay),
                               float(args.status[kBias1]), float(args.status[kBias2])};
  const float clip = float(args.status[kClip]);
  const int64_t within = chunk.row * place.arena_stride + chunk.column, begin = place.offset + within;
  const Streams<W> streams{
      static_cast<W*>(place.weight) + chunk.row * place.stride + chunk.column,
      place.master < 0 ? nullptr : static_cast<float*>(args.masters) + place.master + within,
      {static_cast<float*>(args.states[0]) + begin, static_cast<float*>(args.states[1]) + begin},
      static_cast<const float*>(args.gradients) + begin};
  // Pieces of up to four columns, numbered along the rows of the chunk.
  const uint32_t per_row = uint32_t(chunk.columns + kPack - 1) / kPack,
                 pieces = per_row * uint32_t(chunk.rows);
  const int64_t weight_stride = place.stride, arena_stride = place.arena_stride;
  const bool aligned = place.aligned;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < pieces; i += kThreads) {
    const uint32_t line = i / per_row, column = (i - line * per_row) * kPack;
    const int64_t weight_at = line * weight_stride + column, at = line * arena_stride + column;
    const int length = min(kPack, chunk.columns - int(column));
    if (length == kPack && aligned) {
      update_piece<kPack>(streams, rule, scalars, clip, weight_at, at);
    } else {
#pragma unroll 1
      for (int k = 0; k < length; ++k) update_piece<1>(streams, rule, scalars, clip, weight_at + k, at + k);
    }
  }
}

template <class R>
__global__ void __launch_bounds__(kThreads, kBlocks) update_kernel(StepArgs args, R rule) {
  gpu::take_turn();
  if (args.status[kApply] == 0) return;
  const Chunk chunk = args.chunks[blockIdx.x];
  const Place place = args.places[chunk.place];
  switch (place.dtype) {
    case DType::bf16:
      return update_chunk<bf16>(args, rule, chunk, place);
    case DType::f16:
      return update_chunk<f16>(args, rule, chunk, place);
    default:
      return update_chunk<float>(args, rule, chunk, place);
  }
}

__global__ void prepare_average_kernel(StepArgs args, double decay, bool warmup) {
  gpu::take_turn();
  prepare_average(args.status, args.counts, decay, warmup);
}

__global__ void write_status_kernel(double* status, int slot, double value) {
  gpu::take_turn();
  status[slot] = value;
}

}  // namespace

void update_cuda(Device device, const StepArgs& args, const Rule& rule) {
  std::visit(
      [&]<class R>(const R& chosen) {
        gpu::launch_chained(device, {dim3(unsigned(args.chunk_count)), kThreads}, update_kernel<R>, args,
                            chosen);
      },
      rule);
}

void measure_cuda(Device device, const StepArgs& args, double* partials, const PrepareOptions& options) {
  const int64_t resident = int64_t(device.multiprocessors()) * kNormBlocks;
  const int64_t blocks = std::clamp<int64_t>(args.norm_block_count, 1, resident);
  gpu::launch_chained(device, {dim3(unsigned(blocks)), kThreads}, measure_kernel, args, partials, options,
                      device.counters(1));
}

void prepare_average_cuda(Device device, const StepArgs& args, double decay, bool warmup) {
  gpu::launch_chained(device, {1, 1}, prepare_average_kernel, args, decay, warmup);
}

void write_status_cuda(Device device, double* status, StatusSlot slot, double value) {
  gpu::launch_chained(device, {1, 1}, write_status_kernel, status, int(slot), value);
}

}  // namespace tessera::optim
