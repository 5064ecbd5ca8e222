#pragma once

/// The special function units: one instruction each, with the errors that the PTX ISA gives.

namespace tessera::gpu {

/// ex2.approx.ftz.f32 ("ex2"): 2^x with a relative error of at most 2^-22; 0 for -inf, NaN for NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// rcp.approx.ftz.f32 ("rcp"): 1 / x within one unit in the last place; 0 for infinity.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// sqrt.approx.f32 ("sqrt"): a relative error of at most 2^-23; NaN below 0.
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// tanh.approx.f32 ("tanh"), sm_75: a relative error of at most 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tessera::gpu
