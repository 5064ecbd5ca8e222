#pragma once

#include <cstdint>
#include <type_traits>

#include "gpu/shared.cuh"
#include "tensor/dtype.h"

/// Warp-level matrix instructions and asynchronous copies, one small wrapper per PTX instruction. Section
/// names are those of the PTX ISA. All threads of a warp take part, with the same immediate arguments.

namespace tessera::gpu {

/// mma.sync.aligned.m16n8k16 with f32 accumulators: d += a b ("Matrix Fragments for mma.m16n8k16 with
/// floating point type"). With g = lane / 4, t = lane % 4:
///   a[0] (g, 2t..2t+1)  a[1] (g + 8, 2t..)  a[2] (g, 2t + 8..)  a[3] (g + 8, 2t + 8..)   row, k
///   b0 (2t..2t+1, g)    b1 (2t + 8.., g)                                                   k, column
///   d[0..1] (g, 2t..)   d[2..3] (g + 8, 2t..)                                              row, column
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, f16>);
  if constexpr (std::is_same_v<T, bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// mma.sync.aligned.m16n8k8 with f32 accumulators: d += a b, a0 rows g, a1 rows g + 8 ("Matrix Fragments for
/// mma.m16n8k8").
template <class T>
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  if constexpr (std::is_same_v<T, bf16>)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

/// ldmatrix.sync.aligned.m8n8.x4.shared.b16 ("ldmatrix"): four 8x8 matrices of 16-bit elements. Lane l names
/// the 16-byte row l % 8 of matrix l / 8; register i of lane l gets elements 2 (l % 4) and the next of row
/// l / 4 of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
/// ldmatrix with .trans: the same of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

/// movmatrix.sync.aligned.m8n8.trans.b16 ("movmatrix"): a matrix of 8 x 8 elements of 16 bits, of which lane
/// l holds elements 2 (l % 4) and the next of row l / 4, transposed.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t block) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(block));
  return result;
}

/// cp.async.cg.shared.global ("Non-bulk copy: cp.async"), bypassing L1: copies the first `bytes` of 16 bytes
/// and fills the rest with zeros. Both addresses must be multiples of 16, even if nothing is read.
__device__ __forceinline__ void cp_async_zfill(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}
/// All 16 bytes, or zeros unless `valid`.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid) {
  cp_async_zfill(to, from, valid ? 16 : 0);
}
/// cp.async.commit_group: closes the group of this thread's copies so far.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// cp.async.wait_group: until all but the newest kPending groups of this thread have landed.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// cvt.rn.bf16x2.f32 or cvt.rn.f16x2.f32 ("cvt"): two floats, rounded to nearest even, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, f16>);
  uint32_t packed;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
/// The same two halves as floats, the low one first.
template <class T>
__device__ __forceinline__ float2 unpack_halves(uint32_t pair) {
  if constexpr (std::is_same_v<T, bf16>)
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  float low, high;
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;\n\t}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
  return {low, high};
}

}  // namespace tessera::gpu
