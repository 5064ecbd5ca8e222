#pragma once

#include "gpu/barrier.cuh"
#include "gpu/mma.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/attention/attention_kernels.h"

/// What the sm_90a attention kernels share: how heads are described to the copy engine and to wgmma, and the
/// exponentials.

namespace tessera::ops {

/// Rows of tensor maps and of shared memory are 64 elements wide: a head of up to 128 is one or two boxes.
inline constexpr int kBoxWidth = 64;

/// A value that is the same in all lanes, in a uniform register: what is computed of it, such as the places
/// in rings after a loop of so many steps, stays in uniform registers too. (A shuffle's result does not.)
__device__ __forceinline__ int in_uniform_register(int value) {
  return int(__reduce_or_sync(0xFFFFFFFFu, unsigned(value)));
}

/// The n-th use of a ring of kStages (a power of two): one register instead of the two of gpu::RingPlace.
template <int kStages>
struct RingTurn {
  static_assert((kStages & (kStages - 1)) == 0);
  uint32_t count;

  __device__ __forceinline__ int stage() const { return int(count % kStages); }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages % 2; }
  __device__ __forceinline__ RingTurn operator+(int n) const { return {count + uint32_t(n)}; }
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

  /// One thread: brings tokens `first` on of head (b, h).
  static __device__ __forceinline__ void load(char* to, const gpu::TensorMap& map, gpu::Barrier& barrier,
                                              int first, int h, int b) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      gpu::load_box(to + box * kBoxBytes, map, barrier, box * kBoxWidth, first, h, b);
  }
  /// What to add to the descriptor of a tile that lies along_k for columns 16 step ... 16 step + 15.
  static __device__ __forceinline__ constexpr uint64_t along(int step) {
    return uint64_t(step / 4 * (kBoxBytes >> 4)) +
           uint64_t(step % 4) * gpu::kDescriptorStep<gpu::TileOrder::along_k>;
  }
};

/// 2^x by multiply-adds, for x up to 127: 0 below -127, NaN for NaN, relative error 5e-7. Cody-Waite
/// reduction to |f| <= 1/2, then the polynomial of degree 5 with value 1 at 0 that is best in relative error.
/// Takes load off the special-function unit, which makes 16 exponentials a clock.
__device__ __forceinline__ float exp2_fma(float x) {
  // max.NaN keeps a NaN. At -127 the fraction is 0 and the exponent field becomes 0: exactly +0.
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-127.0f));
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const float shifted = x + kMagic;
  const float f = x - (shifted - kMagic);
  float p = 1.11255073e-3f;
  p = fmaf(p, f, 9.66628268e-3f);
  p = fmaf(p, f, 5.55740036e-2f);
  p = fmaf(p, f, 2.40223512e-1f);
  p = fmaf(p, f, 6.93142831e-1f);
  p = fmaf(p, f, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

}  // namespace tessera::ops
