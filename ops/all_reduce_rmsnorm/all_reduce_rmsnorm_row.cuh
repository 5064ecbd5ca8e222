#pragma once

#include "gpu/dependent_launch.cuh"
#include "ops/all_reduce_rmsnorm/peer_channels.cuh"
#include "tensor/tensor.h"

/// A row of a block after its exchange: what both kernels of all_reduce_rmsnorm do alike.

namespace tessera::ops::peer {

using gpu::RowAccess;
using gpu::RowReduce;
using Rows = RowAccess<kPeerThreads>;
using Sums = RowReduce<kPeerThreads, 1>;

template <class T>
struct RowArgs {
  T *y, *sum;
  const T *x, *share, *weight;  // x may be null
  int64_t y_stride, sum_stride, x_stride, share_stride;
  int32_t rows, width;
  float eps, inverse;  // 1 / width

  __device__ __forceinline__ const T* residual(int64_t row) const { return x ? x + row * x_stride : nullptr; }
};

template <class T>
RowArgs<T> row_args(const Tensor& y, const Tensor& sum, const Tensor& x, const Tensor& share,
                    const Tensor& weight, double eps) {
  return {.y = y.data<T>(),
          .sum = sum.data<T>(),
          .x = x.defined() ? x.data<T>() : nullptr,
          .share = share.data<T>(),
          .weight = weight.data<T>(),
          .y_stride = y.row_stride(),
          .sum_stride = sum.row_stride(),
          .x_stride = x.defined() ? x.row_stride() : 0,
          .share_stride = share.row_stride(),
          .rows = int32_t(share.size(0)),
          .width = int32_t(share.size(1)),
          .eps = float(eps),
          .inverse = 1.0f / float(share.size(1))};
}

/// total += one rank's share.
template <class T, int kSteps>
__device__ __forceinline__ void add_share(float (&total)[kSteps][kPackOf<T>],
                                          const Words<T> (&share)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float values[kPackOf<T>];
    gpu::unpack(values, share[s]);
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) total[s][i] += values[i];
  }
}

/// sum = residual + total, rounded, and y = its norm; NaN unless all shares came (`whole`). `add` passes a
/// barrier of the block after the row's sum was stored.
template <class T, int kSteps>
__device__ __forceinline__ void finish_row(const RowArgs<T>& args, int64_t row,
                                           float (&total)[kSteps][kPackOf<T>], Words<T> (&residual)[kSteps],
                                           const Words<T> (&weight)[kSteps], bool whole, Sums& add) {
  constexpr int kPack = kPackOf<T>;
  const int thread = int(threadIdx.x);
  float squares[1] = {0.0f};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float values[kPack];
    gpu::unpack(values, residual[s]);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = whole ? values[i] + total[s][i] : __int_as_float(0x7FC00000);
    residual[s] = gpu::round_to_words<T>(values);
    gpu::unpack(total[s], residual[s]);
    const int inside = args.width - column_of<T, kPeerThreads>(s, thread);
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      if (i < inside) squares[0] += total[s][i] * total[s][i];
  }
  Rows::store(args.sum + row * args.sum_stride, residual, thread, args.width);
  add(squares);
  const float rstd = __frsqrt_rn(squares[0] * args.inverse + args.eps);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float scale[kPack];
    gpu::unpack(scale, weight[s]);
#pragma unroll
    for (int i = 0; i < kPack; ++i) total[s][i] = total[s][i] * rstd * scale[i];
    residual[s] = gpu::round_to_words<T>(total[s]);
  }
  Rows::store(args.y + row * args.y_stride, residual, thread, args.width);
}

/// run<kSteps>() with as many 16-byte words per thread as a row of `width` needs, at most kPeerSteps.
template <class T, class Run>
void with_steps(int64_t width, Run&& run) {
  const int64_t steps = gpu::ceil_div(width, kPeerThreads * kPackOf<T>);
  if (steps <= 1) {
    run.template operator()<1>();
  } else if (steps <= 2) {
    run.template operator()<2>();
  } else {
    run.template operator()<kPeerSteps>();
  }
}

}  // namespace tessera::ops::peer
