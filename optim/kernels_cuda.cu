#include "gpu/launch.cuh"
#include "gpu/pack.cuh"
#include "optim/kernels.h"

/// The optimizers' kernels.
///
/// Update: one block a chunk of about 16,384 elements of one parameter, found in a table, so that a step is
/// one launch for all parameters. A thread takes four neighbours of a row: 16 bytes of each f32 stream
/// (gradient, states, master or weight) and 8 of a 16-bit weight; ragged ends of rows and unaligned weights
/// go one by one. AdamW in f32 reads 16 bytes an element and writes 12; with a 16-bit weight beside its
/// master it writes 14. About 15 FLOPs an element: bound by memory.
///
/// Norm: the same chunks, 4 bytes an element; squares are added in f64 (the multiply-adds hide behind the
/// reads), each thread over its own elements, then a butterfly; one block adds the chunks' sums, and its
/// first thread decides about the step. Every order is fixed, so the norm has the same bits in every run.

namespace tessera::optim {
namespace {

constexpr int kThreads = 256;
constexpr int kPack = 4;

/// The sum over the block, for thread 0 alone. `scratch` holds one value a warp.
__device__ double block_sum(double value, double* scratch) {
  for (int step = gpu::kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  const int lane = int(threadIdx.x) % gpu::kWarp, warp = int(threadIdx.x) / gpu::kWarp;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int other = 1; other < kThreads / gpu::kWarp; ++other) value += scratch[other];
  return value;
}

/// Pieces of up to four columns, numbered along the rows of the chunk.
struct Pieces {
  uint32_t per_row, count;
  __device__ explicit Pieces(const Chunk& chunk)
      : per_row(uint32_t(chunk.columns + kPack - 1) / kPack), count(per_row * uint32_t(chunk.rows)) {}
};

struct Piece {
  int64_t row;
  int32_t column, length;  // column within the chunk
  __device__ Piece(const Chunk& chunk, const Pieces& pieces, uint32_t number) {
    const uint32_t line = number / pieces.per_row;
    row = chunk.row + line;
    column = int32_t(number - line * pieces.per_row) * kPack;
    length = min(kPack, chunk.columns - column);
  }
};

__global__ void __launch_bounds__(kThreads) squares_kernel(StepArgs args, double* partials) {
  __shared__ double scratch[kThreads / gpu::kWarp];
  const Chunk chunk = args.chunks[blockIdx.x];
  const Place& place = args.places[chunk.place];
  const float* const base = static_cast<const float*>(args.gradients) + place.offset + chunk.column;
  // Arena rows start on multiples of four elements unless there is only one row.
  const int64_t stride = place.arena_stride;
  const Pieces pieces(chunk);
  double sum = 0;
  for (uint32_t i = threadIdx.x; i < pieces.count; i += kThreads) {
    const Piece piece(chunk, pieces, i);
    const float* const from = base + piece.row * stride + piece.column;
    if (piece.length == kPack) {
      const auto pack = gpu::load_pack<kPack>(from);
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum += double(pack.at[k]) * double(pack.at[k]);
    } else {
      for (int k = 0; k < piece.length; ++k) sum += double(from[k]) * double(from[k]);
    }
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(StepArgs args, const double* partials, PrepareOptions options) {
  __shared__ double scratch[kThreads / gpu::kWarp];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < args.chunk_count; i += kThreads) sum += partials[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) prepare(args.status, args.counts, sum, options);
}

/// N neighbours: loaded, changed, stored. N is 4 where all streams are aligned, else 1.
template <int N, class W, class R>
__device__ __forceinline__ void update_piece(const StepArgs& args, const R& rule,
                                             const Scalars<float>& scalars, float clip, W* weight,
                                             float* master, int64_t at) {
  constexpr int kStates = R::kStates;
  gpu::Pack<float, N> w, g, s[2];
  if (master) {
    w = gpu::load_pack<N>(master);
  } else {
    const auto raw = gpu::load_pack<N>(weight);
#pragma unroll
    for (int k = 0; k < N; ++k) w.at[k] = float(raw.at[k]);
  }
  if constexpr (R::kGradient) g = gpu::load_pack<N>(static_cast<const float*>(args.gradients) + at);
#pragma unroll
  for (int n = 0; n < kStates; ++n) s[n] = gpu::load_pack<N>(static_cast<float*>(args.states[n]) + at);
  gpu::Pack<W, N> rounded;
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
    rounded.at[k] = W(w.at[k]);
  }
#pragma unroll
  for (int n = 0; n < kStates; ++n) gpu::store_pack<N>(static_cast<float*>(args.states[n]) + at, s[n]);
  if constexpr (R::kWritesWeight) {
    if (master) gpu::store_pack<N>(master, w);
    gpu::store_pack<N>(weight, rounded);
  }
}

template <class W, class R>
__device__ void update_chunk(const StepArgs& args, const R& rule, const Chunk& chunk, const Place& place) {
  const Scalars<float> scalars{float(args.status[kRate] * place.lr_scale), float(place.weight_decay),
                               float(args.status[kBias1]), float(args.status[kBias2])};
  const float clip = float(args.status[kClip]);
  W* const weights = static_cast<W*>(place.weight);
  float* const masters = place.master < 0 ? nullptr : static_cast<float*>(args.masters) + place.master;
  const Pieces pieces(chunk);
  for (uint32_t i = threadIdx.x; i < pieces.count; i += kThreads) {
    const Piece piece(chunk, pieces, i);
    const int64_t column = chunk.column + piece.column;
    const int64_t within = piece.row * place.arena_stride + column;
    W* const weight = weights + piece.row * place.stride + column;
    float* const master = masters ? masters + within : nullptr;
    if (piece.length == kPack && place.aligned) {
      update_piece<kPack>(args, rule, scalars, clip, weight, master, place.offset + within);
    } else {
      for (int k = 0; k < piece.length; ++k)
        update_piece<1>(args, rule, scalars, clip, weight + k, master ? master + k : nullptr,
                        place.offset + within + k);
    }
  }
}

template <class R>
__global__ void __launch_bounds__(kThreads) update_kernel(StepArgs args, R rule) {
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
  prepare_average(args.status, args.counts, decay, warmup);
}

__global__ void write_status_kernel(double* status, int slot, double value) {
  status[slot] = value;
}

}  // namespace

void update_cuda(Device device, const StepArgs& args, const Rule& rule) {
  std::visit(
      [&]<class R>(const R& chosen) {
        gpu::launch(device, {dim3(unsigned(args.chunk_count)), kThreads}, update_kernel<R>, args, chosen);
      },
      rule);
}

void measure_cuda(Device device, const StepArgs& args, double* partials, const PrepareOptions& options) {
  gpu::launch(device, {dim3(unsigned(args.chunk_count)), kThreads}, squares_kernel, args, partials);
  gpu::launch(device, {1, kThreads}, prepare_kernel, args, partials, options);
}

void prepare_average_cuda(Device device, const StepArgs& args, double decay, bool warmup) {
  gpu::launch(device, {1, 1}, prepare_average_kernel, args, decay, warmup);
}

void write_status_cuda(Device device, double* status, StatusSlot slot, double value) {
  gpu::launch(device, {1, 1}, write_status_kernel, status, int(slot), value);
}

}  // namespace tessera::optim
