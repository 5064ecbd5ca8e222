#pragma once

#include "gpu/dependent_launch.cuh"
#include "gpu/pack.cuh"
#include "optim/kernels.h"

/// The fused elementwise update on CUDA. A rule instantiates it in one .cu:
///   template void update_cuda(Device, const StepArgs&, const MyRule&);
///
/// Update: one block a chunk of about 4,096 elements of one parameter (8,192 if states are bf16), found in a
/// table, so that a step is one launch for all parameters. A thread takes four neighbours of a row: 16 bytes
/// of each f32 stream (gradient, states, master or weight) and 8 of a 16-bit one; ragged ends of rows and
/// unaligned weights go one by one. AdamW in f32 reads 16 bytes per element and writes 12; with a 16-bit
/// weight next to its master it writes 14; with bf16 states and no master it reads 10 and writes 6. About 15
/// FLOPs an element, and with bf16 states a quarter of a Philox block, some 15 instructions: bound by memory.
/// Two blocks of 512 threads a processor with one piece each in flight (64 KiB) are enough; short chunks are
/// better than long ones, for the streams of blocks that run side by side then stay close together in memory
/// (docs/ops/optim.md has the table).

namespace tessera::optim {
namespace elementwise {

constexpr int kThreads = 512;
constexpr int kBlocks = 2;  // a processor, which bounds the registers of a thread at 64
constexpr int kPack = 4;

/// The streams of a parameter, from a chunk's first element on. State: float or bf16.
template <class W, class State>
struct Streams {
  W* weight;
  float* master;  // null if the weight is its own
  State* states[2];
  const float* gradient;
  int64_t first;      // the chunk's first element in the arenas
  RoundingBits bits;  // for bf16 states
};

/// Word `i` of four. With N = 4 it is known to the compiler; an index that is not would send the words
/// through local memory.
template <int N>
__device__ __forceinline__ uint32_t word_of(const Uint4& random, int i) {
  if constexpr (N == kPack) return random.word[i];
  return i < 2 ? (i == 0 ? random.word[0] : random.word[1]) : (i == 2 ? random.word[2] : random.word[3]);
}

/// N neighbours: loaded, changed, stored. N is 4 where all streams are aligned, else 1. `at`: in all streams
/// but the weight.
template <int N, class W, class State, class R>
__device__ __forceinline__ void update_piece(const Streams<W, State>& streams, const R& rule,
                                             const Scalars<float>& scalars, float clip, int64_t weight_at,
                                             int64_t at) {
  constexpr int kStates = R::kStates;
  constexpr bool kShort = std::is_same_v<State, bf16>;
  gpu::Pack<float, N> w, g;
  gpu::Pack<State, N> s[2];
  Uint4 random{};
  int first_word = 0;
  if constexpr (kShort) {
    const int64_t element = streams.first + at;
    random = streams.bits.of_block(element / kPack);
    first_word = N == kPack ? 0 : int(element % kPack);
  }
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
    for (int n = 0; n < kStates; ++n) states[n] = float(s[n].at[k]);
    float gradient = 0;
    if constexpr (R::kGradient) gradient = clip * g.at[k];
    rule(w.at[k], gradient, states, scalars);
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      s[n].at[k] = State(states[n]);
      if constexpr (kShort) {
        if (n == R::kSlowState)
          s[n].at[k] = round_stochastically(states[n], word_of<N>(random, first_word + k) >> 16);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kStates; ++n) gpu::store_pack<N>(streams.states[n] + at, s[n]);
  if constexpr (R::kWritesWeight) {
    if (streams.master) gpu::store_pack<N>(streams.master + at, w);
    gpu::Pack<W, N> rounded;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if constexpr (kShort && std::is_same_v<W, bf16>)
        rounded.at[k] = round_stochastically(w.at[k], word_of<N>(random, first_word + k));
      else
        rounded.at[k] = W(w.at[k]);
    }
    gpu::store_pack<N>(streams.weight + weight_at, rounded);
  }
}

template <class W, class State, class R>
__device__ __forceinline__ void update_chunk(const StepArgs& args, const R& rule, const Chunk& chunk,
                                             const Place& place) {
  const double* const bias =
      args.parameter_bias ? args.parameter_bias + 2 * chunk.place : args.status + kBias1 + 2 * args.rule;
  const Scalars<float> scalars{float(args.status[kRate] * place.lr_scale), float(place.weight_decay),
                               float(bias[0]), float(bias[1])};
  const float clip = float(args.status[kClip]);
  const int64_t within = chunk.row * place.arena_stride + chunk.column, begin = place.offset + within,
                state = begin - args.first_state;
  const Streams<W, State> streams{
      static_cast<W*>(place.weight) + chunk.row * place.stride + chunk.column,
      place.master < 0 ? nullptr : static_cast<float*>(args.masters) + place.master + within,
      {static_cast<State*>(args.states[0]) + state, static_cast<State*>(args.states[1]) + state},
      static_cast<const float*>(args.gradients) + begin,
      begin,
      {args.rounding_seed, std::is_same_v<State, bf16> ? uint64_t(args.counts[kSteps]) : 0}};
  // Pieces of up to four columns, numbered along the rows of the chunk.
  const uint32_t per_row = uint32_t(chunk.columns + kPack - 1) / kPack,
                 pieces = per_row * uint32_t(chunk.rows);
  const int64_t weight_stride = place.stride, arena_stride = place.arena_stride;
  const bool aligned = place.aligned;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < pieces; i += kThreads) {
    const uint32_t line = chunk.rows == 1 ? 0 : i / per_row, column = (i - line * per_row) * kPack;
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

template <class State, class R>
__global__ void __launch_bounds__(kThreads, kBlocks) update_kernel(StepArgs args, R rule) {
  gpu::wait_and_launch_dependents();
  if (args.status[kApply] == 0) return;
  const Chunk chunk = args.chunks[blockIdx.x];
  if (args.arrived && args.arrived[chunk.place] == 0) return;
  const Place place = args.places[chunk.place];
  if (place.dtype == DType::bf16) return update_chunk<bf16, State>(args, rule, chunk, place);
  if constexpr (std::is_same_v<State, float>) {
    if (place.dtype == DType::f16) return update_chunk<f16, State>(args, rule, chunk, place);
  }
  update_chunk<float, State>(args, rule, chunk, place);
}

}  // namespace elementwise

template <class R>
void update_cuda(Device device, const StepArgs& args, const R& rule) {
  if (args.chunk_count == 0) return;
  const gpu::LaunchShape shape{dim3(unsigned(args.chunk_count)), elementwise::kThreads};
  if constexpr (TakesShortStates<R>) {
    if (args.short_states)
      return gpu::launch_dependent(device, shape, elementwise::update_kernel<bf16, R>, args, rule);
  }
  gpu::launch_dependent(device, shape, elementwise::update_kernel<float, R>, args, rule);
}

}  // namespace tessera::optim
