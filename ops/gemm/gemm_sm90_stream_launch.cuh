#pragma once

#include "gpu/launch.cuh"
#include "ops/gemm/gemm_sm90_stream.cuh"
#include "tensor/tensor.h"

/// The instances of gemm_sm90_stream.cuh, for one dtype: a file of its own for each.

namespace tessera::ops {
namespace {

/// An operand as TMA sees it: rows of k elements, or, with k_first, k rows.
template <class T>
struct StreamOperand {
  const T* data;
  int64_t rows, ld, stride;
  bool k_first;

  gpu::TensorMap map(int64_t k, int64_t batch, int box_rows) const {
    return gpu::tensor_map<T, 3>(data, {k_first ? rows : k, k_first ? k : rows, stride ? batch : 1},
                                 {ld, stride}, {64, k_first ? 64 : box_rows, 1}, gpu::Swizzle::k128);
  }
};

template <class T, int kTokens, gpu::TileOrder kOrder, bool kGated>
void launch_stream(StreamArgs<T> args, const StreamOperand<T>& weight, const StreamOperand<T>& tokens,
                   const Gemm& g, Device device) {
  using Kernel = StreamKernel<T, kTokens, kOrder, kGated>;
  const int halves = kGated ? 2 : 1;
  args.weight_bytes = int(gpu::ceil_div(args.tile, 8) * 8) * 128 * halves;  // whole swizzle atoms
  args.stage_bytes = args.weight_bytes + kTokens * 128;
  args.loaded_bytes = args.tile * 128 * halves + kTokens * 128;
  // The MMA of the last stage reads 64 rows at a time, whatever follows the tile.
  const int behind = std::max(0, kMBlocks * 8192 - args.stage_bytes);
  const auto stages = [&](int shared) {
    return std::min(kMostStreamStages, (shared - Kernel::kStagedBytes - behind) / args.stage_bytes);
  };
  args.stages = stages(kStreamShared);
  if (args.stages < kFewestStages) args.stages = stages(kStreamSharedAlone);
  const int ring_bytes = args.stages * args.stage_bytes + behind;
  const int clusters = std::min(device.multiprocessors() / args.splits, args.all_tiles);
  check(args.splits == 1 || args.all_tiles <= clusters, "gemm: ", args.all_tiles, " tiles for ", clusters,
        " clusters of ", args.splits);
  gpu::launch(
      device,
      {.grid = dim3(unsigned(clusters * args.splits)),
       .block = dim3(kStreamThreads),
       .shared_bytes = size_t(args.splits > 1 ? std::max(ring_bytes, Kernel::kPartialBytes) : ring_bytes),
       .cluster = args.splits,
       .overlaps = true},
      stream_kernel<T, kTokens, kOrder, kGated>, weight.map(g.k, g.batch, args.tile),
      tokens.map(g.k, g.batch, kTokens), args);
}

template <class T, gpu::TileOrder kOrder, bool kGated>
void run_stream(const StreamArgs<T>& args, const StreamOperand<T>& weight, const StreamOperand<T>& tokens,
                const Gemm& g, Device device) {
  const auto run = [&]<int kTokens>() {
    launch_stream<T, kTokens, kOrder, kGated>(args, weight, tokens, g, device);
  };
  if (args.tokens <= 16)
    run.template operator()<16>();
  else if (args.tokens <= 32)
    run.template operator()<32>();
  else
    run.template operator()<64>();
}

/// Everything but the ring. `few_rows`: d's rows are the tokens.
template <class T>
StreamArgs<T> stream_args(const Gemm& g, const GemmChoice& choice, bool few_rows) {
  StreamArgs<T> args{.y = g.d,
                     .c = g.c ? g.c : g.d,
                     .bias = static_cast<const T*>(g.bias),
                     .y_row = few_rows ? 1 : g.ldd,
                     .y_token = few_rows ? g.ldd : 1,
                     .y_matrix = g.stride_d,
                     .bias_row = few_rows ? 1 : 0,
                     .bias_token = few_rows ? 0 : 1,
                     .bias_matrix = g.stride_bias,
                     .rows = int(few_rows ? g.n : g.m),
                     .tokens = int(few_rows ? g.m : g.n),
                     .tile = choice.rows,
                     .splits = choice.splits,
                     .batched_weights = (few_rows ? g.stride_b : g.stride_a) != 0,
                     .batched_tokens = (few_rows ? g.stride_a : g.stride_b) != 0,
                     .alpha = float(g.alpha),
                     .beta = float(g.beta),
                     .wide = g.out != g.in};
  args.tiles = int(gpu::ceil_div(args.rows, args.tile));
  args.all_tiles = int(g.batch) * args.tiles;
  args.blocks = int(gpu::ceil_div(g.k, 64));
  args.depth = int(gpu::ceil_div(args.blocks, args.splits));
  return args;
}

}  // namespace

template <class T>
void gemm_stream_sm90(const Gemm& g, const GemmChoice& choice, Device device) {
  const bool few_rows = stream_tokens_are_rows(g);
  const StreamArgs<T> args = stream_args<T>(g, choice, few_rows);
  const StreamOperand<T> a{static_cast<const T*>(g.a), g.m, g.lda, g.stride_a, g.transpose_a},
      b{static_cast<const T*>(g.b), g.n, g.ldb, g.stride_b, !g.transpose_b};
  const StreamOperand<T>&weight = few_rows ? b : a, &tokens = few_rows ? a : b;
  if (weight.k_first)
    run_stream<T, gpu::TileOrder::mn_major, false>(args, weight, tokens, g, device);
  else
    run_stream<T, gpu::TileOrder::k_major, false>(args, weight, tokens, g, device);
}

template <class T>
void swiglu_stream_sm90(const Gemm& g, const GemmChoice& choice, Device device) {
  const StreamOperand<T> a{static_cast<const T*>(g.a), g.m, g.lda, g.stride_a, false},
      b{static_cast<const T*>(g.b), 2 * g.n, g.ldb, g.stride_b, false};
  run_stream<T, gpu::TileOrder::k_major, true>(stream_args<T>(g, choice, true), b, a, g, device);
}

}  // namespace tessera::ops
