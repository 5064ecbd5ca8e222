#include "ops/gemm/gemm_narrow_mma.cuh"

/// Launches of narrow products on the tensor cores; the essay is in gemm_narrow_mma.cuh.

namespace tessera::ops {
namespace {

int log_of(int64_t x) {
  int log = 0;
  while ((int64_t(1) << log) < x) ++log;
  return log;
}

template <class T>
NarrowOperand<T> operand(const void* data, int64_t ld, int64_t stride, bool k_major, int64_t inner,
                         int most) {
  const T* const start = static_cast<const T*>(data);
  const bool packs = gpu::is_pack_aligned(start, ld, 8) && stride % 8 == 0;
  return {start,
          ld,
          stride,
          k_major,
          packs,
          0,
          log_of(std::min<int64_t>(std::max<int64_t>(inner, k_major ? 16 : 1), most))};
}

template <class T, int kIndex, bool kLeft, bool kRight>
void launch_order(Device device, unsigned blocks, const NarrowArgs<T>& args) {
  gpu::launch_dependent(device,
                        {.grid = dim3(blocks),
                         .block = dim3(kNarrowThreads),
                         .shared_bytes = narrow_bytes(kNarrowMmaTiles[kIndex], args.depth)},
                        narrow_mma_kernel<T, kIndex, kLeft, kRight>, args);
}

template <class T, int kIndex = 0>
void launch_tile(Device device, int tile, unsigned blocks, const NarrowArgs<T>& args) {
  if constexpr (kIndex < int(std::size(kNarrowMmaTiles))) {
    if (tile != kIndex) return launch_tile<T, kIndex + 1>(device, tile, blocks, args);
    if (args.left.k_major)
      args.right.k_major ? launch_order<T, kIndex, true, true>(device, blocks, args)
                         : launch_order<T, kIndex, true, false>(device, blocks, args);
    else
      args.right.k_major ? launch_order<T, kIndex, false, true>(device, blocks, args)
                         : launch_order<T, kIndex, false, false>(device, blocks, args);
  }
}

}  // namespace

template <class T>
void narrow_mma_cuda(const Gemm& g, const NarrowChoice& choice, Device device) {
  if (choice.tile == kNarrowTerms) return narrow_terms_cuda<T>(g, choice, device);
  const NarrowMmaTile tile = kNarrowMmaTiles[choice.tile];
  const int wide_a = choice.swapped ? tile.columns : tile.rows,
            wide_b = choice.swapped ? tile.rows : tile.columns;
  const NarrowOperand<T> a = operand<T>(g.a, g.lda, g.stride_a, !g.transpose_a, g.transpose_a ? g.m : g.k,
                                        g.transpose_a ? wide_a : tile.depth),
                         b = operand<T>(g.b, g.ldb, g.stride_b, g.transpose_b, g.transpose_b ? g.k : g.n,
                                        g.transpose_b ? tile.depth : wide_b);
  NarrowLaunch<T> launch = narrow_launch(g, choice, tile.rows, tile.columns, tile.depth, a, b, device);
  launch.args.pads = g.owns_d_padding;
  launch_tile<T>(device, choice.tile, launch.blocks, launch.args);
}

template void narrow_mma_cuda<bf16>(const Gemm&, const NarrowChoice&, Device);
template void narrow_mma_cuda<f16>(const Gemm&, const NarrowChoice&, Device);

}  // namespace tessera::ops
