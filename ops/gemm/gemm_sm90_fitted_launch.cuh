#pragma once

#include <algorithm>
#include <limits>

#include "gpu/launch.cuh"
#include "ops/gemm/gemm_scatter_internal.h"
#include "ops/gemm/gemm_sm90_fitted.cuh"

/// The instances of gemm_sm90_fitted.cuh, for one dtype: a file of its own for each.

namespace tessera::ops {
namespace {

template <class T, gpu::TileOrder kB, int kColumns, bool kScatter = false>
void launch_fitted(const Gemm& g, const GemmChoice& choice, Device device, const GemmScatter& scatter = {}) {
  using enum gpu::TileOrder;
  using Kernel = FittedKernel<T, kB, kColumns, kScatter>;
  static_assert(sizeof(FittedBarriers) <= 1024);
  const int rows = choice.rows;
  FittedArgs<T> args{.rows = rows,
                     .stages = fitted_stages(rows, kColumns),
                     .stage_bytes = fitted_stage_bytes(rows, kColumns),
                     .n = int(g.n),
                     .last_row = std::numeric_limits<int>::max(),
                     .last_column = std::numeric_limits<int>::max(),
                     .blocks = int(gpu::ceil_div(g.k, 64)),
                     .cluster = choice.cluster,
                     .along_n = choice.along_n,
                     .step_a = g.stride_a != 0,
                     .step_b = g.stride_b != 0,
                     .alpha = float(g.alpha),
                     .beta = float(g.beta)};
  args.bias = {static_cast<const T*>(g.bias), g.stride_bias, int(g.n)};
  const int down = choice.along_n ? 1 : choice.cluster, across = choice.cluster / down;
  args.clusters_m = int(gpu::ceil_div(g.m, int64_t(rows) * down));
  args.clusters_n = int(gpu::ceil_div(g.n, int64_t(Kernel::kTileColumns) * across));
  args.items = int(g.batch) * args.clusters_m * args.clusters_n;
  // Concurrent tiles should cover an area that is about square.
  args.group = std::min(args.clusters_m, std::max(1, 1536 / (rows * down)));
  const int box_a = box_rows(rows, g.m), box_b = box_rows(64, g.n);
  args.bytes_a = 128 * box_a, args.bytes_b = 128 * (kB == k_major ? box_b : 64);
  if (may_write_twice(g)) {
    if (g.m >= rows) args.last_row = int(g.m) - rows;
    if (kB == k_major && g.n >= kColumns) args.last_column = last_column(g.n, kColumns);
  }
  const auto map_of_d = [&](const void* data) {
    return gpu::tensor_map<T, 3>(static_cast<const T*>(data), {g.n, g.m, g.batch}, {g.ldd, g.stride_d},
                                 {64, rows, 1}, gpu::Swizzle::k128);
  };
  const FittedMaps maps{
      .a = operand_map<T, k_major>({static_cast<const T*>(g.a), g.lda, g.stride_a}, g.m, g.k, g.batch, box_a),
      .b = operand_map<T, kB>({static_cast<const T*>(g.b), g.ldb, g.stride_b}, g.n, g.k, g.batch, box_b),
      .c = map_of_d(g.c ? g.c : g.d),
      .d = map_of_d(g.d)};
  int clusters = std::min(args.items, device.multiprocessors() / choice.cluster);
  if constexpr (kScatter) {
    const int64_t pitch = g.ldd * int64_t(sizeof(T)), first = scatter.indices ? 0 : g.m;
    args.scatter = {static_cast<T*>(g.d), g.ldd, int(g.m), int(scatter.rows), scatter.indices};
    if (g.beta == 0) {
      args.scatter.zeros = {static_cast<char*>(g.d) + first * pitch, pitch, g.n * int64_t(sizeof(T)),
                            scatter.rows - first};
      clusters = device.multiprocessors() / choice.cluster;
    }
  }
  gpu::launch(device,
              {.grid = dim3(unsigned(clusters * choice.cluster)),
               .block = dim3(Kernel::kThreads),
               .shared_bytes = size_t(args.stages * args.stage_bytes + fitted_epilogue_bytes(rows, kColumns)),
               .cluster = choice.cluster,
               .overlaps = true},
              fitted_kernel<T, kB, kColumns, kScatter>, maps, args);
}

template <class T, gpu::TileOrder kB>
void dispatch_columns(const Gemm& g, const GemmChoice& choice, Device device) {
  check(has_fitted_tile(choice, g.k), "gemm: no fitted tile of ", choice.rows, " x ", choice.columns,
        " in clusters of ", choice.cluster);
  if (choice.columns == 64)
    launch_fitted<T, kB, 64>(g, choice, device);
  else if (choice.columns == 128)
    launch_fitted<T, kB, 128>(g, choice, device);
  else
    launch_fitted<T, kB, 192>(g, choice, device);
}

}  // namespace

template <class T>
void gemm_fitted_sm90(const Gemm& g, const GemmChoice& choice, Device device) {
  using enum gpu::TileOrder;
  if (g.transpose_b)
    dispatch_columns<T, k_major>(g, choice, device);
  else
    dispatch_columns<T, mn_major>(g, choice, device);
}

}  // namespace tessera::ops
