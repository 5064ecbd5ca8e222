#pragma once

#include "gpu/shared.cuh"
#include "gpu/tensor_map.cuh"
#include "gpu/wgmma_instructions.cuh"

/// Asynchronous MMAs of a warpgroup (four warps, the first a multiple of four), sm_90a: d += a b with a 64 x
/// 16, b 16 x N and d 64 x N in f32. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
///
/// Thread t of the warpgroup, warp w = t / 32, g = t % 32 / 4, c = t % 4, holds of d
///   d[4 j + 0, 1]  row 16 w + g,      columns 8 j + 2 c, + 1
///   d[4 j + 2, 3]  row 16 w + g + 8,  the same columns
/// and of an a in registers the same rows: a[0] (g; k 2c, 2c+1), a[1] (g + 8; the same), a[2] (g; k 2c + 8,
/// 9), a[3] (g + 8; the same). So columns 16 k ... 16 k + 15 of d, packed in pairs, are the a of k-step k.
///
/// Order: warpgroup_arrive (before the first MMA and after any other access to accumulators or a in
/// registers), MMAs, warpgroup_commit, warpgroup_wait before d is read or shared memory is overwritten.

namespace tessera::gpu {

/// wgmma.fence ("wgmma.fence")
__device__ __forceinline__ void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// wgmma.commit_group ("wgmma.commit_group")
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// wgmma.wait_group ("wgmma.wait_group"): until all but the newest kPending groups are done.
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving its own accesses to these registers across this statement.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

/// Layout of a tile of 16-bit elements in shared memory, as TMA writes it: boxes of some rows times 64
/// adjacent elements (128 bytes, Swizzle::k128), each at a multiple of 1024 bytes.
///   k_major   rows are m (or n), the 64 adjacent elements are k: one box per 64 of k
///   mn_major  rows are k, the 64 adjacent elements are m (or n): one box per 64 of m (or n)
enum class TileOrder : uint8_t { k_major = 0, mn_major = 1 };

/// The descriptor of a tile of boxes ("Matrix descriptor format"). `address` is that of the first row the MMA
/// reads, a multiple of 8 (k_major: of m or n; mn_major: of k); `box_bytes` is the distance between boxes
/// (mn_major only: between neighbouring 64s of m or n).
template <TileOrder kOrder>
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t box_bytes = 1024) {
  const uint64_t leading = kOrder == TileOrder::k_major ? 1 : (box_bytes & 0x3FFFF) >> 4;
  return uint64_t((address & 0x3FFFF) >> 4) | leading << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(Swizzle::k128) << 62;
}
/// Added to a descriptor for the next k-step of 16 inside the tile: 32 bytes along a box's rows, or 16 rows
/// of 128 bytes. Along k a box ends after four steps.
template <TileOrder kOrder>
inline constexpr uint64_t kDescriptorStep = kOrder == TileOrder::k_major ? 32 >> 4 : 16 * 128 >> 4;

/// d (+)= a b with both in shared memory; `add` 0 overwrites d. kA, kB: the layouts of the tiles.
template <class T, TileOrder kA, TileOrder kB, int kAccumulators>
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], uint64_t a, uint64_t b, int add = 1) {
  detail::Wgmma<kAccumulators * 2>::template ss<T, int(kA), int(kB)>(d, a, b, add);
}
/// The same with a in registers.
template <class T, TileOrder kB, int kAccumulators>
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], const uint32_t (&a)[4], uint64_t b,
                                      int add = 1) {
  detail::Wgmma<kAccumulators * 2>::template rs<T, int(kB)>(d, a, b, add);
}

/// Byte offset of 16-byte chunk `chunk` (0 ... 7) of row `row` in a box under Swizzle::k128.
__device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
  return uint32_t(row * 128 + ((chunk ^ (row & 7)) << 4));
}

}  // namespace tessera::gpu
