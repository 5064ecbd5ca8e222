#pragma once

#include "gpu/row.cuh"
#include "tensor/tensor.h"

/// What rope and rope_to_cache share, so that both give the same bits.

namespace tessera::ops {

/// (a, b) rotated: a c - b s, b c + a s, each with the second product rounded first.
__device__ __forceinline__ void rotate_pair(float& a, float& b, float cosine, float sine) {
  const float x = a, y = b;
  a = fmaf(x, cosine, -(y * sine));
  b = fmaf(y, cosine, x * sine);
}

/// True if every head of x [B, T, H, D], its second half and what is not rotated start on a pack.
template <class T>
bool heads_in_packs(const Tensor& x, int64_t half, int64_t rotary) {
  constexpr int kPack = gpu::kPackOf<T>;
  bool fits = reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && half % kPack == 0 &&
              (x.size(3) - rotary) % kPack == 0;
  for (int dim = 0; dim < 3; ++dim) fits = fits && (x.size(dim) == 1 || x.layout().stride(dim) % kPack == 0);
  return fits;
}

}  // namespace tessera::ops
