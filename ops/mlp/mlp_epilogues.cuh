#pragma once

#include "gpu/mma.cuh"
#include "ops/activation/activation_approx.cuh"
#include "ops/gemm/gemm_sm90_tma_store.cuh"

/// What the products of an mlp do to their sums: the epilogues made of the activations.

namespace tessera::ops {

/// h = x + bias, a = f(h): both rounded to T, a from the rounded h. Outputs: a, then h if it is kept.
template <class T, Activation kKind, bool kKeep>
struct Activate {
  static constexpr int kOutputs = kKeep ? 2 : 1;
  static constexpr bool kOperand = false;
  GemmBias<T> bias;

  __device__ __forceinline__ float2 columns(int batch, int column) const { return bias.at(batch, column); }
  __device__ __forceinline__ void operator()(float x0, float x1, float2 added, uint32_t,
                                             uint32_t (&outputs)[kOutputs]) const {
    const uint32_t rounded = gpu::pack_halves<T>(x0 + added.x, x1 + added.y);
    const float2 h = gpu::unpack_halves<T>(rounded);
    outputs[0] =
        gpu::pack_halves<T>(ActivationApprox<T, kKind>::value(h.x), ActivationApprox<T, kKind>::value(h.y));
    if constexpr (kKeep) outputs[1] = rounded;
  }
};

/// dh = da f'(h) with da rounded to T; a = f(h). The operand is h. Outputs: dh, then a if it is wanted.
template <class T, Activation kKind, bool kValue>
struct Slope {
  static constexpr int kOutputs = kValue ? 2 : 1;
  static constexpr bool kOperand = true;

  __device__ __forceinline__ int columns(int, int) const { return 0; }
  __device__ __forceinline__ void operator()(float x0, float x1, int, uint32_t operand,
                                             uint32_t (&outputs)[kOutputs]) const {
    const float2 da = gpu::unpack_halves<T>(gpu::pack_halves<T>(x0, x1)), h = gpu::unpack_halves<T>(operand);
    float a0, a1;
    const float slope0 = ActivationApprox<T, kKind>::slope(h.x, a0),
                slope1 = ActivationApprox<T, kKind>::slope(h.y, a1);
    outputs[0] = gpu::pack_halves<T>(da.x * slope0, da.y * slope1);
    if constexpr (kValue) outputs[1] = gpu::pack_halves<T>(a0, a1);
  }
};

}  // namespace tessera::ops
