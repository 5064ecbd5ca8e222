#pragma once

#include "gpu/wgmma.cuh"

/// Asynchronous MMAs of a warpgroup with a 2:4 A, sm_90a: d += a b with a 64 x 32, of which two of every four
/// neighbours along k are stored, b 32 x N and d 64 x N in f32. Twice the rate of the dense ones. PTX ISA,
/// "Asynchronous Warpgroup Level Matrix Instructions", sparse wgmma.
///
/// Accumulators lie as in gpu/wgmma.cuh. With warp w, g = lane / 4, c = lane % 4, a thread holds of a
///   a[0] row 16 w + g      the two values of group c       (k 4 c ... 4 c + 3)
///   a[1] row 16 w + g + 8  the same
///   a[2] row 16 w + g      the two values of group c + 4   (k 16 + 4 c ...)
///   a[3] row 16 w + g + 8  the same
/// and, if c / 2 is the selector, metadata: c % 2 says which 16 of k; bits 0 ... 15 are row 16 w + g's, bits
/// 16 ... 31 row 16 w + g + 8's; four bits per group, the position of the first value in the lower two, then
/// that of the second, ascending. So one word per thread serves two k-steps, one for each selector.
///
/// The order of instructions is that of gpu/wgmma.cuh; a and metadata may be written again when the MMA is
/// done.

namespace tessera::gpu {

/// d (+)= a b; `add` 0 overwrites d. b is a tile in shared memory (tile_descriptor).
template <class T, int kSelector, TileOrder kB, int kAccumulators>
__device__ __forceinline__ void wgmma_sparse(float (&d)[kAccumulators], const uint32_t (&a)[4], uint64_t b,
                                             uint32_t metadata, int add = 1) {
  detail::WgmmaSparse<kAccumulators * 2>::template rs<T, kSelector, int(kB)>(d, a, b, metadata, add);
}
/// Loads fragments and metadata from shared memory ("ld"), 16 bytes or 4. Volatile, so they stay in program
/// order: after the wait for the MMA that read the same registers before.
__device__ __forceinline__ void load_fragment(uint32_t (&words)[4], uint32_t from) {
  load_shared(words, from);
}
__device__ __forceinline__ void load_fragment(uint32_t& word, uint32_t from) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
}

/// Added to the descriptor of b for the next 32 of k inside the tile (kDescriptorStep: 16 of k).
template <TileOrder kOrder>
inline constexpr uint64_t kSparseDescriptorStep = 2 * kDescriptorStep<kOrder>;

}  // namespace tessera::gpu
