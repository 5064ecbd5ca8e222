#include "gpu/row.cuh"
#include "ops/softmax/softmax_kernels.h"

/// One read and one write an element forward, two reads and one write backward, against one exponential:
/// bound by memory. So the last dimension is read once, into registers: a row of up to 1024 elements is held
/// by a warp, of up to 4096 (f32) or 8192 (bf16, f16) by a block, 16 bytes a thread and load. Longer rows are
/// read twice by a block, the maximum and the sum of the exponentials being kept up to date in the first
/// pass; what a block read last is still in the L2 cache when it comes again. Along other dimensions a thread
/// walks one line twice; neighbouring threads walk neighbouring lines, so that the accesses of a warp are
/// coalesced.

namespace tessera::ops {
namespace {

using gpu::kPackOf;
using gpu::kWarp;
using gpu::load_row;
using gpu::Max;
using gpu::row_reduce;
using gpu::RunningSoftmax;
using gpu::store_row;
using gpu::Sum;

constexpr int kBlock = 256;

/// Rows of the forward pass (b unused) or the backward pass (a: dy, b: y).
template <class T>
struct Rows {
  T* to;
  const T* a;
  const T* b;
  int64_t to_stride, a_stride, b_stride, rows, width;
  bool whole;  // every row of every operand may be read in packs
  bool log;
};

template <class T>
Rows<T> make_rows(const Tensor& to, const Tensor& a, const Tensor& b, bool log) {
  Rows<T> rows{
      to.data<T>(),    a.data<T>(), b.data<T>(), to.row_stride(), a.row_stride(), b.row_stride(), to.rows(),
      to.row_length(), true,        log};
  for (const Tensor* tensor : {&to, &a, &b})
    rows.whole = rows.whole && gpu::packs(tensor->data<T>(), tensor->row_stride(), kPackOf<T>);
  return rows;
}

/// The row of this thread's warp or block, and whether there is one.
template <int kThreads>
__device__ __forceinline__ int64_t own_row() {
  return kThreads == kWarp ? blockIdx.x * int64_t(kBlock / kWarp) + threadIdx.x / kWarp : int64_t(blockIdx.x);
}

template <class T, int kThreads, int kSteps>
__global__ void __launch_bounds__(kBlock) forward_rows(Rows<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const int64_t row = own_row<kThreads>();
  if (row >= args.rows) return;
  const int rank = int(threadIdx.x) % kThreads;
  const T* const x = args.a + row * args.a_stride;
  float values[kSteps][kPack], top = Max::kIdentity, sum = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    load_row(values[s], x, int64_t(s * kThreads + rank) * kPack, args.width, args.whole, Max::kIdentity);
#pragma unroll
    for (int i = 0; i < kPack; ++i) top = Max{}(top, values[s][i]);
  }
  top = row_reduce<Max, kThreads>(top, scratch);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float shifted = values[s][i] - top, e = expf(shifted);
      sum += e;
      values[s][i] = args.log ? shifted : e;
    }
  sum = row_reduce<Sum, kThreads>(sum, scratch);
  const float log_sum = logf(sum), inverse = 1.0f / sum;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[s][i] = args.log ? values[s][i] - log_sum : values[s][i] * inverse;
    store_row(args.to + row * args.to_stride, int64_t(s * kThreads + rank) * kPack, args.width, args.whole,
              values[s]);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) forward_long_rows(Rows<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const T* const x = args.a + blockIdx.x * args.a_stride;
  T* const y = args.to + blockIdx.x * args.to_stride;
  float values[kPack];
  RunningSoftmax running;
  for (int64_t first = int64_t(threadIdx.x) * kPack; first < args.width; first += kBlock * kPack) {
    load_row(values, x, first, args.width, args.whole, Max::kIdentity);
    running.add(values);
  }
  running = running.of_row<kBlock>(scratch);
  const float log_sum = logf(running.sum), inverse = 1.0f / running.sum;
  for (int64_t first = int64_t(threadIdx.x) * kPack; first < args.width; first += kBlock * kPack) {
    load_row(values, x, first, args.width, args.whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float shifted = values[i] - running.top;
      values[i] = args.log ? shifted - log_sum : expf(shifted) * inverse;
    }
    store_row(y, first, args.width, args.whole, values);
  }
}

/// One element of dx, with sum = sum(dy) of log_softmax and sum(y dy) of softmax.
__device__ __forceinline__ float slope(float dy, float y, float sum, bool log) {
  return log ? dy - expf(y) * sum : y * (dy - sum);
}

template <class T, int kThreads, int kSteps>
__global__ void __launch_bounds__(kBlock) backward_rows(Rows<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const int64_t row = own_row<kThreads>();
  if (row >= args.rows) return;
  const int rank = int(threadIdx.x) % kThreads;
  const T *const dy = args.a + row * args.a_stride, *const y = args.b + row * args.b_stride;
  float grads[kSteps][kPack], results[kSteps][kPack], sum = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int64_t first = int64_t(s * kThreads + rank) * kPack;
    load_row(grads[s], dy, first, args.width, args.whole, 0.0f);
    load_row(results[s], y, first, args.width, args.whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += args.log ? grads[s][i] : results[s][i] * grads[s][i];
  }
  sum = row_reduce<Sum, kThreads>(sum, scratch);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) grads[s][i] = slope(grads[s][i], results[s][i], sum, args.log);
    store_row(args.to + row * args.to_stride, int64_t(s * kThreads + rank) * kPack, args.width, args.whole,
              grads[s]);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) backward_long_rows(Rows<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const T *const dy = args.a + blockIdx.x * args.a_stride, *const y = args.b + blockIdx.x * args.b_stride;
  T* const dx = args.to + blockIdx.x * args.to_stride;
  float grads[kPack], results[kPack], sum = 0;
  for (int64_t first = int64_t(threadIdx.x) * kPack; first < args.width; first += kBlock * kPack) {
    load_row(grads, dy, first, args.width, args.whole, 0.0f);
    load_row(results, y, first, args.width, args.whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += args.log ? grads[i] : results[i] * grads[i];
  }
  sum = row_reduce<Sum, kBlock>(sum, scratch);
  for (int64_t first = int64_t(threadIdx.x) * kPack; first < args.width; first += kBlock * kPack) {
    load_row(grads, dy, first, args.width, args.whole, 0.0f);
    load_row(results, y, first, args.width, args.whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) grads[i] = slope(grads[i], results[i], sum, args.log);
    store_row(dx, first, args.width, args.whole, grads);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) forward_lines(Lines<2> lines, T* y, const T* x, bool log) {
  const int64_t line = blockIdx.x * int64_t(kBlock) + threadIdx.x;
  if (line >= lines.starts.count) return;
  int64_t at[2];
  lines.locate(line, at);
  RunningSoftmax running;
  for (int64_t i = 0; i < lines.length; ++i) {
    const float value[1] = {float(x[at[1] + i * lines.strides[1]])};
    running.add(value);
  }
  const float log_sum = logf(running.sum), inverse = 1.0f / running.sum;
  for (int64_t i = 0; i < lines.length; ++i) {
    const float shifted = float(x[at[1] + i * lines.strides[1]]) - running.top;
    y[at[0] + i * lines.strides[0]] = T(log ? shifted - log_sum : expf(shifted) * inverse);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    backward_lines(Lines<3> lines, T* dx, const T* dy, const T* y, bool log) {
  const int64_t line = blockIdx.x * int64_t(kBlock) + threadIdx.x;
  if (line >= lines.starts.count) return;
  int64_t at[3];
  lines.locate(line, at);
  float sum = 0;
  for (int64_t i = 0; i < lines.length; ++i) {
    const float grad = float(dy[at[1] + i * lines.strides[1]]);
    sum += log ? grad : float(y[at[2] + i * lines.strides[2]]) * grad;
  }
  for (int64_t i = 0; i < lines.length; ++i)
    dx[at[0] + i * lines.strides[0]] =
        T(slope(float(dy[at[1] + i * lines.strides[1]]), float(y[at[2] + i * lines.strides[2]]), sum, log));
}

/// Calls `warp.operator()<kSteps>()`, `block.operator()<kSteps>()` or `longer()`, by where a row fits.
template <class T, class Warp, class Block, class Longer>
void by_width(int64_t width, Warp&& warp, Block&& block, Longer&& longer) {
  constexpr int kPack = kPackOf<T>;
  if (width <= kWarp * kPack) {
    warp.template operator()<1>();
  } else if (width <= 1024) {
    warp.template operator()<1024 / (kWarp * kPack)>();
  } else if (width <= 4 * kBlock * kPack) {
    block.template operator()<4>();
  } else {
    longer();
  }
}

}  // namespace

void softmax_forward_cuda(const Tensor& y, const Tensor& x, int dim, bool log) {
  dispatch_floating_cuda(x.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    if (y.count() == 0) return;
    const Device device = y.device();
    if (dim != x.rank() - 1) {
      const auto lines = lines_along(dim, y, x);
      gpu::launch(device, {dim3(unsigned(gpu::ceil_div(lines.starts.count, kBlock))), kBlock},
                  forward_lines<T>, lines, y.data<T>(), x.data<T>(), log);
      return;
    }
    const Tensor from = x.with_rows();
    const Rows<T> args = make_rows<T>(y, from, from, log);
    const dim3 warps(unsigned(gpu::ceil_div(args.rows, kBlock / kWarp))), blocks{unsigned(args.rows)};
    by_width<T>(
        args.width,
        [&]<int kSteps>() {
          gpu::launch(device, {warps, kBlock}, forward_rows<T, kWarp, kSteps>, args);
        },
        [&]<int kSteps>() {
          gpu::launch(device, {blocks, kBlock}, forward_rows<T, kBlock, kSteps>, args);
        },
        [&] {
          gpu::launch(device, {blocks, kBlock}, forward_long_rows<T>, args);
        });
  });
}

void softmax_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log) {
  dispatch_floating_cuda(y.dtype(), log ? "log_softmax" : "softmax", [&]<class T>() {
    if (dx.count() == 0) return;
    const Device device = dx.device();
    if (dim != y.rank() - 1) {
      const auto lines = lines_along(dim, dx, dy, y);
      gpu::launch(device, {dim3(unsigned(gpu::ceil_div(lines.starts.count, kBlock))), kBlock},
                  backward_lines<T>, lines, dx.data<T>(), dy.data<T>(), y.data<T>(), log);
      return;
    }
    const Tensor grads = dy.with_rows();
    const Rows<T> args = make_rows<T>(dx, grads, y, log);
    const dim3 warps(unsigned(gpu::ceil_div(args.rows, kBlock / kWarp))), blocks{unsigned(args.rows)};
    by_width<T>(
        args.width,
        [&]<int kSteps>() {
          gpu::launch(device, {warps, kBlock}, backward_rows<T, kWarp, kSteps>, args);
        },
        [&]<int kSteps>() {
          gpu::launch(device, {blocks, kBlock}, backward_rows<T, kBlock, kSteps>, args);
        },
        [&] {
          gpu::launch(device, {blocks, kBlock}, backward_long_rows<T>, args);
        });
  });
}

}  // namespace tessera::ops
