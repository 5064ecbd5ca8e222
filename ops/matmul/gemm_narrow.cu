#include "ops/matmul/gemm_narrow.cuh"

/// Launches of narrow products; the essay is in gemm_narrow.cuh.

namespace tessera::ops {
namespace {

template <class T>
NarrowOperand<T> operand(const void* data, int64_t ld, int64_t stride, bool along_k) {
  const T* const start = static_cast<const T*>(data);
  const T one(1.0f);
  uint32_t ones;
  if constexpr (sizeof(T) == 4)
    ones = std::bit_cast<uint32_t>(one);
  else
    ones = one.bits * 0x10001u;
  return {start, ld, stride, along_k, gpu::packs(start, ld, gpu::kPackOf<T>) && stride % gpu::kPackOf<T> == 0,
          ones};
}

template <class T, int kIndex = 0>
void launch_tile(Device device, int tile, unsigned blocks, const NarrowArgs<T>& args) {
  if constexpr (kIndex < int(std::size(kNarrowTiles))) {
    constexpr NarrowTile kTile = kNarrowTiles[kIndex];
    if (tile != kIndex) return launch_tile<T, kIndex + 1>(device, tile, blocks, args);
    gpu::launch_chained(device, {dim3(blocks), dim3(kNarrowThreads)},
                        narrow_kernel<T, kTile.rows, kTile.columns, narrow_depth(kTile, sizeof(T))>, args);
  }
}

}  // namespace

template <class T>
void narrow_cuda(const Gemm& g, const NarrowChoice& choice, Device device) {
  const NarrowTile tile = kNarrowTiles[choice.tile];
  const NarrowOperand<T> a = operand<T>(g.a, g.lda, g.stride_a, !g.transpose_a),
                         b = operand<T>(g.b, g.ldb, g.stride_b, g.transpose_b);
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
  // Of a side that is narrower than a pack, one element at a time.
  args.right.packs = args.right.packs && (args.right.along_k || tile.columns >= gpu::kPackOf<T>);
  const int64_t chunk = narrow_depth(tile, sizeof(T));
  const int64_t depth = gpu::ceil_div(gpu::ceil_div(g.k, chunk), choice.splits) * chunk;
  args.depth = int(std::min<int64_t>(depth, g.k));
  args.splits = int(gpu::ceil_div(g.k, depth));
  args.splits_by = gpu::Divider(uint32_t(args.splits));
  args.tiles_by = gpu::Divider(uint32_t(row_tiles * column_tiles));
  args.columns_by = gpu::Divider(uint32_t(column_tiles));
  args.group = choice.group;
  args.swapped = choice.swapped;
  args.wide = g.out == DType::f32;
  const int64_t quad = 4 * int64_t(size_of(g.out));
  const auto aligned = [&](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % uintptr_t(quad) == 0;
  };
  args.quads = aligned(g.d) && g.ldd % 4 == 0 && g.stride_d % 4 == 0;
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

template void narrow_cuda<float>(const Gemm&, const NarrowChoice&, Device);
template void narrow_cuda<bf16>(const Gemm&, const NarrowChoice&, Device);
template void narrow_cuda<f16>(const Gemm&, const NarrowChoice&, Device);

}  // namespace tessera::ops
