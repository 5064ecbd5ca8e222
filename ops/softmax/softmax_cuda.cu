#include "gpu/row.cuh"
#include "ops/softmax/softmax_kernels.h"

/// One read and one write an element forward, two reads and one write backward, against one exponential:
/// bound by memory. So the last dimension is read once, into registers, 16 bytes a thread and load: a row of
/// up to 1024 elements by a warp, of up to 8192 by a block. Longer rows are read twice by a block, the
/// maximum and the sum of the exponentials being kept up to date in the first pass; what a block read last is
/// still in the L2 cache when it comes again. Along other dimensions 32 neighbouring lines belong to a block,
/// so that the accesses of a warp are coalesced, and its eight warps share the length.
///
/// Results of 16 bits use the approximate exp, whose error of a few ulp of f32 does not show in them: with
/// the library's exp the arithmetic is what the time goes to.

namespace tessera::ops {
namespace {

using gpu::column_of;
using gpu::first_row;
using gpu::for_pieces;
using gpu::kPackOf;
using gpu::kWarp;
using gpu::Max;
using gpu::RowAccess;
using gpu::RowReduce;
using gpu::RunningSoftmax;
using gpu::Words;

constexpr int kLongBlock = 256;  // of rows that are read in pieces
constexpr int kPieceSteps = 2;   // words a thread holds of a piece

/// Rows of the forward pass (b unused) or the backward pass (a: dy, b: y).
template <class T>
struct Rows {
  T* to;
  const T* a;
  const T* b;
  int64_t to_stride, a_stride, b_stride, rows, width;
};

template <class T>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(T) == 2 ? __expf(x) : expf(x);
}

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
  constexpr int kPack = kPackOf<T>, kPiece = kLongBlock * kPieceSteps * kPack;
  using Access = RowAccess<kLongBlock>;
  __shared__ float scratch[kWarp];
  const int64_t row = blockIdx.x;
  const int rank = int(threadIdx.x);
  Words<T> share[kPieceSteps];
  float values[kPieceSteps][kPack];
  const auto load = [&](int64_t base, int width) {
    Access::load(share, args.a + row * args.a_stride + base, rank, width);
    unpack_share<kLongBlock>(values, share, rank, width, Max::kIdentity);
  };
  RunningSoftmax running;
  for_pieces<kPiece>(args.width, [&](int64_t base, int width) {
    load(base, width);
#pragma unroll
    for (int s = 0; s < kPieceSteps; ++s) running.add(values[s]);
  });
  running = running.of_row<kLongBlock>(scratch);
  const float log_sum = logf(running.sum), inverse = 1.0f / running.sum;
  for_pieces<kPiece>(args.width, [&](int64_t base, int width) {
    load(base, width);
#pragma unroll
    for (int s = 0; s < kPieceSteps; ++s) {
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

/// What the backward pass sums: dy of log_softmax, y dy of softmax.
template <bool kLog, int kSteps, class T>
__device__ __forceinline__ float sum_of(const Words<T> (&grads)[kSteps], const Words<T> (&results)[kSteps]) {
  float sum = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float grad[kPackOf<T>], result[kPackOf<T>];
    gpu::unpack(grad, grads[s]);
    gpu::unpack(result, results[s]);
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) sum += kLog ? grad[i] : result[i] * grad[i];
  }
  return sum;
}

/// One element of dx.
template <class T, bool kLog>
__device__ __forceinline__ float slope(float dy, float y, float sum) {
  return kLog ? dy - exponential<T>(y) * sum : y * (dy - sum);
}

/// dx in place of dy.
template <bool kLog, int kSteps, class T>
__device__ __forceinline__ void slopes(Words<T> (&grads)[kSteps], const Words<T> (&results)[kSteps],
                                       float sum) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float grad[kPackOf<T>], result[kPackOf<T>];
    gpu::unpack(grad, grads[s]);
    gpu::unpack(result, results[s]);
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) grad[i] = slope<T, kLog>(grad[i], result[i], sum);
    grads[s] = gpu::round_to_words<T>(grad);
  }
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
  constexpr int kPiece = kLongBlock * kPieceSteps * kPackOf<T>;
  using Reduce = RowReduce<kLongBlock, 1>;
  using Access = RowAccess<kLongBlock>;
  __shared__ float scratch[Reduce::kScratch];
  Reduce reduce(scratch);
  const int64_t row = blockIdx.x;
  const int rank = int(threadIdx.x);
  Words<T> grads[kPieceSteps], results[kPieceSteps];
  const auto load = [&](int64_t base, int width) {
    Access::load(grads, args.a + row * args.a_stride + base, rank, width);
    Access::load(results, args.b + row * args.b_stride + base, rank, width);
  };
  float sum[1] = {};
  for_pieces<kPiece>(args.width, [&](int64_t base, int width) {
    load(base, width);
    sum[0] += sum_of<kLog>(grads, results);
  });
  reduce(sum);
  for_pieces<kPiece>(args.width, [&](int64_t base, int width) {
    load(base, width);
    slopes<kLog>(grads, results, sum[0]);
    Access::store(args.to + row * args.to_stride + base, grads, rank, width);
  });
}

constexpr int kLineWarps = 8;  // share the length of a line
constexpr int kAhead = 4;      // elements of a line whose loads are under way together

/// The line of a thread of a block [kLineWarps][kWarp], and the part of it that its warp walks.
template <int N>
struct OwnLine {
  int64_t at[N];
  bool exists;

  __device__ __forceinline__ explicit OwnLine(const Lines<N>& lines) {
    const int64_t line = blockIdx.x * int64_t(kWarp) + threadIdx.x;
    exists = line < lines.starts.count;
    lines.locate(exists ? line : 0, at);
  }

  /// visit(first) for every kAhead elements first, first + kLineWarps, ... of this warp.
  template <class Visit>
  __device__ __forceinline__ void walk(int64_t length, Visit&& visit) const {
    if (exists)
      for (int64_t first = threadIdx.y; first < length; first += kLineWarps * kAhead) visit(first);
  }
};

/// Element `first` + n kLineWarps of a line, `fill` past its end.
template <class T>
__device__ __forceinline__ float element(const T* line, int64_t stride, int64_t length, int64_t first, int n,
                                         float fill) {
  const int64_t i = first + n * kLineWarps;
  return i < length ? float(line[i * stride]) : fill;
}

/// The threads of a block that share a line combine what they found.
template <class Op>
__device__ __forceinline__ float line_reduce(float value, float (&scratch)[kLineWarps][kWarp]) {
  __syncthreads();  // whoever still reads the last result
  scratch[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  value = scratch[0][threadIdx.x];
#pragma unroll
  for (int w = 1; w < kLineWarps; ++w) value = Op{}(value, scratch[w][threadIdx.x]);
  return value;
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kWarp* kLineWarps) forward_lines(Lines<2> lines, T* y, const T* x) {
  __shared__ float scratch[kLineWarps][kWarp];
  const OwnLine<2> own(lines);
  x += own.at[1];
  y += own.at[0];
  RunningSoftmax part;
  own.walk(lines.length, [&](int64_t first) {
    float values[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      values[n] = element(x, lines.strides[1], lines.length, first, n, Max::kIdentity);
    part.add(values);
  });
  const float top = line_reduce<Max>(part.top, scratch);
  const float sum =
      line_reduce<gpu::Sum>(part.top == Max::kIdentity ? 0.0f : part.sum * expf(part.top - top), scratch);
  const float log_sum = logf(sum), inverse = 1.0f / sum;
  own.walk(lines.length, [&](int64_t first) {
    float values[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      values[n] = element(x, lines.strides[1], lines.length, first, n, Max::kIdentity);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const float shifted = values[n] - top;
      const int64_t i = first + n * kLineWarps;
      if (i < lines.length)
        y[i * lines.strides[0]] = T(kLog ? shifted - log_sum : exponential<T>(shifted) * inverse);
    }
  });
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kWarp* kLineWarps)
    backward_lines(Lines<3> lines, T* dx, const T* dy, const T* y) {
  __shared__ float scratch[kLineWarps][kWarp];
  const OwnLine<3> own(lines);
  dx += own.at[0];
  dy += own.at[1];
  y += own.at[2];
  float sum = 0, grads[kAhead], results[kAhead];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      grads[n] = element(dy, lines.strides[1], lines.length, first, n, 0.0f);
      results[n] = element(y, lines.strides[2], lines.length, first, n, 0.0f);
    }
  };
  own.walk(lines.length, [&](int64_t first) {
    load(first);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) sum += kLog ? grads[n] : results[n] * grads[n];
  });
  sum = line_reduce<gpu::Sum>(sum, scratch);
  own.walk(lines.length, [&](int64_t first) {
    load(first);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int64_t i = first + n * kLineWarps;
      if (i < lines.length) dx[i * lines.strides[0]] = T(slope<T, kLog>(grads[n], results[n], sum));
    }
  });
}

/// How many threads hold a row, and how many words each.
template <class T, int kThreads, int kColumns>
struct Held {
  static constexpr int threads = kThreads, steps = kColumns / kPackOf<T>,
                       block = kThreads <= kWarp ? 128 : kThreads;
  static dim3 grid(const Rows<T>& rows) {
    return dim3(unsigned(gpu::ceil_div(rows.rows, gpu::rows_at_once<kThreads>(block))));
  }
};

/// Calls `held(Held)` or `longer()`, by where a row fits.
template <class T, class OfHeld, class Longer>
void by_width(int64_t width, OfHeld&& held, Longer&& longer) {
  if (width < kPackOf<T>) {
    held(Held<T, 1, kPackOf<T>>{});
  } else if (width <= 256) {
    held(Held<T, kWarp, 8>{});
  } else if (width <= 512) {
    held(Held<T, kWarp, 16>{});
  } else if (width <= 1024) {
    held(Held<T, kWarp, 32>{});
  } else if (width <= 2048) {
    held(Held<T, 128, 16>{});
  } else if (width <= 4096) {
    held(Held<T, 128, 32>{});
  } else if (width <= 8192) {
    held(Held<T, 256, 32>{});
  } else {
    longer();
  }
}

template <int N>
gpu::LaunchShape line_shape(const Lines<N>& lines) {
  return {dim3(unsigned(gpu::ceil_div(lines.starts.count, kWarp))), dim3(kWarp, kLineWarps)};
}

template <class T, bool kLog>
void forward(const Tensor& y, const Tensor& x, int dim) {
  const Device device = y.device();
  if (dim != x.rank() - 1) {
    const auto lines = lines_along(dim, y, x);
    gpu::launch(device, line_shape(lines), forward_lines<T, kLog>, lines, y.data<T>(), x.data<T>());
    return;
  }
  const Tensor from = gpu::with_packs<T>(x.with_rows());
  const Rows<T> rows{y.data<T>(), from.data<T>(), nullptr,       y.row_stride(), from.row_stride(),
                     0,           y.rows(),       y.row_length()};
  by_width<T>(
      rows.width,
      [&]<class H>(H) {
        gpu::launch(device, {H::grid(rows), H::block}, forward_rows<T, kLog, H::threads, H::steps, H::block>,
                    rows);
      },
      [&] {
        gpu::launch(device, {dim3(unsigned(rows.rows)), kLongBlock}, forward_long_rows<T, kLog>, rows);
      });
}

template <class T, bool kLog>
void backward(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim) {
  const Device device = dx.device();
  if (dim != y.rank() - 1) {
    const auto lines = lines_along(dim, dx, dy, y);
    gpu::launch(device, line_shape(lines), backward_lines<T, kLog>, lines, dx.data<T>(), dy.data<T>(),
                y.data<T>());
    return;
  }
  const Tensor grads = gpu::with_packs<T>(dy.with_rows());
  const Rows<T> rows{dx.data<T>(),       grads.data<T>(), y.data<T>(), dx.row_stride(),
                     grads.row_stride(), y.row_stride(),  dx.rows(),   dx.row_length()};
  by_width<T>(
      rows.width,
      [&]<class H>(H) {
        gpu::launch(device, {H::grid(rows), H::block}, backward_rows<T, kLog, H::threads, H::steps, H::block>,
                    rows);
      },
      [&] {
        gpu::launch(device, {dim3(unsigned(rows.rows)), kLongBlock}, backward_long_rows<T, kLog>, rows);
      });
}

}  // namespace

void softmax_forward_cuda(const Tensor& y, const Tensor& x, int dim, bool log) {
  dispatch_floating_cuda(x.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    if (y.count() == 0) return;
    log ? forward<T, true>(y, x, dim) : forward<T, false>(y, x, dim);
  });
}

void softmax_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log) {
  dispatch_floating_cuda(y.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    if (dx.count() == 0) return;
    log ? backward<T, true>(dx, dy, y, dim) : backward<T, false>(dx, dy, y, dim);
  });
}

}  // namespace tessera::ops
