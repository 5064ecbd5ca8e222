#pragma once

#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/divide.cuh"
#include "gpu/pack.cuh"
#include "ops/gemm/gemm_narrow.h"

/// Shared by the kernels of narrow GEMMs: arguments, the split-K reduction, and how d is written.

namespace tessera::ops {
namespace {

template <class T>
struct NarrowOperand {
  const T* data;
  int64_t ld, stride;
  bool k_major;   // the dense dimension is k
  bool packs;     // rows are aligned for packs
  uint32_t ones;  // if data is null: the word that replaces every load (a row of ones)
  int lanes_log;  // one element at a time: log2 of the threads next to each other along the dense dimension
};

/// `left` is a and `right` is b; swapped: `left` is b and `right` is a.
template <class T>
struct NarrowArgs {
  NarrowOperand<T> left, right;
  void* d;
  const void* c;
  const T* bias;
  float4* parts;  // partial sums per tile: those of the splits, then those of groups of splits
  unsigned*
      arrived;  // per tile: how many splits of each group, then groups, have arrived; zero with the last
  int64_t ldd, stride_d, stride_bias;
  int m, n, k;
  gpu::Divider splits_by, tiles_by,
      columns_by;            // parts of a tile, tiles of a matrix, tiles next to each other
  int splits, group, depth;  // depth: k per split
  bool swapped, wide;        // wide: d is f32, not T
  bool quads, packs;         // four neighbours, or 16 bytes, of d may be written at once
  bool pads;                 // row padding of d may be overwritten, so a row may end inside a pack
  float alpha, beta;
};

/// The launch of a narrow GEMM: kernel arguments, number of blocks, and the workspace of args.parts.
template <class T>
struct NarrowLaunch {
  NarrowArgs<T> args;
  unsigned blocks = 0;
  Tensor scratch;
};

/// Plans tiles of `rows` x `columns` and k in multiples of `chunk`; a and b are the operands as multiply()
/// got them.
template <class T>
NarrowLaunch<T> narrow_launch(const Gemm& g, const NarrowChoice& choice, int rows, int columns, int64_t chunk,
                              const NarrowOperand<T>& a, const NarrowOperand<T>& b, Device device) {
  const int64_t row_tiles = gpu::ceil_div(choice.swapped ? g.n : g.m, rows),
                column_tiles = gpu::ceil_div(choice.swapped ? g.m : g.n, columns),
                tiles = g.batch * row_tiles * column_tiles;
  const int64_t depth = gpu::ceil_div(gpu::ceil_div(g.k, chunk), choice.splits) * chunk;
  NarrowLaunch<T> launch{.args = {.left = choice.swapped ? b : a,
                                  .right = choice.swapped ? a : b,
                                  .d = g.d,
                                  .c = g.c ? g.c : g.d,
                                  .bias = static_cast<const T*>(g.bias),
                                  .ldd = g.ldd,
                                  .stride_d = g.stride_d,
                                  .stride_bias = g.stride_bias,
                                  .m = int(g.m),
                                  .n = int(g.n),
                                  .k = int(g.k)}};
  NarrowArgs<T>& args = launch.args;
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
  const int64_t pack = 16 / int64_t(size_of(g.out));
  args.packs = reinterpret_cast<uintptr_t>(g.d) % 16 == 0 && g.ldd % pack == 0 && g.stride_d % pack == 0;
  args.alpha = float(g.alpha), args.beta = float(g.beta);
  launch.blocks = unsigned(tiles * args.splits);
  if (args.splits > 1) {
    const int64_t groups = gpu::ceil_div(args.splits, args.group);
    check(tiles * (groups + 1) <= Device::kCounters, "gemm: variant narrow needs fewer splits than ", tiles,
          " tiles with ", args.splits, " each");
    launch.scratch =
        Tensor::empty_packed(Shape{tiles * (args.splits + groups) * rows * columns}, DType::f32, device);
    args.parts = reinterpret_cast<float4*>(launch.scratch.template data<float>());
    args.arrived = device.counters(tiles * (groups + 1));
  }
  return launch;
}

__device__ __forceinline__ void add_to(float4& sum, const float4& term) {
  sum.x += term.x, sum.y += term.y, sum.z += term.z, sum.w += term.w;
}

/// Adds partial sums first, first + kTeam, ... below `count` of one quad, then those of the kTeam
/// neighbouring lanes that share the quad; all of them get the result. Four loads are in flight together.
template <int kTeam, int kQuads, bool kShared>
__device__ __forceinline__ float4 reduce_partial_sums(const float4* parts, int first, int count) {
  constexpr int kTogether = 4;
  float4 sum = {};
  for (int begin = first; begin < count; begin += kTeam * kTogether) {
    float4 terms[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int part = begin + i * kTeam;
      terms[i] = {};
      if (part < count) terms[i] = kShared ? parts[part * kQuads] : __ldcg(parts + part * kQuads);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) add_to(sum, terms[i]);
  }
#pragma unroll
  for (int step = kTeam / 2; step > 0; step /= 2)
    add_to(sum, {__shfl_xor_sync(0xFFFFFFFFu, sum.x, step), __shfl_xor_sync(0xFFFFFFFFu, sum.y, step),
                 __shfl_xor_sync(0xFFFFFFFFu, sum.z, step), __shfl_xor_sync(0xFFFFFFFFu, sum.w, step)});
  return sum;
}

/// Whether this block is the last of `members` to call this; if so, it sees what all of them have written.
__device__ __forceinline__ bool arrives_last(unsigned* arrived, int members) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(arrived, unsigned(members - 1)) == unsigned(members - 1);
  __syncthreads();
  if (last) __threadfence();
  return last;
}

/// The split, tile and matrix that a block computes: blocks count splits fastest, then tiles along a row,
/// tile rows, matrices.
struct NarrowTileCoord {
  int tile_index, split, matrix, row_tile, column_tile;

  template <class T>
  __device__ __forceinline__ explicit NarrowTileCoord(const NarrowArgs<T>& g) {
    tile_index = int(g.splits_by.divide(blockIdx.x));
    split = int(blockIdx.x) - tile_index * g.splits;
    matrix = int(g.tiles_by.divide(uint32_t(tile_index)));
    const int tile = tile_index - matrix * int(g.tiles_by.divisor);
    row_tile = int(g.columns_by.divide(uint32_t(tile)));
    column_tile = tile - row_tile * int(g.columns_by.divisor);
  }
};

/// Adds beta c to the sums of d[row][column ...], as far as those are inside d.
template <class Out, int kCount, class T>
__device__ __forceinline__ void add_beta_c(const NarrowArgs<T>& g, int64_t matrix, int row, int column,
                                           float (&values)[kCount]) {
  if (g.beta == 0) return;
  const Out* const from = static_cast<const Out*>(g.c) + matrix * g.stride_d + row * g.ldd + column;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (column + i < g.n) values[i] += g.beta * float(from[i]);
}

/// Writes d[row][column ...], `column` a multiple of kCount, as far as those are inside d; with one store
/// where that is possible.
template <int kCount, class Out, class T>
__device__ __forceinline__ void write_rounded(const NarrowArgs<T>& g, bool together, int64_t matrix, int row,
                                              int column, const gpu::Pack<Out, kCount>& pack) {
  Out* const to = static_cast<Out*>(g.d) + matrix * g.stride_d + row * g.ldd + column;
  const int inside = g.n - column;
  if (together && inside > 0 && (inside >= kCount || g.pads)) {
    gpu::store_pack<kCount>(to, pack);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < inside) to[i] = pack.at[i];
  }
}

/// Writes d[row][column ... column + 3] from their sums.
template <class T>
__device__ __forceinline__ void write_quad(const NarrowArgs<T>& g, int64_t matrix, int row, int column,
                                           const float4& sums) {
  if (row >= g.m || column >= g.n) return;
  float values[4] = {g.alpha * sums.x, g.alpha * sums.y, g.alpha * sums.z, g.alpha * sums.w};
  if (g.bias)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < g.n) values[i] += float(g.bias[matrix * g.stride_bias + column + i]);
  const auto write = [&]<class Out>() {
    add_beta_c<Out>(g, matrix, row, column, values);
    gpu::Pack<Out, 4> pack;
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.at[i] = Out(values[i]);
    write_rounded<4>(g, g.quads, matrix, row, column, pack);
  };
  if (sizeof(T) == 4 || g.wide)
    write.template operator()<float>();
  else
    write.template operator()<T>();
}

}  // namespace
}  // namespace tessera::ops
