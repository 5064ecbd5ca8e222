#include "ops/softmax/softmax_math.cuh"

/// One read and one write an element forward, two reads and one write backward, against one exponential:
/// bound by memory. So the last dimension is read once, into registers, 16 bytes per thread and load: a row
/// of up to 1024 elements by a warp, of up to 8192 by a block. Longer rows are read twice by a block, the
/// maximum and the sum of the exponentials being kept up to date in the first pass; what a block read last is
/// still in the L2 cache when it comes again. Trailing dimensions of size one are no
/// dimensions. Narrow rows and such that are not aligned: softmax_any_rows_cuda.cu; other dimensions:
/// softmax_lines_cuda.cu.

namespace tessera::ops {
namespace {

using namespace softmax_detail;

using gpu::column_of;
using gpu::first_row;
using gpu::for_chunks;
using gpu::RowAccess;
using gpu::RowReduce;

constexpr int kLongBlock = 256;  // of rows that are read in pieces
constexpr int kChunkSteps = 2;   // words a thread holds of a piece

/// The values of a share; `fill` past the row's end.
template <int kThreads, int kSteps, class T>
__device__ __forceinline__ void unpack_share(float (&values)[kSteps][kPackOf<T>],
                                             const Words<T> (&share)[kSteps], int rank, int width,
                                             float fill) {
  constexpr int kPack = kPackOf<T>;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    gpu::unpack(values[s], share[s]);
    const int inside = width - column_of<T, kThreads>(s, rank);
    if (inside < kPack)
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        if (i >= inside) values[s][i] = fill;
  }
}

template <class T, bool kLog, int kThreads, int kSteps, int kBlock>
__global__ void __launch_bounds__(kBlock) forward_rows(Rows<T> args) {
  constexpr int kPack = kPackOf<T>;
  using Reduce = RowReduce<kThreads, 1>;
  using Access = RowAccess<kThreads>;
  __shared__ float scratch[Reduce::kScratch];
  Reduce reduce(scratch);
  const int64_t row = first_row<kThreads>();
  if (row >= args.rows) return;
  const int rank = int(threadIdx.x) % kThreads, width = int(args.width);
  Words<T> share[kSteps];
  Access::load(share, args.a + row * args.a_stride, rank, width);
  float values[kSteps][kPack], top[1] = {Max::kIdentity}, sum[1] = {};
  unpack_share<kThreads>(values, share, rank, width, Max::kIdentity);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i) top[0] = Max{}(top[0], values[s][i]);
  reduce.template operator()<Max>(top);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float shifted = values[s][i] - top[0], e = exponential<T>(shifted);
      sum[0] += e;
      values[s][i] = kLog ? shifted : e;
    }
  reduce(sum);
  const float log_sum = logf(sum[0]), inverse = 1.0f / sum[0];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[s][i] = kLog ? values[s][i] - log_sum : values[s][i] * inverse;
    share[s] = gpu::round_to_words<T>(values[s]);
  }
  Access::store(args.to + row * args.to_stride, share, rank, width);
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kLongBlock) forward_long_rows(Rows<T> args) {
  constexpr int kPack = kPackOf<T>, kChunk = kLongBlock * kChunkSteps * kPack;
  using Access = RowAccess<kLongBlock>;
  __shared__ float scratch[kWarp];
  const int64_t row = blockIdx.x;
  const int rank = int(threadIdx.x);
  Words<T> share[kChunkSteps];
  float values[kChunkSteps][kPack];
  const auto load = [&](int64_t base, int width) {
    Access::load(share, args.a + row * args.a_stride + base, rank, width);
    unpack_share<kLongBlock>(values, share, rank, width, Max::kIdentity);
  };
  RunningSoftmax running;
  for_chunks<kChunk>(args.width, [&](int64_t base, int width) {
    load(base, width);
#pragma unroll
    for (int s = 0; s < kChunkSteps; ++s) running.add(values[s]);
  });
  running = running.reduce_row<kLongBlock>(scratch);
  const float log_sum = logf(running.sum), inverse = 1.0f / running.sum;
  for_chunks<kChunk>(args.width, [&](int64_t base, int width) {
    load(base, width);
#pragma unroll
    for (int s = 0; s < kChunkSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float shifted = values[s][i] - running.top;
        values[s][i] = kLog ? shifted - log_sum : exponential<T>(shifted) * inverse;
      }
      share[s] = gpu::round_to_words<T>(values[s]);
    }
    Access::store(args.to + row * args.to_stride + base, share, rank, width);
  });
}

template <class T, bool kLog, int kThreads, int kSteps, int kBlock>
__global__ void __launch_bounds__(kBlock) backward_rows(Rows<T> args) {
  using Reduce = RowReduce<kThreads, 1>;
  using Access = RowAccess<kThreads>;
  __shared__ float scratch[Reduce::kScratch];
  Reduce reduce(scratch);
  const int64_t row = first_row<kThreads>();
  if (row >= args.rows) return;
  const int rank = int(threadIdx.x) % kThreads, width = int(args.width);
  Words<T> grads[kSteps], results[kSteps];
  Access::load(grads, args.a + row * args.a_stride, rank, width);
  Access::load(results, args.b + row * args.b_stride, rank, width);
  float sum[1] = {sum_of<kLog>(grads, results)};
  reduce(sum);
  slopes<kLog>(grads, results, sum[0]);
  Access::store(args.to + row * args.to_stride, grads, rank, width);
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kLongBlock) backward_long_rows(Rows<T> args) {
  constexpr int kChunk = kLongBlock * kChunkSteps * kPackOf<T>;
  using Reduce = RowReduce<kLongBlock, 1>;
  using Access = RowAccess<kLongBlock>;
  __shared__ float scratch[Reduce::kScratch];
  Reduce reduce(scratch);
  const int64_t row = blockIdx.x;
  const int rank = int(threadIdx.x);
  Words<T> grads[kChunkSteps], results[kChunkSteps];
  const auto load = [&](int64_t base, int width) {
    Access::load(grads, args.a + row * args.a_stride + base, rank, width);
    Access::load(results, args.b + row * args.b_stride + base, rank, width);
  };
  float sum[1] = {};
  for_chunks<kChunk>(args.width, [&](int64_t base, int width) {
    load(base, width);
    sum[0] += sum_of<kLog>(grads, results);
  });
  reduce(sum);
  for_chunks<kChunk>(args.width, [&](int64_t base, int width) {
    load(base, width);
    slopes<kLog>(grads, results, sum[0]);
    Access::store(args.to + row * args.to_stride + base, grads, rank, width);
  });
}

/// How many threads hold a row, and how many words each.
template <class T, int kThreads, int kColumns>
struct Resident {
  static constexpr int threads = kThreads, steps = kColumns / kPackOf<T>,
                       block = kThreads <= kWarp ? 128 : kThreads;
  static dim3 grid(const Rows<T>& rows) {
    return gpu::grid_of(gpu::ceil_div(rows.rows, gpu::rows_at_once<kThreads>(block)));
  }
};

/// Calls `resident(Resident)` or `longer()`, by where a row fits.
template <class T, class OfResident, class Longer>
void by_width(int64_t width, OfResident&& resident, Longer&& longer) {
  if (width < kPackOf<T>) {
    resident(Resident<T, 1, kPackOf<T>>{});
  } else if (width <= 512) {
    resident(Resident<T, kWarp, 16>{});
  } else if (width <= 1024) {
    resident(Resident<T, kWarp, 32>{});
  } else if (width <= 2048) {
    resident(Resident<T, 128, 16>{});
  } else if (width <= 4096) {
    resident(Resident<T, 128, 32>{});
  } else if (width <= 8192) {
    resident(Resident<T, 256, 32>{});
  } else {
    longer();
  }
}

/// The tensor without the dimensions of size one that follow `dim`.
Tensor without_last_ones(const Tensor& tensor, int dim) {
  Tensor view = tensor.detach();
  while (view.rank() - 1 > dim && view.size(-1) == 1) view = view.select(view.rank() - 1, 0);
  return view;
}

template <class T>
bool aligned(const Tensor& rows) {
  return gpu::is_pack_aligned(rows.data<T>(), rows.rows() == 1 ? 0 : rows.row_stride(), kPackOf<T>);
}

/// `x` or a copy of it whose rows lie as far after a multiple of 16 bytes as those of `like`, a tensor of
/// its shape that Tensor::empty made.
template <class T>
Tensor lying_like(const Tensor& like, const Tensor& x) {
  const Tensor rows = x.with_rows();
  if (rows.row_length() < kPackOf<T>) return rows;
  if (aligned<T>(like)) return gpu::pack_aligned_or_copy<T>(rows);
  const auto start = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data<T>()) % 16; };
  if (start(rows) == start(like) && (rows.row_stride() - like.row_stride()) % kPackOf<T> == 0) return rows;
  Tensor copy = Tensor::empty_packed(like.shape(), like.dtype(), like.device());
  copy.copy_from(rows);
  return copy;
}

/// Whether the kernels of this file take such rows.
template <class T>
bool takes(const Rows<T>& rows, const Tensor& to) {
  return rows.width < kPackOf<T> || (rows.width > kNarrow && aligned<T>(to));
}

template <class T, bool kLog>
void forward(const Tensor& y, const Tensor& x) {
  const Device device = y.device();
  const Tensor from = lying_like<T>(y, x);
  const Rows<T> rows{y.data<T>(), from.data<T>(), nullptr,       y.row_stride(), from.row_stride(),
                     0,           y.rows(),       y.row_length()};
  if (!takes(rows, y)) return forward_any_rows(device, rows, kLog);
  by_width<T>(
      rows.width,
      [&]<class H>(H) {
        gpu::launch(device, {H::grid(rows), H::block}, forward_rows<T, kLog, H::threads, H::steps, H::block>,
                    rows);
      },
      [&] {
        gpu::launch(device, {gpu::grid_of(rows.rows), kLongBlock}, forward_long_rows<T, kLog>, rows);
      });
}

template <class T, bool kLog>
void backward(const Tensor& dx, const Tensor& dy, const Tensor& y) {
  const Device device = dx.device();
  const Tensor grads = lying_like<T>(dx, dy);
  const Rows<T> rows{dx.data<T>(),       grads.data<T>(), y.data<T>(), dx.row_stride(),
                     grads.row_stride(), y.row_stride(),  dx.rows(),   dx.row_length()};
  if (!takes(rows, dx)) return backward_any_rows(device, rows, kLog);
  by_width<T>(
      rows.width,
      [&]<class H>(H) {
        gpu::launch(device, {H::grid(rows), H::block}, backward_rows<T, kLog, H::threads, H::steps, H::block>,
                    rows);
      },
      [&] {
        gpu::launch(device, {gpu::grid_of(rows.rows), kLongBlock}, backward_long_rows<T, kLog>, rows);
      });
}

}  // namespace

void softmax_forward_cuda(const Tensor& y, const Tensor& x, int dim, bool log) {
  dispatch_floating_cuda(x.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    if (y.count() == 0) return;
    const Tensor to = without_last_ones(y, dim), from = without_last_ones(x, dim);
    if (dim != to.rank() - 1) return forward_lines<T>(to, from, dim, log);
    log ? forward<T, true>(to, from) : forward<T, false>(to, from);
  });
}

void softmax_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log) {
  dispatch_floating_cuda(y.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    if (dx.count() == 0) return;
    const Tensor to = without_last_ones(dx, dim), grads = without_last_ones(dy, dim),
                 results = without_last_ones(y, dim);
    if (dim != to.rank() - 1) return backward_lines<T>(to, grads, results, dim, log);
    log ? backward<T, true>(to, grads, results) : backward<T, false>(to, grads, results);
  });
}

}  // namespace tessera::ops
