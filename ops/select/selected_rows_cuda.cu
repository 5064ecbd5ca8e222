#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/gather/row_walk.cuh"
#include "ops/select/entries_below.cuh"
#include "ops/select/select_kernels.h"

/// What gathers, scatters and adds the rows of a selection.
///
/// Gather: a warp, or as many of its lanes as a row has packs, moves a row: no index is divided. One read and
/// one write per element. Plain copies are gather_rows's kernel.
///
/// Scatter writes all rows of y once, the zeros too, so that no fill comes before it. A block has a few
/// adjacent rows. Its first warp finds the first entry of the selection among them, 32 probes of the
/// ascending indices at a time (three rounds for 32,768 entries), and notes for each row which entry it has;
/// then its warps copy rows or write zeros. Several blocks per SM hide the search. Bytes: the entries' rows
/// once, y once.
///
/// Add touches the entries' rows alone: 8 bytes per element of bf16 (a sum in f32 and y read, y written), so
/// a gradient that is there already costs no pass over the other rows.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;
constexpr int kMostRows = 64;    // of y, per block
constexpr int kBlocksPerSm = 8;  // resident: what hides the search

template <class T>
__device__ __forceinline__ T scaled(T value, float scale) {
  return T(float(value) * scale);
}

/// y = x scaled, or 0, of one row that both hold as a run of aligned packs and up to a pack's elements.
template <bool kScaled, class T>
__device__ __forceinline__ void move_run(T* y, const T* x, bool inside, float scale, int64_t columns,
                                         int lane, int lanes) {
  constexpr int kPack = gpu::kPackOf<T>;
  const int64_t packed = columns / kPack * kPack;
  for (int64_t at = int64_t(lane) * kPack; at < packed; at += int64_t(lanes) * kPack) {
    gpu::Pack<T, kPack> values{};
    if (inside) {
      values = gpu::load_pack<kPack>(x + at);
      if constexpr (kScaled)
#pragma unroll
        for (int i = 0; i < kPack; ++i) values.at[i] = scaled(values.at[i], scale);
    }
    gpu::store_pack<kPack>(y + at, values);
  }
  for (int64_t at = packed + lane; at < columns; at += lanes)
    y[at] = !inside ? T(0.0f) : kScaled ? scaled(x[at], scale) : x[at];
}

/// The same of one pack of any row.
template <bool kScaled, class T>
__device__ __forceinline__ void move_pack(const RowWalk& walk, int64_t number, T* y_row, const T* x_row,
                                          bool inside, float scale) {
  const RowPack pack = find_pack<gpu::kPackOf<T>>(walk, number);
  const int inner = walk.loop.rank - 1;
  const T* const from = x_row + pack.x;
#pragma unroll 1
  for (int i = 0; i < pack.count; ++i) {
    const T value = inside ? from[i * walk.loop.strides[1][inner]] : T(0.0f);
    y_row[pack.y + i * walk.loop.strides[0][inner]] = kScaled && inside ? scaled(value, scale) : value;
  }
}

template <class T, bool kRuns>
__global__ void __launch_bounds__(kThreads)
    gather_scaled(RowWalk walk, T* y, int64_t y_stride, const T* x, int64_t x_stride, int64_t rows,
                  const int32_t* indices, const float* scales, int64_t count) {
  gpu::wait_and_launch_dependents();
  const int lanes = 1 << walk.log_lanes, lane = int(threadIdx.x) % lanes;
  const int rows_at_once = kThreads >> walk.log_lanes;
  for (int64_t n = blockIdx.x * int64_t(rows_at_once) + int(threadIdx.x) / lanes; n < count;
       n += int64_t(gridDim.x) * rows_at_once) {
    const int64_t row = indices[n];
    const bool inside = row >= 0 && row < rows;
    T* const to = y + n * y_stride;
    const T* const from = x + (inside ? row : 0) * x_stride;
    if constexpr (kRuns) {
      move_run<true>(to, from, inside, scales[n], walk.loop.sizes[0], lane, lanes);
    } else {
#pragma unroll 1
      for (int64_t at = lane; at < walk.packs; at += lanes)
        move_pack<true>(walk, at, to, from, inside, scales[n]);
    }
  }
}

template <class T, bool kScaled, bool kRuns>
__global__ void __launch_bounds__(kThreads)
    scatter_ascending(RowWalk walk, T* y, int64_t y_stride, const T* x, int64_t x_stride, int64_t rows,
                      int rows_of_block, const int32_t* indices, const float* scales, int64_t count) {
  __shared__ int32_t entries[kMostRows];  // of each row of the block; -1: not in the selection
  gpu::wait_and_launch_dependents();
  const int64_t first = blockIdx.x * int64_t(rows_of_block);
  const int own = int(min(int64_t(rows_of_block), rows - first));
  if (threadIdx.x < gpu::kWarp) {
    for (int row = int(threadIdx.x); row < own; row += gpu::kWarp) entries[row] = -1;
    const int64_t begin = entries_below(indices, count, first);
    __syncwarp();
    for (int64_t n = begin + threadIdx.x; n < min(count, begin + own); n += gpu::kWarp) {
      const int64_t row = indices[n] - first;
      if (row >= 0 && row < own) entries[row] = int32_t(n);
    }
  }
  __syncthreads();
  const int lanes = 1 << walk.log_lanes, lane = int(threadIdx.x) % lanes;
  for (int row = int(threadIdx.x) / lanes; row < own; row += kThreads >> walk.log_lanes) {
    const int32_t n = entries[row];
    T* const to = y + (first + row) * y_stride;
    const T* const from = x + max(n, 0) * x_stride;
    const float scale = kScaled && n >= 0 ? scales[n] : 1.0f;
    if constexpr (kRuns) {
      move_run<kScaled>(to, from, n >= 0, scale, walk.loop.sizes[0], lane, lanes);
    } else {
#pragma unroll 1
      for (int64_t at = lane; at < walk.packs; at += lanes)
        move_pack<kScaled>(walk, at, to, from, n >= 0, scale);
    }
  }
}

/// The rows of y that the entries name += the rows of x, a warp per entry.
template <class T>
__global__ void __launch_bounds__(kThreads)
    add_entries(T* y, int64_t y_stride, const float* x, int64_t x_stride, int64_t rows, int64_t columns,
                bool aligned, const int32_t* indices, int64_t count) {
  constexpr int kPack = gpu::kPackOf<T>, kWarps = kThreads / gpu::kWarp;
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % gpu::kWarp;
  const int64_t packed = aligned ? columns / kPack * kPack : 0;
  for (int64_t n = blockIdx.x * int64_t(kWarps) + int(threadIdx.x) / gpu::kWarp; n < count;
       n += int64_t(gridDim.x) * kWarps) {
    const int64_t row = indices[n];
    if (row < 0 || row >= rows) continue;
    T* const to = y + row * y_stride;
    const float* const from = x + n * x_stride;
#pragma unroll 1
    for (int64_t at = int64_t(lane) * kPack; at < packed; at += gpu::kWarp * kPack) {
      gpu::Pack<T, kPack> values = gpu::load_pack<kPack>(to + at);
      const gpu::Pack<float, kPack> sums = gpu::load_pack<kPack>(from + at);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values.at[i] = T(float(values.at[i]) + sums.at[i]);
      gpu::store_pack<kPack>(to + at, values);
    }
#pragma unroll 1
    for (int64_t at = packed + lane; at < columns; at += gpu::kWarp) to[at] = T(float(to[at]) + from[at]);
  }
}

/// Whether rows are one run of aligned packs in both tensors.
bool is_run(const RowWalk& walk) {
  return walk.loop.rank == 1 && walk.aligned;
}

}  // namespace

void add_selected_cuda(const Tensor& y, const Tensor& x, const Tensor& indices) {
  if (indices.count() == 0) return;
  const Device device = y.device();
  dispatch_floating_cuda(y.dtype(), "add_selected", [&]<class T>() {
    constexpr int kPack = gpu::kPackOf<T>;
    const int64_t y_stride = y.layout().stride(0), x_stride = x.layout().stride(0);
    const bool aligned = gpu::is_pack_aligned(y.data<T>(), y_stride, kPack) &&
                         reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && x_stride % kPack == 0;
    const int64_t blocks = std::min<int64_t>(gpu::ceil_div(indices.count(), kThreads / gpu::kWarp),
                                             int64_t(device.multiprocessors()) * 32);
    gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads}, add_entries<T>, y.data<T>(), y_stride,
                          x.data<float>(), x_stride, y.size(0), y.size(1), aligned, indices.data<int32_t>(),
                          indices.count());
  });
}

void gather_selected_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales) {
  if (!scales.defined()) return gather_rows_cuda(y, x, indices, OutOfRange::zeros);
  const Device device = y.device();
  dispatch_floating_cuda(y.dtype(), "gather_selected", [&]<class T>() {
    const RowWalk walk = walk_rows<T>(y, x);
    const int64_t blocks = std::min<int64_t>(gpu::ceil_div(y.size(0), kThreads >> walk.log_lanes),
                                             int64_t(device.multiprocessors()) * 32);
    gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads},
                          is_run(walk) ? gather_scaled<T, true> : gather_scaled<T, false>, walk, y.data<T>(),
                          y.layout().stride(0), x.data<T>(), x.layout().stride(0), x.size(0),
                          indices.data<int32_t>(), scales.data<float>(), y.size(0));
  });
}

void scatter_selected_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales) {
  const Device device = y.device();
  const int64_t rows = y.size(0);
  const int rows_of_block = int(std::clamp<int64_t>(
      gpu::ceil_div(rows, int64_t(device.multiprocessors()) * kBlocksPerSm), 1, kMostRows));
  dispatch_floating_cuda(y.dtype(), "scatter_selected", [&]<class T>() {
    const RowWalk walk = walk_rows<T>(y, x);
    const auto run = [&](auto* kernel) {
      gpu::launch_dependent(device, {gpu::grid_of(gpu::ceil_div(rows, rows_of_block)), kThreads}, kernel,
                            walk, y.data<T>(), y.layout().stride(0), x.data<T>(), x.layout().stride(0), rows,
                            rows_of_block, indices.data<int32_t>(),
                            scales.defined() ? scales.data<float>() : nullptr, indices.count());
    };
    if (is_run(walk))
      scales.defined() ? run(scatter_ascending<T, true, true>) : run(scatter_ascending<T, false, true>);
    else
      scales.defined() ? run(scatter_ascending<T, true, false>) : run(scatter_ascending<T, false, false>);
  });
}

}  // namespace tessera::ops
