#include "ops/norm/norm_rows.cuh"

/// Norms, forward. One read and one write per element, two of each with a residual, whose dropout mask (if
/// any) is drawn while the row is being loaded. One warp (or block) per row or two, not persistent: 32 and
/// more rows at a time per SM keep the memory busy. Rows of up to half a warp's packs have 16 or 8 lanes
/// each, since a warp's instructions, not bytes, would bound them. (Persistent warps that keep weight and
/// bias in registers and prefetch the next row were 5 to 10 % slower, except where all rows fit one wave.)
/// The mean is known before the squares are summed, so a large mean costs no digits of the variance. The f32
/// sum that gives the mean is off by some ulp; the sum of the distances from it, computed with their squares,
/// corrects both (Chan, Golub, LeVeque, "Algorithms for computing the sample variance", Am. Stat. 37, 1983,
/// equation 1.7). So a row of equal elements has exactly its element as mean and y = bias: without the
/// correction, a mean that is off by an ulp would be amplified by 1 / sqrt(eps).

namespace tessera::ops {
namespace {

using namespace norm_rows;

constexpr int kBlock = 128, kLongBlock = 256;
constexpr int64_t kPairsFrom = 128;  // rows per SM: up to some three waves of single rows they are faster

/// What is added to x before it is normalised.
enum class Adds : uint8_t { nothing, residual, dropped_residual };

template <class T>
struct ForwardArgs {
  T *y, *sum;                             // sum: null without a residual
  const T *x, *residual, *weight, *bias;  // the last three may be null
  float *mean, *rstd;                     // null: not kept; mean: null in rmsnorm, too
  int64_t y_stride, sum_stride, x_stride, residual_stride, rows, width;
  float eps, inverse;  // 1 / width
  DropoutDraw drop;    // of a dropped residual
  uint8_t* mask;       // output: the mask for backward; null: not wanted
  int64_t mask_stride;
};

/// A thread's share of one row, or of `width` columns of it from `base` on.
template <class T, Adds kAdds, class Access, int kThreads, int kSteps>
struct ForwardShare {
  static constexpr int kPack = kPackOf<T>;
  static constexpr bool kResidual = kAdds != Adds::nothing, kDrops = kAdds == Adds::dropped_residual;
  Words<T> x[kSteps], residual[kResidual ? kSteps : 1];
  uint32_t keep_bits[kDrops ? kSteps : 1];

  __device__ __forceinline__ void load(const ForwardArgs<T>& args, int64_t row, int64_t base, int rank,
                                       int width) {
    Access::load(x, args.x + row * args.x_stride + base, rank, width);
    if constexpr (kResidual)
      Access::load(residual, args.residual + row * args.residual_stride + base, rank, width);
    if constexpr (kDrops) {
      draw_keep_mask<T, kThreads>(keep_bits, args.drop, args.drop.offset(), row * args.width + base, rank);
      if (args.mask)
        store_keep_mask<T, kThreads>(args.mask, keep_bits, row, args.mask_stride, base / kPack, rank, width);
    }
  }

  /// What is normalised, as f32: x, or x + residual after it was rounded and written. Past the end 0.
  __device__ __forceinline__ void values(float (&values)[kSteps][kPack], const ForwardArgs<T>& args,
                                         int64_t row, int64_t base, int rank, int width) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      gpu::unpack(values[s], x[s]);
      if constexpr (kResidual) {
        float other[kPack];
        gpu::unpack(other, residual[s]);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if constexpr (kDrops) {
            values[s][i] += other[i] * (keep_bits[s] >> i & 1u ? args.drop.scale : 0.0f);
          } else {
            values[s][i] += other[i];
          }
        }
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

/// sums += the squared distances from the mean, and where there are two sums the distances, of elements
/// inside the row.
template <class T, int kThreads, int kSums, int kSteps>
__device__ __forceinline__ void add_distances(float (&sums)[kSums], const float (&values)[kSteps][kPackOf<T>],
                                              float mean, int rank, int width) {
  constexpr int kPack = kPackOf<T>;
  const auto add = [&](float value) {
    const float distance = value - mean;
    sums[0] += distance * distance;
    if constexpr (kSums > 1) sums[1] += distance;
  };
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int inside = width - column_of<T, kThreads>(s, rank);
    if (inside >= kPack) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) add(values[s][i]);
    } else if (inside > 0) {
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        if (i < inside) add(values[s][i]);
    }
  }
}

/// Corrects the mean by `sums` of a whole row and returns the squared distances from the corrected mean.
/// Where the correction is nearly all of them, as in a row of equal elements, `recompute_squares` computes
/// them from scratch; all threads of the row take the same branch.
template <int kSums, class RecomputeSquares>
__device__ __forceinline__ float correct_mean(float& mean, const float (&sums)[kSums], int64_t width,
                                              float inverse, RecomputeSquares&& recompute_squares) {
  if constexpr (kSums == 1) return sums[0];
  const float shift = mean_of(sums[kSums - 1], width, inverse);
  mean += shift;
  const float squares = fmaf(-shift, sums[kSums - 1], sums[0]);
  return squares < sums[0] * 0x1p-8f ? recompute_squares() : squares;
}

/// y from the values.
template <class T, int kSteps>
__device__ __forceinline__ void normalise(Words<T> (&y)[kSteps], const float (&values)[kSteps][kPackOf<T>],
                                          const Words<T> (&weight)[kSteps], const Words<T> (&bias)[kSteps],
                                          bool biased, float mean, float rstd) {
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
__device__ __forceinline__ float rstd_of(const ForwardArgs<T>& args, float squares) {
  return __frsqrt_rn(squares * args.inverse + args.eps);
}

template <class T>
__device__ __forceinline__ float keep_statistics(const ForwardArgs<T>& args, int64_t row, bool writes,
                                                 float mean, float squares) {
  const float rstd = rstd_of(args, squares);
  if (writes && args.rstd) {
    if (args.mean) args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
  return rstd;
}

/// Those of rows `first`, which is even, and, if there are `both`, the next: 8 bytes at once.
template <class T>
__device__ __forceinline__ void keep_pair(const ForwardArgs<T>& args, int64_t first, bool both,
                                          const float (&mean)[2], const float (&rstd)[2]) {
  if (!args.rstd) return;
  if (both) {
    if (args.mean) *reinterpret_cast<float2*>(args.mean + first) = make_float2(mean[0], mean[1]);
    *reinterpret_cast<float2*>(args.rstd + first) = make_float2(rstd[0], rstd[1]);
  } else {
    if (args.mean) args.mean[first] = mean[0];
    args.rstd[first] = rstd[0];
  }
}

/// Minimum number of blocks per SM, 0 for the compiler's choice: 28 or more warps keep the memory busy, for
/// rows of one stream and up to three words per thread.
template <Adds kAdds, int kThreads, int kSteps>
constexpr int kBlocks = kThreads <= kWarp&& kSteps <= 3 && kAdds == Adds::nothing ? 10 - kSteps : 0;

/// Rows in registers: one per thread (rows shorter than a pack), group of lanes, warp or block.
template <class T, bool kCentred, Adds kAdds, int kThreads, int kSteps>
__global__ void __launch_bounds__(kThreads <= kWarp ? kBlock : kThreads, (kBlocks<kAdds, kThreads, kSteps>))
    forward_rows(ForwardArgs<T> args) {
  using Rows = RowAccess<kThreads>;
  using Sums = RowReduce<kThreads, 2>;
  __shared__ float scratch[Sums::kScratch];
  Sums add(scratch);
  gpu::wait_and_launch_dependents();
  const int rank = int(threadIdx.x) % kThreads, width = int(args.width);
  const int64_t row = first_row<kThreads>();
  if (row >= args.rows) return;
  ForwardShare<T, kAdds, Rows, kThreads, kSteps> share;
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
  float sums[kCentred ? 2 : 1] = {};
  add_distances<T, kThreads>(sums, values, mean, rank, width);
  add(sums);
  const float squares = correct_mean(mean, sums, args.width, args.inverse, [&] {
    float again[1] = {};
    add_distances<T, kThreads>(again, values, mean, rank, width);
    add(again);
    return again[0];
  });
  const float rstd = keep_statistics(args, row, rank == 0, mean, squares);
  normalise<T>(share.x, values, weight, bias, args.bias != nullptr, mean, rstd);
  Rows::store(args.y + row * args.y_stride, share.x, rank, width);
}

/// The words, as if they had just been loaded: what was unpacked from them is unpacked again where it is
/// needed, instead of being kept in registers. Those decide how many rows are in flight.
template <class T, int kSteps>
__device__ __forceinline__ void drop_unpacked(Words<T> (&words)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int w = 0; w < 4; ++w) asm volatile("" : "+r"(words[s].word[w]));
}

/// Two rows of 16-bit elements per warp, without a residual: of short rows one per warp is too little in
/// flight (512 columns on an H200: 3.5 TB/s of 4.2). Each row's arithmetic is that of forward_rows.
template <class T, bool kCentred, int kSteps>
__global__ void __launch_bounds__(kBlock, 7) forward_row_pairs(ForwardArgs<T> args) {
  using Rows = RowAccess<kWarp>;
  constexpr int kSums = kCentred ? 2 : 1;
  float scratch[1];  // a warp needs none
  RowReduce<kWarp, 2 * kSums> add(scratch);
  gpu::wait_and_launch_dependents();
  const int rank = int(threadIdx.x) % kWarp, width = int(args.width);
  const int64_t first = first_row<kWarp>() * 2;
  if (first >= args.rows) return;
  const bool both = first + 1 < args.rows;  // else the row twice
  Words<T> x[2][kSteps];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    Rows::load(x[r], args.x + (first + (both ? r : 0)) * args.x_stride, rank, width);
  const auto unpacked = [&](float(&values)[kSteps][kPackOf<T>], int r) {
    drop_unpacked(x[r]);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) gpu::unpack(values[s], x[r][s]);
  };
  float values[kSteps][kPackOf<T>], mean[2] = {}, squares[2], rstd[2];
  if constexpr (kCentred) {
    float sums[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unpacked(values, r);
      sums[r] = sum_of(values);
    }
    add(sums);
#pragma unroll
    for (int r = 0; r < 2; ++r) mean[r] = mean_of(sums[r], args.width, args.inverse);
  }
  float sums[2 * kSums];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float of_row[kSums] = {};
    unpacked(values, r);
    add_distances<T, kWarp>(of_row, values, mean[r], rank, width);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[r * kSums + i] = of_row[i];
  }
  add(sums);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float of_row[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) of_row[i] = sums[r * kSums + i];
    squares[r] = correct_mean(mean[r], of_row, args.width, args.inverse, [&] {
      float again[1] = {};
      unpacked(values, r);
      add_distances<T, kWarp>(again, values, mean[r], rank, width);
      add(again);
      return again[0];
    });
    rstd[r] = rstd_of(args, squares[r]);
  }
  if (rank == 0) keep_pair(args, first, both, mean, rstd);
  Words<T> weight[kSteps], bias[kSteps];
  Rows::load_vector(weight, args.weight, 1.0f, rank, width);
  Rows::load_vector(bias, args.bias, 0.0f, rank, width);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    unpacked(values, r);
    normalise<T>(x[r], values, weight, bias, args.bias != nullptr, mean[r], rstd[r]);
    if (r == 0 || both) Rows::store(args.y + (first + r) * args.y_stride, x[r], rank, width);
  }
}

/// Longer rows, a block or a cluster per row, read in pieces three times: for the mean, for the squares and
/// for y.
template <class T, bool kCentred, Adds kAdds>
__global__ void __launch_bounds__(kLongBlock) forward_long_rows(ForwardArgs<T> args) {
  constexpr bool kResidual = kAdds != Adds::nothing;
  constexpr int kPack = kPackOf<T>, kChunk = kLongBlock * kLongSteps * kPack;
  using Rows = RowAccess<kLongBlock>;
  using Long = LongRow<kLongBlock, kChunk>;
  __shared__ typename Long::Shared shared;
  gpu::wait_and_launch_dependents();
  Long long_row(shared, args.rows, args.width);
  const int64_t row = long_row.row();
  const int rank = int(threadIdx.x);
  float values[kLongSteps][kPack], mean = 0;
  const auto again = [&](int64_t base, int width) {  // x, or the sum that the first walk has written
    ForwardShare<T, Adds::nothing, Rows, kLongBlock, kLongSteps> share;
    const T* const from = kResidual ? args.sum + row * args.sum_stride : args.x + row * args.x_stride;
    Rows::load(share.x, from + base, rank, width);
    share.values(values, args, row, base, rank, width);
  };
  if (kCentred || kResidual) {
    float sum[1] = {};
    long_row.for_pieces([&](int64_t base, int width) {
      ForwardShare<T, kAdds, Rows, kLongBlock, kLongSteps> share;
      share.load(args, row, base, rank, width);
      share.values(values, args, row, base, rank, width);
      sum[0] += sum_of(values);
    });
    long_row.sum(sum);
    if (kCentred) mean = mean_of(sum[0], args.width, args.inverse);
  }
  const auto add_row = [&]<int kSums>(float(&sums)[kSums]) {
    long_row.for_pieces([&](int64_t base, int width) {
      again(base, width);
      add_distances<T, kLongBlock>(sums, values, mean, rank, width);
    });
    long_row.sum(sums);
  };
  float sums[kCentred ? 2 : 1] = {};
  add_row(sums);
  const float squares = correct_mean(mean, sums, args.width, args.inverse, [&] {
    float squares[1] = {};
    add_row(squares);
    return squares[0];
  });
  const float rstd = keep_statistics(args, row, long_row.is_first(), mean, squares);
  long_row.for_pieces([&](int64_t base, int width) {
    again(base, width);
    Words<T> weight[kLongSteps], bias[kLongSteps], y[kLongSteps];
    Rows::load_vector(weight, args.weight ? args.weight + base : nullptr, 1.0f, rank, width);
    Rows::load_vector(bias, args.bias ? args.bias + base : nullptr, 0.0f, rank, width);
    normalise<T>(y, values, weight, bias, args.bias != nullptr, mean, rstd);
    Rows::store(args.y + row * args.y_stride + base, y, rank, width);
  });
  long_row.close();
}

template <class T, bool kCentred, Adds kAdds>
void launch_forward(Device device, const ForwardArgs<T>& args) {
  const auto rows = [&]<int kThreads, int kColumns>() {  // of kColumns columns per thread
    constexpr int block = kThreads <= kWarp ? kBlock : kThreads;
    gpu::launch_dependent(device, {grid_of(ceil_div(args.rows, rows_at_once<kThreads>(block))), block},
                          forward_rows<T, kCentred, kAdds, kThreads, kColumns / kPackOf<T>>, args);
  };
  if (args.width < kPackOf<T>) {
    rows.template operator()<1, kPackOf<T>>();
  } else if (args.width <= 8 * kPackOf<T>) {
    rows.template operator()<8, kPackOf<T>>();
  } else if (args.width <= 16 * kPackOf<T>) {
    rows.template operator()<16, kPackOf<T>>();
  } else if (args.width <= 512) {
    const bool one_word = args.width <= kWarp * kPackOf<T>;
    if constexpr (sizeof(T) == 2 && kAdds == Adds::nothing) {
      if (args.rows >= kPairsFrom * device.multiprocessors()) {
        return gpu::launch_dependent(
            device, {grid_of(ceil_div(args.rows, 2 * rows_at_once<kWarp>(kBlock))), kBlock},
            one_word ? forward_row_pairs<T, kCentred, 1> : forward_row_pairs<T, kCentred, 2>, args);
      }
    }
    one_word ? rows.template operator()<kWarp, kPackOf<T>>() : rows.template operator()<kWarp, 16>();
  } else if (args.width <= 768) {
    rows.template operator()<kWarp, 24>();
  } else if (args.width <= 1024) {
    rows.template operator()<kWarp, 32>();
  } else if (args.width <= 2048) {
    rows.template operator()<128, 16>();
  } else if (args.width <= 4096) {
    rows.template operator()<128, 32>();
  } else if (args.width <= 8192) {
    rows.template operator()<256, 32>();
  } else {
    const int blocks = blocks_per_row(args.rows, args.width, kLongBlock * kLongSteps * kPackOf<T>);
    gpu::launch_dependent(device,
                          {.grid = grid_of(args.rows * blocks), .block = kLongBlock, .cluster = blocks},
                          forward_long_rows<T, kCentred, kAdds>, args);
  }
}

}  // namespace

void norm_forward_cuda(const NormForward& norm) {
  dispatch_floating_cuda(norm.x.dtype(), norm.centred ? "layernorm" : "rmsnorm", [&]<class T>() {
    if (norm.y.count() == 0) return;
    const Tensor x = gpu::pack_aligned_or_copy<T>(norm.x),
                 residual = gpu::pack_aligned_or_copy<T>(norm.residual),
                 weight = gpu::pack_aligned_or_copy<T>(norm.weight),
                 bias = gpu::pack_aligned_or_copy<T>(norm.bias);
    const ForwardArgs<T> args{.y = norm.y.data<T>(),
                              .sum = data_or_null<T>(norm.sum),
                              .x = x.data<T>(),
                              .residual = data_or_null<T>(residual),
                              .weight = data_or_null<T>(weight),
                              .bias = data_or_null<T>(bias),
                              .mean = data_or_null<float>(norm.mean),
                              .rstd = data_or_null<float>(norm.rstd),
                              .y_stride = norm.y.row_stride(),
                              .sum_stride = stride_or_0(norm.sum),
                              .x_stride = x.row_stride(),
                              .residual_stride = stride_or_0(residual),
                              .rows = norm.x.rows(),
                              .width = norm.x.row_length(),
                              .eps = float(norm.eps),
                              .inverse = 1.0f / float(norm.x.row_length()),
                              .drop = draw_of(norm.drop),
                              .mask = data_or_null<uint8_t>(norm.kept_mask),
                              .mask_stride = norm.kept_mask.defined() ? norm.kept_mask.size(1) : 0};
    const auto run = [&]<bool kCentred>() {
      if (!args.residual) {
        launch_forward<T, kCentred, Adds::nothing>(norm.x.device(), args);
      } else if (!norm.drop) {
        launch_forward<T, kCentred, Adds::residual>(norm.x.device(), args);
      } else {
        launch_forward<T, kCentred, Adds::dropped_residual>(norm.x.device(), args);
      }
    };
    norm.centred ? run.template operator()<true>() : run.template operator()<false>();
  });
}

}  // namespace tessera::ops
