#include "ops/linear/activation_of_result.h"
#include "ops/mlp/hidden_gradient24_kernels.h"
#include "ops/sparse24/packed24.cuh"

/// Variant "fused" of hidden_gradient24: one pass over da and S(a), per element of 16 bits 2 + 1.125 bytes
/// read and 1 (dh) + 1.125 + 1 (S(a) and dh along tokens) written, 25.6 KB per tile of 64 x 64, some 1,380
/// clocks of an SM at 4.3 TB/s of an H200. "separate" moves 18.5 bytes in six passes.
///
/// A block loads its tile of da into shared memory (compress24_tile.cuh). Along features, thread (w, g, c)
/// already holds its fragments of S(a): it gathers da at their positions, multiplies by the slopes and stores
/// dh; then it writes its groups of S(a), with their zeros, to a second tile, and dh in the place of da,
/// where dropped elements become da times the slope 0. Along tokens, both tiles come back transposed
/// (packed24_math.h): the two largest of S(a) are kept, and dh at the same places. So each slope is computed
/// once, 32 square roots per thread; some 1,200 instructions per warp and tile, a little less than the memory
/// takes. Predicted for [16384, 16384]: 0.46 ms at 85 % of the copy bandwidth, if the two overlap;
/// "separate" 1.5 ms.

namespace tessera::ops {
namespace {

/// slope_of_result(); the square root of 0 would take the slow path of sqrt in every warp.
template <Activation kKind>
__device__ __forceinline__ float slope_of(float act) {
  if constexpr (kKind == Activation::relu_squared) {
    const float slope = slope_of_result<kKind>(act == 0 ? 1.0f : act);
    return act == 0 ? act : slope;
  }
  return slope_of_result<kKind>(act);
}
/// da times the slopes at the kept activations, a pair each, rounded once.
template <class T, Activation kKind>
__device__ __forceinline__ uint32_t times_slopes(uint32_t da, uint32_t kept) {
  const float2 gradient = gpu::unpack_halves<T>(da), act = gpu::unpack_halves<T>(kept);
  return gpu::pack_halves<T>(gradient.x * slope_of<kKind>(act.x), gradient.y * slope_of<kKind>(act.y));
}
/// da times the slope 0: a zero of da's sign, NaN of what is not finite.
template <class T>
__device__ __forceinline__ uint32_t times_zero(uint32_t da) {
  uint32_t result;
  if constexpr (std::is_same_v<T, bf16>)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(da), "r"(0u), "r"(0x80008000u));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(da), "r"(0u), "r"(0x80008000u));
  return result;
}

/// One group along features: `kept` at the positions of `at` and da's elements `group`.
template <class T, Activation kKind>
__device__ __forceinline__ uint32_t scale_group(uint2* gradient, uint2* act, const GroupWords& group,
                                                uint32_t kept, uint32_t at) {
  const uint32_t dh = times_slopes<T, kKind>(gather_pair(group.x01, group.x23, at), kept);
  const GroupWords of_act = scatter_pair(kept, at, {0, 0}),
                   of_gradient = scatter_pair(dh, at, {times_zero<T>(group.x01), times_zero<T>(group.x23)});
  *act = {of_act.x01, of_act.x23};
  *gradient = {of_gradient.x01, of_gradient.x23};
  return dh;
}

template <class T, Activation kKind>
__global__ void __launch_bounds__(kThreads)
    hidden_gradient24_kernel(Rows24<const T> da, Matrix24<T> kept, T* dh, Matrix24<T> act_by_tokens,
                             T* dh_by_tokens) {
  __shared__ TileOfX<T> gradient, act;
  const TileCoord coord(da.tokens, da.features);
  const int thread = int(threadIdx.x);
  gpu::wait_and_launch_dependents();
  // All loads from global memory are issued first.
  const uint32_t word = uint32_t(kept.metadata[coord.by_features * kTileWords + thread]);
  uint4 values[2];
#pragma unroll
  for (int step = 0; step < 2; ++step)
    values[step] = __ldcs(step_values(kept.values, coord.by_features, step));
  load_tile(gradient, da, coord);
  __syncthreads();

  // Along features: dh = da f'(S(a)) in registers; S(a) and dh to the tiles.
  uint32_t nibbles = transposed_nibbles(word);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t pairs[4] = {values[step].x, values[step].y, values[step].z, values[step].w};
    uint32_t scaled[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = step * 2 + half;
      const RowPair rows = read_groups<Along24::features>(gradient, index);
      const uint32_t at = nibbles >> 4 * index;
      scaled[half * 2] = scale_group<T, kKind>(feature_group(gradient, index, 0),
                                               feature_group(act, index, 0), rows.low, pairs[half * 2], at);
      scaled[half * 2 + 1] =
          scale_group<T, kKind>(feature_group(gradient, index, 1), feature_group(act, index, 1), rows.high,
                                pairs[half * 2 + 1], at >> 16);
    }
    *step_values(dh, coord.by_features, step) = {scaled[0], scaled[1], scaled[2], scaled[3]};
  }
  __syncthreads();

  // Along tokens: the two largest of S(a), and dh at their places.
  nibbles = 0;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    TwoPairs of_act[2], of_gradient[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = step * 2 + half;
      const TwoGroups groups = read_groups<Along24::tokens>(act, index).groups();
      const TwoChoices choices = choose_largest(groups);
      nibbles |= choices.nibbles() << 4 * index;
      of_act[half] = choices.of(groups);
      of_gradient[half] = choices.of(read_groups<Along24::tokens>(gradient, index).groups());
    }
    *step_values(act_by_tokens.values, coord.by_tokens, step) = {of_act[0].low, of_act[0].high, of_act[1].low,
                                                                 of_act[1].high};
    *step_values(dh_by_tokens, coord.by_tokens, step) = {of_gradient[0].low, of_gradient[0].high,
                                                         of_gradient[1].low, of_gradient[1].high};
  }
  act_by_tokens.metadata[coord.by_tokens * kTileWords + thread] = int32_t(transposed_nibbles(nibbles));
}

template <class T, Activation kKind>
void launch(const HiddenGradient24& to, const Tensor& da, const Sparse24& kept) {
  gpu::launch_dependent(da.device(), {tiles_of(da), kThreads}, hidden_gradient24_kernel<T, kKind>,
                        rows_of<T, const T>(da), matrix_of<T>(kept), to.dh.values.data<T>(),
                        matrix_of<T>(to.act_by_tokens), to.dh_by_tokens.values.data<T>());
}

template <class T>
void run(const HiddenGradient24& to, const HiddenGradient24Call& call) {
  const Tensor da = dense_rows(call.da);
  if (call.kind == Activation::relu)
    launch<T, Activation::relu>(to, da, call.kept);
  else
    launch<T, Activation::relu_squared>(to, da, call.kept);
}

}  // namespace

void hidden_gradient24_cuda(const HiddenGradient24& to, const HiddenGradient24Call& call) {
  if (call.da.dtype() == DType::bf16)
    run<bf16>(to, call);
  else
    run<f16>(to, call);
}

}  // namespace tessera::ops
