#include "gpu/row.cuh"
#include "gpu/sum.cuh"
#include "ops/cross_entropy/cross_entropy_kernels.h"
#include "ops/indices.h"

/// Forward reads each logit once: the row's maximum and the sum of the exponentials are kept up to date while
/// reading, 16 bytes a thread and load. Backward reads each once more and writes its gradient. One
/// exponential (forward up to two) against 2 or 4 bytes, backward 4 or 8: bound by memory. Rows of up to 1024
/// classes belong to a warp, longer ones to a block. The losses of the rows go to memory; one block adds them
/// in double and in a fixed order, and counts the targets that are not ignored.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::kWarp;
using gpu::load_row;
using gpu::Max;
using gpu::row_reduce;
using gpu::RunningSoftmax;
using gpu::store_row;
using gpu::Sum;

constexpr int kWarpRows = 8;      // rows of a block that gives each a warp
constexpr int kRowThreads = 512;  // threads of a block that works on one row
constexpr int kFinish = 1024;

template <class T>
struct Rows {
  const T* logits;
  Indices targets;
  int64_t stride, rows, classes, ignored;
  bool whole;  // logits (and dlogits) may be read in packs
};

template <class T>
Rows<T> make_rows(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options) {
  return {logits.data<T>(),
          Indices(targets),
          logits.row_stride(),
          targets.count(),
          logits.row_length(),
          options.ignore_index,
          gpu::packs(logits.data<T>(), logits.row_stride(), kPackOf<T>)};
}

template <int kThreads>
__device__ __forceinline__ int64_t own_row() {
  return kThreads == kWarp ? blockIdx.x * int64_t(kWarpRows) + threadIdx.x / kWarp : int64_t(blockIdx.x);
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads == kWarp ? kWarp * kWarpRows : kThreads)
    forward(Rows<T> args, float* losses, float* tops, float* log_sums, float smoothing) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const int64_t row = own_row<kThreads>();
  if (row >= args.rows) return;
  const int rank = int(threadIdx.x) % kThreads;
  const int64_t target = args.targets[row];
  if (target == args.ignored || target < 0 || target >= args.classes) {
    if (rank == 0) losses[row] = target == args.ignored ? 0.0f : __int_as_float(0x7FC00000);
    return;  // backward asks for neither maximum nor sum of such a row
  }
  const T* const x = args.logits + row * args.stride;
  // The mean of the logits, for smoothing, is taken from the first one on, so that it keeps its digits.
  const float origin = isfinite(float(x[0])) ? float(x[0]) : 0.0f;
  RunningSoftmax running;
  float values[kPack], offsets = 0;
  for (int64_t first = int64_t(rank) * kPack; first < args.classes; first += kThreads * kPack) {
    load_row(values, x, first, args.classes, args.whole, Max::kIdentity);
    running.add(values);
    if (smoothing > 0)
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        if (first + i < args.classes) offsets += values[i] - origin;
  }
  running = running.of_row<kThreads>(scratch);
  if (smoothing > 0) offsets = row_reduce<Sum, kThreads>(offsets, scratch);
  if (rank != 0) return;
  const float log_sum = logf(running.sum);
  float loss = log_sum - (float(x[target]) - running.top);
  if (smoothing > 0) {
    const float mean = offsets / float(args.classes);  // of the logits, above the origin
    loss = (1.0f - smoothing) * loss + smoothing * (log_sum + ((running.top - origin) - mean));
  }
  losses[row] = loss;
  tops[row] = running.top;
  log_sums[row] = log_sum;
}

__global__ void __launch_bounds__(kFinish) finish(float* loss, float* count, const float* losses,
                                                  Indices targets, int64_t rows, int64_t ignored, bool mean) {
  __shared__ double counts[kFinish / kWarp];
  double sum = 0;
  int64_t own = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kFinish) {
    sum += double(losses[row]);
    own += targets[row] != ignored;
  }
  sum = gpu::block_sum(sum);
  double counted = double(own);  // exact: a sum of integers
  for (int step = kWarp / 2; step > 0; step /= 2) counted += __shfl_down_sync(0xFFFFFFFFu, counted, step);
  if (threadIdx.x % kWarp == 0) counts[threadIdx.x / kWarp] = counted;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kFinish / kWarp; ++warp) counted += counts[warp];
  *count = float(counted);
  if (loss) *loss = float(mean ? sum / counted : sum);
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads == kWarp ? kWarp * kWarpRows : kThreads)
    backward(Rows<T> args, T* dlogits, int64_t to_stride, const float* dloss, bool each, const float* count,
             const float* tops, const float* log_sums, float on, float off) {
  constexpr int kPack = kPackOf<T>;
  const int64_t row = own_row<kThreads>();
  if (row >= args.rows) return;
  const int rank = int(threadIdx.x) % kThreads;
  const int64_t target = args.targets[row];
  const T* const x = args.logits + row * args.stride;
  T* const dx = dlogits + row * to_stride;
  const bool ignored = target == args.ignored, valid = 0 <= target && target < args.classes;
  float values[kPack];
  if (ignored || !valid) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = ignored ? 0.0f : __int_as_float(0x7FC00000);
    for (int64_t first = int64_t(rank) * kPack; first < args.classes; first += kThreads * kPack)
      store_row(dx, first, args.classes, args.whole, values);
    return;
  }
  // `count` is null unless the loss is a mean.
  const float g = (each ? dloss[row] : *dloss) / (count ? *count : 1.0f), top = tops[row],
              log_sum = log_sums[row];
  for (int64_t first = int64_t(rank) * kPack; first < args.classes; first += kThreads * kPack) {
    load_row(values, x, first, args.classes, args.whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      values[i] = g * (expf(values[i] - top - log_sum) - (first + i == target ? on : off));
    store_row(dx, first, args.classes, args.whole, values);
  }
}

bool warp_rows(int64_t classes) {
  return classes <= 1024;
}

gpu::LaunchShape shape_of(int64_t rows, int64_t classes) {
  if (warp_rows(classes)) return {dim3(unsigned(ceil_div(rows, kWarpRows))), kWarp * kWarpRows};
  return {dim3(unsigned(rows)), kRowThreads};
}

}  // namespace

void cross_entropy_forward_cuda(const CrossEntropyForward& args) {
  dispatch_floating_cuda(args.logits.dtype(), "cross_entropy", [&]<class T>() {
    const Device device = args.logits.device();
    const Rows<T> rows = make_rows<T>(args.logits, args.targets, args.options);
    const bool each = args.options.reduction == Reduction::none;
    const Tensor scratch = each ? args.loss : Tensor::empty_packed(Shape{rows.rows}, DType::f32, device);
    float* const losses = scratch.data<float>();
    gpu::launch(device, shape_of(rows.rows, rows.classes),
                warp_rows(rows.classes) ? forward<T, kWarp> : forward<T, kRowThreads>, rows, losses,
                args.top.data<float>(), args.log_sum.data<float>(), float(args.options.label_smoothing));
    gpu::launch(device, {1, kFinish}, finish, each ? nullptr : args.loss.data<float>(),
                args.count.data<float>(), losses, rows.targets, rows.rows, rows.ignored,
                args.options.reduction == Reduction::mean);
  });
}

void cross_entropy_backward_cuda(const CrossEntropyBackward& args) {
  dispatch_floating_cuda(args.logits.dtype(), "cross_entropy", [&]<class T>() {
    Rows<T> rows = make_rows<T>(args.logits, args.targets, args.options);
    rows.whole = rows.whole && gpu::packs(args.dlogits.data<T>(), args.dlogits.row_stride(), kPackOf<T>);
    const double smoothing = args.options.label_smoothing, off = smoothing / double(rows.classes);
    const bool mean = args.options.reduction == Reduction::mean;
    gpu::launch(args.logits.device(), shape_of(rows.rows, rows.classes),
                warp_rows(rows.classes) ? backward<T, kWarp> : backward<T, kRowThreads>, rows,
                args.dlogits.data<T>(), args.dlogits.row_stride(), args.dloss.data<float>(),
                args.options.reduction == Reduction::none, mean ? args.count.data<float>() : nullptr,
                args.top.data<float>(), args.log_sum.data<float>(), float(1 - smoothing + off), float(off));
  });
}

}  // namespace tessera::ops
