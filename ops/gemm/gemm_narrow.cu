#include "ops/gemm/gemm_narrow.cuh"

/// Launches of narrow GEMMs; the essay is in gemm_narrow.cuh.

namespace tessera::ops {
namespace {

template <class T>
NarrowOperand<T> operand(const void* data, int64_t ld, int64_t stride, bool k_major) {
  const T* const start = static_cast<const T*>(data);
  const T one(1.0f);
  uint32_t ones;
  if constexpr (sizeof(T) == 4)
    ones = std::bit_cast<uint32_t>(one);
  else
    ones = one.bits * 0x10001u;
  return {start,
          ld,
          stride,
          k_major,
          gpu::is_pack_aligned(start, ld, gpu::kPackOf<T>) && stride % gpu::kPackOf<T> == 0,
          ones};
}

template <class T, int kIndex = 0>
void launch_tile(Device device, int tile, unsigned blocks, const NarrowArgs<T>& args) {
  if constexpr (kIndex < int(std::size(kNarrowTiles))) {
    constexpr NarrowTile kTile = kNarrowTiles[kIndex];
    if (tile != kIndex) return launch_tile<T, kIndex + 1>(device, tile, blocks, args);
    gpu::launch_dependent(device, {dim3(blocks), dim3(kNarrowThreads)},
                          narrow_kernel<T, kTile.rows, kTile.columns, narrow_depth(kTile, sizeof(T))>, args);
  }
}

}  // namespace

template <class T>
void narrow_cuda(const Gemm& g, const NarrowChoice& choice, Device device) {
  const NarrowTile tile = kNarrowTiles[choice.tile];
  const NarrowOperand<T> a = operand<T>(g.a, g.lda, g.stride_a, !g.transpose_a),
                         b = operand<T>(g.b, g.ldb, g.stride_b, g.transpose_b);
  NarrowLaunch<T> launch =
      narrow_launch(g, choice, tile.rows, tile.columns, narrow_depth(tile, sizeof(T)), a, b, device);
  // A side narrower than a pack is loaded one element at a time.
  NarrowOperand<T>& right = launch.args.right;
  right.packs = right.packs && (right.k_major || tile.columns >= gpu::kPackOf<T>);
  launch_tile<T>(device, choice.tile, launch.blocks, launch.args);
}

template void narrow_cuda<float>(const Gemm&, const NarrowChoice&, Device);
template void narrow_cuda<bf16>(const Gemm&, const NarrowChoice&, Device);
template void narrow_cuda<f16>(const Gemm&, const NarrowChoice&, Device);

}  // namespace tessera::ops
