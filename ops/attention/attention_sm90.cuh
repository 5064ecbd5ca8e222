#pragma once

#include "gpu/barrier.cuh"
#include "gpu/mma.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/attention/attention_kernels.h"

/// Shared by the sm_90a attention kernels: tensor maps and wgmma descriptors of heads, and pipeline states.

namespace tessera::ops {

/// Rows of tensor maps and of shared memory are 64 elements wide: a head of up to 128 is one or two boxes.
inline constexpr int kBoxWidth = 64;

/// A value that is the same in all lanes, in a uniform register: what is computed from it, such as the
/// pipeline state after a loop, stays in uniform registers too. (The result of a shuffle does not.)
__device__ __forceinline__ int in_uniform_register(int value) {
  return int(__reduce_or_sync(0xFFFFFFFFu, unsigned(value)));
}

/// The n-th use of a pipeline of kStages (a power of two): one register instead of the two of gpu::RingState.
template <int kStages>
struct PipelineState {
  static_assert((kStages & (kStages - 1)) == 0);
  uint32_t count;

  __device__ __forceinline__ int stage() const { return int(count % kStages); }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages % 2; }
  __device__ __forceinline__ PipelineState operator+(int n) const { return {count + uint32_t(n)}; }
};

/// The map of a [B, L, H, D] tensor with coordinates (d, i, h, b); a box is 64 columns of `rows` tokens of
/// one head. Columns beyond D and tokens beyond L read zeros and are not written.
template <class T>
gpu::TensorMap head_map(const Tensor& x, int rows) {
  const Layout& layout = x.layout();
  return gpu::tensor_map<T, 4>(x.data<T>(), {x.size(3), x.size(1), x.size(2), x.size(0)},
                               {layout.stride(1), layout.stride(2), layout.stride(0)},
                               {kBoxWidth, rows, 1, 1}, gpu::Swizzle::k128);
}

/// A tile of kRows tokens of one head in shared memory: kD / 64 boxes.
template <class T, int kRows, int kD>
struct HeadTile {
  static constexpr int kBoxes = kD / kBoxWidth, kBoxBytes = kRows * kBoxWidth * 2,
                       kBytes = kBoxes * kBoxBytes;
  static_assert(kBoxBytes % 1024 == 0 && kBoxes * kBoxWidth == kD);

  /// One thread: issues the loads of head (b, h) from token `first` on.
  static __device__ __forceinline__ void load(char* to, const gpu::TensorMap& map, gpu::Barrier& barrier,
                                              int first, int h, int b) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      gpu::tma_load(to + box * kBoxBytes, map, barrier, box * kBoxWidth, first, h, b);
  }
  /// Offset in the descriptor of a K-major tile for columns 16 step ... 16 step + 15.
  static __device__ __forceinline__ constexpr uint64_t k_step_offset(int step) {
    return uint64_t(step / 4 * (kBoxBytes >> 4)) +
           uint64_t(step % 4) * gpu::kDescriptorStep<gpu::TileOrder::k_major>;
  }
};

}  // namespace tessera::ops
