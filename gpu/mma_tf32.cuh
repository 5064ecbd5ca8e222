#pragma once

#include <cstdint>

/// The tensor-core instructions for TF32 operands. All threads of a warp take part.

namespace tessera::gpu {

/// cvt.rna.tf32.f32 ("cvt"): to the nearest TF32, ties away from zero; NaN and infinities stay.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}
__device__ __forceinline__ uint32_t to_tf32(uint32_t bits) {
  return to_tf32(__uint_as_float(bits));
}

/// mma.sync.aligned.m16n8k8 with TF32 operands and f32 accumulators: d += a b ("Matrix Fragments for
/// mma.m16n8k8"). With g = lane / 4, t = lane % 4:
///   a[0] (g, t)   a[1] (g + 8, t)   a[2] (g, t + 4)   a[3] (g + 8, t + 4)   row, k
///   b0 (t, g)     b1 (t + 4, g)                                               k, column
///   d[0..1] (g, 2t..2t+1)           d[2..3] (g + 8, 2t..2t+1)                row, column
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace tessera::gpu
