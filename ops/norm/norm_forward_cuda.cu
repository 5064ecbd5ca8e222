#include "ops/norm/norm_rows.cuh"

/// One read and one write an element. The mean is known before the squares are summed, so a large mean costs
/// no digits of the variance.

namespace tessera::ops {
namespace {

using namespace norm_rows;

template <class T>
struct ForwardArgs {
  T* y;
  const T *x, *weight, *bias;  // the last two may be null
  float *mean, *rstd;
  int64_t y_stride, x_stride, rows, width;
  float eps;
  bool whole;
};

/// y of one pack, in place of x.
template <int kPack, class T>
__device__ __forceinline__ void normalise(float (&values)[kPack], const ForwardArgs<T>& args, int64_t first,
                                          float mean, float rstd) {
  float weight[kPack], bias[kPack];
  if (args.weight) load_row(weight, args.weight, first, args.width, args.whole, 1.0f);
  if (args.bias) load_row(bias, args.bias, first, args.width, args.whole, 0.0f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    values[i] = (values[i] - mean) * rstd;
    if (args.weight) values[i] *= weight[i];
    if (args.bias) values[i] += bias[i];
  }
}

template <class T, bool kCentred, int kThreads, int kSteps>
__global__ void __launch_bounds__(kBlock) forward_rows(ForwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const int64_t row = row_of<kThreads>(0);
  if (row >= args.rows) return;
  const int rank = int(threadIdx.x) % kThreads;
  float values[kSteps][kPack], sum = 0, squares = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    load_row(values[s], args.x + row * args.x_stride, int64_t(s * kThreads + rank) * kPack, args.width,
             args.whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += values[s][i];
  }
  const float mean = kCentred ? row_reduce<Sum, kThreads>(sum, scratch) / float(args.width) : 0.0f;
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float centred = values[s][i] - mean;
      if (int64_t(s * kThreads + rank) * kPack + i < args.width) squares += centred * centred;
    }
  squares = row_reduce<Sum, kThreads>(squares, scratch);
  const float rstd = 1.0f / sqrtf(squares / float(args.width) + args.eps);
  if (rank == 0) {
    if (kCentred) args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int64_t first = int64_t(s * kThreads + rank) * kPack;
    if (first >= args.width) continue;
    normalise(values[s], args, first, mean, rstd);
    store_row(args.y + row * args.y_stride, first, args.width, args.whole, values[s]);
  }
}

template <class T, bool kCentred>
__global__ void __launch_bounds__(kBlock) forward_long_rows(ForwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const int64_t row = blockIdx.x, start = int64_t(threadIdx.x) * kPack;
  const T* const x = args.x + row * args.x_stride;
  float values[kPack], mean = 0, squares = 0;
  if (kCentred) {
    for (int64_t first = start; first < args.width; first += kBlock * kPack) {
      load_row(values, x, first, args.width, args.whole, 0.0f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) mean += values[i];
    }
    mean = row_reduce<Sum, kBlock>(mean, scratch) / float(args.width);
  }
  for (int64_t first = start; first < args.width; first += kBlock * kPack) {
    load_row(values, x, first, args.width, args.whole, mean);  // the fill adds nothing
#pragma unroll
    for (int i = 0; i < kPack; ++i) squares += (values[i] - mean) * (values[i] - mean);
  }
  squares = row_reduce<Sum, kBlock>(squares, scratch);
  const float rstd = 1.0f / sqrtf(squares / float(args.width) + args.eps);
  if (threadIdx.x == 0) {
    if (kCentred) args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
  for (int64_t first = start; first < args.width; first += kBlock * kPack) {
    load_row(values, x, first, args.width, args.whole, 0.0f);
    normalise(values, args, first, mean, rstd);
    store_row(args.y + row * args.y_stride, first, args.width, args.whole, values);
  }
}

template <class T, bool kCentred>
void launch_forward(Device device, const ForwardArgs<T>& args) {
  constexpr int kPack = kPackOf<T>;
  const dim3 warps(unsigned(ceil_div(args.rows, kWarps))), blocks{unsigned(args.rows)};
  if (args.width <= 512) {
    gpu::launch(device, {warps, kBlock}, forward_rows<T, kCentred, kWarp, 16 / kPack>, args);
  } else if (args.width <= 1024) {
    gpu::launch(device, {warps, kBlock}, forward_rows<T, kCentred, kWarp, 32 / kPack>, args);
  } else if (args.width <= kBlock * 32) {
    gpu::launch(device, {blocks, kBlock}, forward_rows<T, kCentred, kBlock, 32 / kPack>, args);
  } else {
    gpu::launch(device, {blocks, kBlock}, forward_long_rows<T, kCentred>, args);
  }
}

}  // namespace

void norm_forward_cuda(const NormForward& norm) {
  const bool centred = norm.mean.defined();
  dispatch_floating_cuda(norm.x.dtype(), centred ? "layernorm" : "rmsnorm", [&]<class T>() {
    if (norm.y.count() == 0) return;
    const ForwardArgs<T> args{norm.y.data<T>(),
                              norm.x.data<T>(),
                              data_or_null<T>(norm.weight),
                              data_or_null<T>(norm.bias),
                              centred ? norm.mean.data<float>() : nullptr,
                              norm.rstd.data<float>(),
                              norm.y.row_stride(),
                              norm.x.row_stride(),
                              norm.x.rows(),
                              norm.x.row_length(),
                              float(norm.eps),
                              whole_rows<T>(norm.y) && whole_rows<T>(norm.x) && whole_rows<T>(norm.weight) &&
                                  whole_rows<T>(norm.bias)};
    if (centred) {
      launch_forward<T, true>(norm.x.device(), args);
    } else {
      launch_forward<T, false>(norm.x.device(), args);
    }
  });
}

}  // namespace tessera::ops
