#pragma once

#include "gpu/dependent_launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/reduce.cuh"
#include "gpu/sum.cuh"
#include "ops/gmm_nll/gmm_nll_mixture.cuh"
#include "ops/reduce/persistent.cuh"

/// The kernels of gmm_nll; gmm_nll_cuda.cu says which one runs.
///
/// Few components (up to 20): a thread a token, all of its components in registers, each exponential computed
/// once. The 3 K parameters of a token are neighbours in memory but far from those of the next thread, so a
/// warp brings those of its 32 tokens to shared memory with cp.async, 16 bytes per lane and coalesced, one or
/// two tiles ahead of the one it works on. The gradients take the parameters' place there and leave the same
/// way. No barrier but the warp's own: warps drift, and one's arithmetic hides the others' memory.
///
/// Many components: a warp per token, a lane every 32nd component, read where they lie, three times (the
/// second and third from L1).

namespace tessera::ops {

inline constexpr int kGmmThreads = 128;
inline constexpr int kGmmWarps = kGmmThreads / gpu::kWarp;

/// What a launch does: the loss, its gradients with those of the sum or mean scaled by `share`, or gradients
/// alone, scaled by what arrived from above as well.
enum class GmmPass : uint8_t { loss, both, gradients };

template <class T>
struct GmmArgs {
  const T* params;
  T* dparams;        // null if not wanted
  Targets<T> y, dy;  // dy.data likewise
  int64_t count;
  int components;
  bool whole;  // params and dparams may be read in packs
  float share;
  // Loss: each (then `losses`) or reduced, through `partial` of every block to *losses.
  float* losses;
  double* partial;
  unsigned* arrived;  // see gpu::last_block
  double divisor;
  // Gradients: dloss of each element or one for all; `made`: those for a dloss of *expected (null: 1) are
  // there already. With the loss they are made for *expected.
  const float *dloss, *expected;
  bool each, made;
};

/// Sums the losses of all threads of the grid.
template <class T>
__device__ __forceinline__ void gmm_reduce(const GmmArgs<T>& args, double sum) {
  sum = gpu::block_sum(sum);
  if (threadIdx.x == 0) args.partial[blockIdx.x] = sum;
  if (!gpu::last_block(args.arrived)) return;
  double total = 0;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += kGmmThreads) total += args.partial[b];
  total = gpu::block_sum(total);
  if (threadIdx.x == 0) *args.losses = float(total / args.divisor);
}

/// n elements from global to shared memory, in packs as far as they go.
template <class T>
__device__ __forceinline__ void gmm_fetch(T* to, const T* from, int n, bool whole) {
  constexpr int kPack = gpu::kPackOf<T>;
  const int lane = int(threadIdx.x) % gpu::kWarp, packs = whole ? n / kPack : 0;
  const auto base = uint32_t(__cvta_generic_to_shared(to));
#pragma unroll 4
  for (int p = lane; p < packs; p += gpu::kWarp)
    gpu::cp_async_16(base + uint32_t(p) * 16, from + p * kPack, true);
#pragma unroll 1  // ends and unaligned tensors only
  for (int i = packs * kPack + lane; i < n; i += gpu::kWarp) to[i] = from[i];
}

/// The way back. As uint4: a pack of 16-bit elements copied as such is stored element by element.
template <class T>
__device__ __forceinline__ void gmm_put(T* to, const T* from, int n, bool whole) {
  constexpr int kPack = gpu::kPackOf<T>;
  const int lane = int(threadIdx.x) % gpu::kWarp, packs = whole ? n / kPack : 0;
#pragma unroll 4
  for (int p = lane; p < packs; p += gpu::kWarp)
    reinterpret_cast<uint4*>(to)[p] = reinterpret_cast<const uint4*>(from)[p];
#pragma unroll 1  // ends and unaligned tensors only
  for (int i = packs * kPack + lane; i < n; i += gpu::kWarp) to[i] = from[i];
}

template <class T, int kMost, GmmPass kPass, int kStages, int kBlocks>
__global__ void __launch_bounds__(kGmmThreads, kBlocks) gmm_tiles(GmmArgs<T> args) {
  constexpr bool kGradients = kPass != GmmPass::loss, kLoss = kPass != GmmPass::gradients;
  extern __shared__ uint4 shared[];
  gpu::wait_and_launch_dependents();
  float g = args.share;
  if constexpr (kGradients && kLoss) {
    if (args.expected) g *= *args.expected;
  } else if constexpr (kGradients) {
    if (args.made && *args.dloss == (args.expected ? *args.expected : 1.0f)) return;
    if (!args.each) g *= *args.dloss;
  }
  const int lane = int(threadIdx.x) % gpu::kWarp, warp = int(threadIdx.x) / gpu::kWarp;
  const int width = 3 * args.components, tile_elements = gpu::kWarp * width;
  T* const stages = reinterpret_cast<T*>(shared) + warp * kStages * tile_elements;
  const int64_t tiles = gpu::ceil_div(args.count, gpu::kWarp), step = int64_t(gridDim.x) * kGmmWarps;
  const auto fetch = [&](int64_t tile, int stage) {
    if (tile < tiles) {
      const int64_t first = tile * gpu::kWarp, left = args.count - first;
      gmm_fetch(stages + stage * tile_elements, args.params + first * width,
                left < gpu::kWarp ? int(left) * width : tile_elements, args.whole);
    }
    gpu::cp_async_commit();
  };
  double sum = 0;
  int64_t tile = blockIdx.x * int64_t(kGmmWarps) + warp;
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) fetch(tile + ahead * step, ahead);
  const auto target = [&](int64_t token) { return token < args.count ? args.y.load(token) : 0.0f; };
  float y = target(tile * gpu::kWarp + lane);
  for (int stage = 0; tile < tiles; tile += step, stage = stage + 1 == kStages ? 0 : stage + 1) {
    const int64_t first = tile * gpu::kWarp, left = args.count - first, token = first + lane;
    const int n = left < gpu::kWarp ? int(left) : gpu::kWarp;
    const float next_y = target((tile + step) * gpu::kWarp + lane);
    fetch(tile + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
    gpu::cp_async_wait<kStages - 1>();
    __syncwarp();
    T* const staged = stages + stage * tile_elements;
    if (lane < n) {
      if constexpr (!kLoss)
        if (args.each) g = args.dloss[token] * args.share;
      Components<kMost> components;
      components.load(staged + lane * width, args.components);
      float dy;
      const float loss = components.template solve<T, kGradients>(y, g, dy);
      if constexpr (kLoss) {
        sum += double(loss);
        if (args.each) args.losses[token] = loss;
      }
      if constexpr (kGradients) {
        components.store(staged + lane * width, args.components);
        if (args.dy.data) args.dy.store(token, dy);
      }
    }
    if constexpr (kGradients) {
      __syncwarp();
      if (args.dparams) gmm_put(args.dparams + first * width, staged, n * width, args.whole);
    }
    __syncwarp();  // before the stage is filled again
    y = next_y;
  }
  if constexpr (kLoss)
    if (!args.each) gmm_reduce(args, sum);
}

template <class T, GmmPass kPass>
__global__ void __launch_bounds__(kGmmThreads) gmm_wide(GmmArgs<T> args) {
  constexpr bool kGradients = kPass != GmmPass::loss, kLoss = kPass != GmmPass::gradients;
  using gpu::kWarp;
  gpu::wait_and_launch_dependents();
  float g = args.share;
  if constexpr (kGradients && kLoss) {
    if (args.expected) g *= *args.expected;
  } else if constexpr (kGradients) {
    if (args.made && *args.dloss == (args.expected ? *args.expected : 1.0f)) return;
    if (!args.each) g *= *args.dloss;
  }
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  double sum = 0;
  for (int64_t token = blockIdx.x * int64_t(kGmmWarps) + warp; token < args.count;
       token += int64_t(gridDim.x) * kGmmWarps) {
    const T* const params = args.params + token * 3 * args.components;
    const float y = args.y.load(token);
    const auto component = [&](int k, float top_logit) { return GmmTerm(params + 3 * k, y, top_logit); };
    float top_logit = -INFINITY, top_joint = -INFINITY, weight_sum = 0, joint_sum = 0;
    for (int k = lane; k < args.components; k += kWarp) top_logit = fmaxf(top_logit, float(params[3 * k]));
    top_logit = gpu::warp_reduce<gpu::Max>(top_logit);
    for (int k = lane; k < args.components; k += kWarp)
      top_joint = fmaxf(top_joint, component(k, top_logit).joint);
    top_joint = gpu::warp_reduce<gpu::Max>(top_joint);
    const float base = top_joint == -INFINITY ? 0.0f : top_joint;
    for (int k = lane; k < args.components; k += kWarp) {
      const auto term = component(k, top_logit);
      weight_sum += exponential<T>(term.logit);
      joint_sum += exponential<T>(term.joint - base);
    }
    weight_sum = gpu::warp_reduce<gpu::Sum>(weight_sum);
    joint_sum = gpu::warp_reduce<gpu::Sum>(joint_sum);
    if constexpr (kLoss) {
      const float loss = logf(weight_sum) - (top_joint + logf(joint_sum));
      if (lane == 0) {
        sum += double(loss);
        if (args.each) args.losses[token] = loss;
      }
    }
    if constexpr (kGradients) {
      if constexpr (!kLoss)
        if (args.each) g = args.dloss[token] * args.share;
      const float per_weight = g / weight_sum, per_joint = g / joint_sum;
      float dy = 0;
      for (int k = lane; k < args.components; k += kWarp) {
        const auto term = component(k, top_logit);
        const float share = exponential<T>(term.joint - base), r = share * per_joint;
        // z or its square may be infinite where r = 0, and 0 times infinity is NaN.
        const float z = share == 0.0f ? 0.0f : term.z, pull = r * z * term.inverse_sigma;
        dy += pull;
        if (!args.dparams) continue;
        T* const to = args.dparams + (token * args.components + k) * 3;
        to[0] = T(exponential<T>(term.logit) * per_weight - r);
        to[1] = T(-pull);
        to[2] = T(r * (1.0f - z * z));
      }
      if (args.dy.data) {
        dy = gpu::warp_reduce<gpu::Sum>(dy);
        if (lane == 0) args.dy.store(token, dy);
      }
    }
  }
  if constexpr (kLoss)
    if (!args.each) gmm_reduce(args, sum);
}

}  // namespace tessera::ops
