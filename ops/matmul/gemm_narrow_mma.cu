#include "ops/matmul/gemm_narrow_mma.cuh"

/// Launches of narrow products on the tensor cores; the essay is in gemm_narrow_mma.cuh.

namespace tessera::ops {
namespace {

int log_of(int64_t x) {
  int log = 0;
  while ((int64_t(1) << log) < x) ++log;
  return log;
}

template <class T>
NarrowOperand<T> operand(const void* data, int64_t ld, int64_t stride, bool along_k, int64_t inner,
                         int most) {
  const T* const start = static_cast<const T*>(data);
  const bool packs = gpu::packs(start, ld, 8) && stride % 8 == 0;
  return {start,
          ld,
          stride,
          along_k,
          packs,
          0,
          log_of(std::min<int64_t>(std::max<int64_t>(inner, along_k ? 16 : 1), most))};
}

template <class T, int kIndex, bool kLeft, bool kRight>
void launch_order(Device device, unsigned blocks, const NarrowArgs<T>& args) {
  gpu::launch_chained(device,
                      {.grid = dim3(blocks),
                       .block = dim3(kNarrowThreads),
                       .shared_bytes = narrow_bytes(kNarrowMmaTiles[kIndex], args.depth)},
                      narrow_mma_kernel<T, kIndex, kLeft, kRight>, args);
}

template <class T, int kIndex = 0>
void launch_tile(Device device, int tile, unsigned blocks, const NarrowArgs<T>& args) {
  if constexpr (kIndex < int(std::size(kNarrowMmaTiles))) {
    if (tile != kIndex) return launch_tile<T, kIndex + 1>(device, tile, blocks, args);
    if (args.left.along_k)
      args.right.along_k ? launch_order<T, kIndex, true, true>(device, blocks, args)
                         : launch_order<T, kIndex, true, false>(device, blocks, args);
    else
      args.right.along_k ? launch_order<T, kIndex, false, true>(device, blocks, args)
                         : launch_order<T, kIndex, false, false>(device, blocks, args);
  }
}

}  // namespace

template <class T>
void narrow_mma_cuda(const Gemm& g, const NarrowChoice& choice, Device device) {
  const NarrowMmaTile tile = kNarrowMmaTiles[choice.tile];
  const int wide_a = choice.swapped ? tile.columns : tile.rows,
            wide_b = choice.swapped ? tile.rows : tile.columns;
  const NarrowOperand<T> a = operand<T>(g.a, g.lda, g.stride_a, !g.transpose_a, g.transpose_a ? g.m : g.k,
                                        g.transpose_a ? wide_a : tile.depth),
                         b = operand<T>(g.b, g.ldb, g.stride_b, g.transpose_b, g.transpose_b ? g.k : g.n,
                                        g.transpose_b ? tile.depth : wide_b);
  NarrowArgs<T> args{.left = choice.swapped ? b : a,
                     .right = choice.swapped ? a : b,
                     .d = g.d,
                     .c = g.c ? g.c : g.d,
                     .bias = static_cast<const T*>(g.bias),
                     .ldd = g.ldd,
                     .stride_d = g.stride_d,
                     .stride_bias = g.stride_bias,
                     .m = int(g.m),
                     .n = int(g.n),
                     .k = int(g.k)};
  const int64_t row_tiles = gpu::ceil_div(choice.swapped ? g.n : g.m, tile.rows);
  const int64_t column_tiles = gpu::ceil_div(choice.swapped ? g.m : g.n, tile.columns);
  const int64_t depth = gpu::ceil_div(gpu::ceil_div(g.k, tile.depth), choice.splits) * tile.depth;
  args.depth = int(std::min<int64_t>(depth, g.k));
  args.splits = int(gpu::ceil_div(g.k, depth));
  args.splits_by = gpu::Divider(uint32_t(args.splits));
  args.tiles_by = gpu::Divider(uint32_t(row_tiles * column_tiles));
  args.columns_by = gpu::Divider(uint32_t(column_tiles));
  args.group = choice.group;
  args.swapped = choice.swapped;
  args.wide = g.out == DType::f32;
  args.quads =
      reinterpret_cast<uintptr_t>(g.d) % (4 * size_of(g.out)) == 0 && g.ldd % 4 == 0 && g.stride_d % 4 == 0;
  args.pads = g.pads_d;
  args.alpha = float(g.alpha), args.beta = float(g.beta);
  const int64_t tiles = g.batch * row_tiles * column_tiles;
  Tensor scratch;
  if (args.splits > 1) {
    const int64_t groups = gpu::ceil_div(args.splits, args.group);
    check(tiles * (groups + 1) <= kMostMeetings, "gemm: row narrow needs fewer parts than ", tiles,
          " tiles with ", args.splits, " each");
    scratch = Tensor::empty_packed(Shape{tiles * (args.splits + groups) * tile.rows * tile.columns},
                                   DType::f32, device);
    args.parts = reinterpret_cast<float4*>(scratch.data<float>());
  }
  launch_tile<T>(device, choice.tile, unsigned(tiles * args.splits), args);
}

template void narrow_mma_cuda<bf16>(const Gemm&, const NarrowChoice&, Device);
template void narrow_mma_cuda<f16>(const Gemm&, const NarrowChoice&, Device);

}  // namespace tessera::ops
