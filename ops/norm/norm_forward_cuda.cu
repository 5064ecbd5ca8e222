#include "ops/norm/norm_rows.cuh"

/// One read and one write an element, two of each with a residual. A warp (block) makes one row and is gone: with
/// 32 and more rows at once on a multiprocessor nothing else need be done to keep the memory busy. (Warps that stay,
/// keep weight and bias in registers and load the next row ahead were 5 to 10 % slower, except where all rows fit
/// one wave.) The mean is known before the squares are summed, so a large mean costs no digits of the variance.

namespace tessera::ops {
namespace {

using namespace norm_rows;

constexpr int kBlock = 128;

template <class T>
struct ForwardArgs {
  T *y, *sum;                             // sum: null without a residual
  const T *x, *residual, *weight, *bias;  // the last three may be null
  float *mean, *rstd;                     // mean: null in rmsnorm
  int64_t y_stride, sum_stride, x_stride, residual_stride, rows, width;
  float eps, inverse;  // 1 / width
};

/// A thread's share of one row, or of `width` columns of it from `base` on.
template <class T, bool kResidual, class Access, int kThreads, int kSteps>
struct ForwardShare {
  static constexpr int kPack = kPackOf<T>;
  Words<T> x[kSteps], residual[kResidual ? kSteps : 1];

  __device__ __forceinline__ void load(const ForwardArgs<T>& args, int64_t row, int64_t base, int rank, int width) {
    Access::load(x, args.x + row * args.x_stride + base, rank, width);
    if constexpr (kResidual) Access::load(residual, args.residual + row * args.residual_stride + base, rank, width);
  }

  /// What is normalised, as f32: x, or x + residual after it was rounded and written. Past the end 0.
  __device__ __forceinline__ void values(float (&values)[kSteps][kPack], const ForwardArgs<T>& args, int64_t row,
                                         int64_t base, int rank, int width) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      gpu::unpack(values[s], x[s]);
      if constexpr (kResidual) {
        float other[kPack];
        gpu::unpack(other, residual[s]);
#pragma unroll
        for (int i = 0; i < kPack; ++i) values[s][i] += other[i];
        x[s] = gpu::round_to_words<T>(values[s]);
        gpu::unpack(values[s], x[s]);
      }
    }
    if constexpr (kResidual) Access::store(args.sum + row * args.sum_stride + base, x, rank, width);
  }
};

template <int kSteps, int kPack>
__device__ __forceinline__ float sum_of(const float (&values)[kSteps][kPack]) {
  float sum = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += values[s][i];
  return sum;
}

/// The squared distances from the mean, of elements inside the row.
template <class T, int kThreads, int kSteps>
__device__ __forceinline__ float squares_of(const float (&values)[kSteps][kPackOf<T>], float mean, int rank, int width) {
  constexpr int kPack = kPackOf<T>;
  float squares = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int inside = width - column_of<T, kThreads>(s, rank);
    if (inside >= kPack) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares += (values[s][i] - mean) * (values[s][i] - mean);
    } else if (inside > 0) {
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        if (i < inside) squares += (values[s][i] - mean) * (values[s][i] - mean);
    }
  }
  return squares;
}

/// y from the values.
template <class T, int kSteps>
__device__ __forceinline__ void normalise(Words<T> (&y)[kSteps], const float (&values)[kSteps][kPackOf<T>],
                                          const Words<T> (&weight)[kSteps],
                                          const Words<T> (&bias)[kSteps], bool biased, float mean,
                                          float rstd) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float scale[kPackOf<T>], shift[kPackOf<T>], result[kPackOf<T>];
    gpu::unpack(scale, weight[s]);
    gpu::unpack(shift, bias[s]);
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) {
      result[i] = (values[s][i] - mean) * rstd * scale[i];
      if (biased) result[i] += shift[i];
    }
    y[s] = gpu::round_to_words<T>(result);
  }
}

template <class T>
__device__ __forceinline__ float keep_statistics(const ForwardArgs<T>& args, int64_t row, bool writes, float mean,
                                                 float squares) {
  const float rstd = __frsqrt_rn(squares * args.inverse + args.eps);
  if (writes) {
    if (args.mean) args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
  return rstd;
}

/// Rows whose packs are whole, in registers: one a warp or block.
template <class T, bool kCentred, bool kResidual, int kThreads, int kSteps>
__global__ void __launch_bounds__(kThreads == kWarp ? kBlock : kThreads) forward_rows(ForwardArgs<T> args) {
  using Rows = RowAccess<true, kThreads>;
  using Sums = RowReduce<kThreads, 1>;
  __shared__ float scratch[Sums::kScratch];
  Sums add(scratch);
  const int rank = int(threadIdx.x) % kThreads, width = int(args.width);
  const int64_t row = first_row<kThreads>();
  if (row >= args.rows) return;
  ForwardShare<T, kResidual, Rows, kThreads, kSteps> share;
  share.load(args, row, 0, rank, width);
  Words<T> weight[kSteps], bias[kSteps];
  Rows::load_vector(weight, args.weight, 1.0f, rank, width);
  Rows::load_vector(bias, args.bias, 0.0f, rank, width);
  float values[kSteps][kPackOf<T>], mean = 0;
  share.values(values, args, row, 0, rank, width);
  if constexpr (kCentred) {
    float sum[1] = {sum_of(values)};
    add(sum);
    mean = mean_of(sum[0], args.width, args.inverse);
  }
  float squares[1] = {squares_of<T, kThreads>(values, mean, rank, width)};
  add(squares);
  const float rstd = keep_statistics(args, row, rank == 0, mean, squares[0]);
  normalise<T>(share.x, values, weight, bias, args.bias != nullptr, mean, rstd);
  Rows::store(args.y + row * args.y_stride, share.x, rank, width);
}

/// Any rows, read piece by piece, once for the mean, for the squares and for y.
template <class T, bool kCentred, bool kResidual, bool kWhole, int kThreads>
__global__ void __launch_bounds__(kBlock) forward_any_rows(ForwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>, kPiece = kThreads * kAnySteps * kPack;
  using Rows = RowAccess<kWhole, kThreads>;
  using Sums = RowReduce<kThreads, 1>;
  __shared__ float scratch[Sums::kScratch];
  Sums add(scratch);
  const int64_t row = first_row<kThreads>();
  const int rank = int(threadIdx.x) % kThreads;
  if (row >= args.rows) return;
  float values[kAnySteps][kPack], mean = 0, squares[1] = {};
  const auto again = [&](int64_t base, int width) {  // x, or the sum that the first walk has written
    ForwardShare<T, false, Rows, kThreads, kAnySteps> share;
    const T* const from = kResidual ? args.sum + row * args.sum_stride : args.x + row * args.x_stride;
    Rows::load(share.x, from + base, rank, width);
    share.values(values, args, row, base, rank, width);
  };
  if (kCentred || kResidual) {
    float sum[1] = {};
    for_pieces<kPiece>(args.width, [&](int64_t base, int width) {
      ForwardShare<T, kResidual, Rows, kThreads, kAnySteps> share;
      share.load(args, row, base, rank, width);
      share.values(values, args, row, base, rank, width);
      sum[0] += sum_of(values);
    });
    add(sum);
    if (kCentred) mean = mean_of(sum[0], args.width, args.inverse);
  }
  for_pieces<kPiece>(args.width, [&](int64_t base, int width) {
    again(base, width);
    squares[0] += squares_of<T, kThreads>(values, mean, rank, width);
  });
  add(squares);
  const float rstd = keep_statistics(args, row, rank == 0, mean, squares[0]);
  for_pieces<kPiece>(args.width, [&](int64_t base, int width) {
    again(base, width);
    Words<T> weight[kAnySteps], bias[kAnySteps], y[kAnySteps];
    Rows::load_vector(weight, args.weight ? args.weight + base : nullptr, 1.0f, rank, width);
    Rows::load_vector(bias, args.bias ? args.bias + base : nullptr, 0.0f, rank, width);
    normalise<T>(y, values, weight, bias, args.bias != nullptr, mean, rstd);
    Rows::store(args.y + row * args.y_stride + base, y, rank, width);
  });
}

template <class T, bool kCentred, bool kResidual>
void launch_forward(Device device, const ForwardArgs<T>& args, bool whole) {
  constexpr int kPack = kPackOf<T>;
  const dim3 warps(unsigned(ceil_div(args.rows, kBlock / kWarp))), blocks{unsigned(args.rows)};
  const auto run = [&](auto kernel, dim3 grid, int block = kBlock) {
    gpu::launch(device, {grid, dim3(unsigned(block))}, kernel, args);
  };
  if (whole && args.width <= 256) {
    run(forward_rows<T, kCentred, kResidual, kWarp, 8 / kPack>, warps);
  } else if (whole && args.width <= 512) {
    run(forward_rows<T, kCentred, kResidual, kWarp, 16 / kPack>, warps);
  } else if (whole && args.width <= 768) {
    run(forward_rows<T, kCentred, kResidual, kWarp, 24 / kPack>, warps);
  } else if (whole && args.width <= 1024) {
    run(forward_rows<T, kCentred, kResidual, kWarp, 32 / kPack>, warps);
  } else if (whole && args.width <= kBlock * 16) {
    run(forward_rows<T, kCentred, kResidual, kBlock, 16 / kPack>, blocks);
  } else if (whole && args.width <= kBlock * 32) {
    run(forward_rows<T, kCentred, kResidual, kBlock, 32 / kPack>, blocks);
  } else if (whole && args.width <= 2 * kBlock * 32) {
    run(forward_rows<T, kCentred, kResidual, 2 * kBlock, 32 / kPack>, blocks, 2 * kBlock);
  } else if (whole) {
    run(forward_any_rows<T, kCentred, kResidual, true, kBlock>, blocks);
  } else if (args.width <= 1024) {
    run(forward_any_rows<T, kCentred, kResidual, false, kWarp>, warps);
  } else {
    run(forward_any_rows<T, kCentred, kResidual, false, kBlock>, blocks);
  }
}

}  // namespace

void norm_forward_cuda(const NormForward& norm) {
  const bool centred = norm.mean.defined();
  dispatch_floating_cuda(norm.x.dtype(), centred ? "layernorm" : "rmsnorm", [&]<class T>() {
    if (norm.y.count() == 0) return;
    const ForwardArgs<T> args{norm.y.data<T>(),
                              data_or_null<T>(norm.sum),
                              norm.x.data<T>(),
                              data_or_null<T>(norm.residual),
                              data_or_null<T>(norm.weight),
                              data_or_null<T>(norm.bias),
                              data_or_null<float>(norm.mean),
                              norm.rstd.data<float>(),
                              norm.y.row_stride(),
                              stride_or_0(norm.sum),
                              norm.x.row_stride(),
                              stride_or_0(norm.residual),
                              norm.x.rows(),
                              norm.x.row_length(),
                              float(norm.eps),
                              1.0f / float(norm.x.row_length())};
    const bool whole = whole_rows<T>(norm.y, norm.sum, norm.x, norm.residual, norm.weight, norm.bias);
    const auto run = [&]<bool kCentred, bool kResidual>() {
      launch_forward<T, kCentred, kResidual>(norm.x.device(), args, whole);
    };
    if (centred) {
      args.residual ? run.template operator()<true, true>() : run.template operator()<true, false>();
    } else {
      args.residual ? run.template operator()<false, true>() : run.template operator()<false, false>();
    }
  });
}

}  // namespace tessera::ops
