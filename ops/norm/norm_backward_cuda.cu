#include "ops/norm/norm_rows.cuh"

/// Two reads and one write an element, three reads with a gradient that passes by the norm. Warps (blocks) walk
/// the rows in steps of the grid, one block a multiprocessor. A thread keeps the same columns in every row, so
/// its share of dweight and dbias stays in its registers until the end; a block adds the shares of its warps in
/// order and writes one row of partial sums, and a second kernel adds those rows in a fixed order. The grid, and
/// so the order, depends on the problem and on the number of multiprocessors alone.

namespace tessera::ops {
namespace {

using namespace norm_rows;

constexpr int kAnyBlock = 256;

template <class T>
struct BackwardArgs {
  T* dx;                             // null: not wanted
  float *dweights, *dbiases;         // [blocks, width] partial sums; null: not wanted
  const T *dy, *dsum, *x, *weight;   // dsum and weight may be null
  const float *mean, *rstd;          // mean: null in rmsnorm
  int64_t dx_stride, dy_stride, dsum_stride, x_stride, rows, width;
};

/// A thread's share of one row, or of `width` columns of it from `base` on.
template <class T, bool kCentred, bool kResidual, class Access, int kSteps>
struct BackwardShare {
  static constexpr int kPack = kPackOf<T>, kSums = kCentred ? 2 : 1;
  Words<T> x[kSteps], dy[kSteps], dsum[kResidual ? kSteps : 1];
  float mean, rstd;

  __device__ __forceinline__ void load(const BackwardArgs<T>& args, int64_t row, int64_t base, int rank, int width) {
    Access::load(x, args.x + row * args.x_stride + base, rank, width);
    Access::load(dy, args.dy + row * args.dy_stride + base, rank, width);
    if constexpr (kResidual) Access::load(dsum, args.dsum + row * args.dsum_stride + base, rank, width);
    mean = kCentred ? args.mean[row] : 0.0f;
    rstd = args.rstd[row];
  }

  /// dy and xhat of words s.
  __device__ __forceinline__ void unpack(int s, float (&grad)[kPack], float (&xhat)[kPack]) const {
    gpu::unpack(grad, dy[s]);
    gpu::unpack(xhat, x[s]);
#pragma unroll
    for (int i = 0; i < kPack; ++i) xhat[i] = (xhat[i] - mean) * rstd;
  }

  /// sums += the sums of g xhat and, if it is wanted, of g; with `visit(i, dy, xhat)` for what else is summed.
  template <class Visit>
  __device__ __forceinline__ void add(int s, const Words<T>& weight, float (&sums)[kSums], Visit&& visit) const {
    float grad[kPack], xhat[kPack], scale[kPack];
    unpack(s, grad, xhat);
    gpu::unpack(scale, weight);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      // Never fused into what follows: g and its mean must cancel where they are equal.
      const float g = __fmul_rn(grad[i], scale[i]);
      visit(i, grad[i], xhat[i], g);
      sums[0] += g * xhat[i];
      if constexpr (kCentred) sums[1] += g;
    }
  }

  /// dx in place of dy.
  __device__ __forceinline__ void slope(Words<T> (&weight)[kSteps], float mean_g, float mean_gx) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float grad[kPack], xhat[kPack], scale[kPack];
      gpu::keep_packed(weight[s]);
      gpu::keep_packed(x[s]);
      gpu::keep_packed(dy[s]);
      unpack(s, grad, xhat);
      gpu::unpack(scale, weight[s]);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float g = __fmul_rn(grad[i], scale[i]);
        grad[i] = rstd * (g - mean_g - xhat[i] * mean_gx);
      }
      if constexpr (kResidual) {
        gpu::unpack(xhat, dsum[s]);
#pragma unroll
        for (int i = 0; i < kPack; ++i) grad[i] += xhat[i];
      }
      dy[s] = gpu::round_to_words<T>(grad);
    }
  }
};

/// to[column] = the sum over the block's warps of their shares of a row, through `combined`.
template <class T, int kSteps, int kWarps>
__device__ void add_warps(const float (&share)[kSteps][kPackOf<T>], float* combined, float* to, int64_t width) {
  constexpr int kPack = kPackOf<T>, kColumns = kSteps * kPack * kWarp;
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  __syncthreads();  // whoever still reads `combined`
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i) combined[warp * kColumns + (s * kPack + i) * kWarp + lane] = share[s][i];
  __syncthreads();
  for (int at = int(threadIdx.x); at < kColumns; at += kWarps * kWarp) {
    float sum = combined[at];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += combined[w * kColumns + at];
    const int s = at / (kPack * kWarp), i = at / kWarp % kPack, column = column_of<T, kWarp>(s, lane) + i;
    if (column < width) to[column] = sum;
  }
}

/// Rows whose packs are whole, in registers.
template <class T, bool kCentred, bool kBias, bool kResidual, int kThreads, int kSteps, int kBlock, int kBlocks, bool kHold=false>
__global__ void __launch_bounds__(kBlock, kBlocks) backward_rows(BackwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  using Rows = RowAccess<true, kThreads>;
  using Sums = RowReduce<kThreads, 2>;
  __shared__ float scratch[Sums::kScratch];
  __shared__ float combined[kThreads == kWarp ? kSteps * kPack * kBlock : 1];
  Sums add(scratch);
  const int rank = int(threadIdx.x) % kThreads, width = int(args.width);
  const int64_t step = row_step<kThreads>();
  float dweight[kSteps][kPack] = {}, dbias[kBias ? kSteps : 1][kPack] = {};
  Words<T> weight[kSteps];
  Rows::load_vector(weight, args.weight, 1.0f, rank, width);
  BackwardShare<T, kCentred, kResidual, Rows, kSteps> share, next;
  int64_t row = first_row<kThreads>();
  if (row < args.rows) share.load(args, row, 0, rank, width);
#pragma unroll 1
  for (; row < args.rows; row += step, share = next) {
    if (row + step < args.rows) next.load(args, row + step, 0, rank, width);
    float sums[kCentred ? 2 : 1] = {};
    float g[kHold ? kSteps : 1][kPack], xh[kHold ? kSteps : 1][kPack];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      gpu::keep_packed(weight[s]);
      share.add(s, weight[s], sums, [&](int i, float dy, float xhat, float gg) {
        dweight[s][i] += dy * xhat;
        if constexpr (kBias) dbias[s][i] += dy;
        if constexpr (kHold) g[s][i] = gg, xh[s][i] = xhat;
      });
    }
    if (!args.dx) continue;
    add(sums);
    const float mean_gx = sums[0] / float(width), mean_g = kCentred ? sums[kCentred] / float(width) : 0.0f;
    if constexpr (kHold) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float slope[kPack], past[kPack];
#pragma unroll
        for (int i = 0; i < kPack; ++i) slope[i] = share.rstd * (g[s][i] - mean_g - xh[s][i] * mean_gx);
        if constexpr (kResidual) {
          gpu::unpack(past, share.dsum[s]);
#pragma unroll
          for (int i = 0; i < kPack; ++i) slope[i] += past[i];
        }
        share.dy[s] = gpu::round_to_words<T>(slope);
      }
    } else {
      share.slope(weight, mean_g, mean_gx);
    }
    Rows::store(args.dx + row * args.dx_stride, share.dy, rank, width);
  }
  const auto finish = [&](const float(&sum)[kSteps][kPack], float* to) {
    if (!to) return;
    to += blockIdx.x * args.width;
    if constexpr (kThreads == kWarp) {
      add_warps<T, kSteps, kBlock / kWarp>(sum, combined, to, args.width);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int i = 0; i < kPack; ++i)
          if (const int column = column_of<T, kThreads>(s, rank) + i; column < width) to[column] = sum[s][i];
    }
  };
  finish(dweight, args.dweights);
  if constexpr (kBias) finish(dbias, args.dbiases);
}

/// Any rows: the block's partial sums stay in memory, where each column has one thread.
template <class T, bool kCentred, bool kResidual, bool kWhole>
__global__ void __launch_bounds__(kAnyBlock) backward_any_rows(BackwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>, kPiece = kAnyBlock * kAnySteps * kPack;
  using Rows = RowAccess<kWhole, kAnyBlock>;
  using Sums = RowReduce<kAnyBlock, 2>;
  __shared__ float scratch[Sums::kScratch];
  Sums add(scratch);
  const int rank = int(threadIdx.x);
  BackwardShare<T, kCentred, kResidual, Rows, kAnySteps> share;
  Words<T> weight[kAnySteps];
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const auto pieces = [&](auto&& visit) {
      for_pieces<kPiece>(args.width, [&](int64_t base, int width) {
        share.load(args, row, base, rank, width);
        Rows::load_vector(weight, args.weight ? args.weight + base : nullptr, 1.0f, rank, width);
        visit(base, width);
      });
    };
    float sums[kCentred ? 2 : 1] = {};
    pieces([&](int64_t base, int width) {
#pragma unroll
      for (int s = 0; s < kAnySteps; ++s) {
        const int first = column_of<T, kAnyBlock>(s, rank);
        const auto keep = [&](float* partial, int i, float value) {
          if (!partial || first + i >= width) return;
          float& sum = partial[blockIdx.x * args.width + base + first + i];
          sum = row == blockIdx.x ? value : sum + value;
        };
        share.add(s, weight[s], sums, [&](int i, float dy, float xhat, float) {
          keep(args.dweights, i, dy * xhat);
          if (kCentred) keep(args.dbiases, i, dy);
        });
      }
    });
    if (!args.dx) continue;
    add(sums);
    const float mean_gx = sums[0] / float(args.width), mean_g = kCentred ? sums[kCentred] / float(args.width) : 0.0f;
    pieces([&](int64_t base, int width) {
      share.slope(weight, mean_g, mean_gx);
      Rows::store(args.dx + row * args.dx_stride + base, share.dy, rank, width);
    });
  }
}

/// Partial sums [blocks, width] and where their sum goes.
struct PartialSums {
  const float* from;
  float* to;
};

/// to[c] = the sum of from[b][c] over the blocks: thread y of a column adds every 32nd, then those 32 are added
/// in order.
__global__ void __launch_bounds__(1024)
    add_partial_sums(PartialSums first, PartialSums second, int64_t blocks, int64_t width) {
  __shared__ float sums[kWarp][kWarp + 1];
  const PartialSums which = blockIdx.y == 0 ? first : second;
  const int64_t column = blockIdx.x * int64_t(kWarp) + threadIdx.x;
  float sum = 0;
  if (column < width)
#pragma unroll 8
    for (int64_t b = threadIdx.y; b < blocks; b += kWarp) sum += which.from[b * width + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Warp y takes column y: a lane a sum.
  sum = gpu::warp_reduce<gpu::Sum>(sums[threadIdx.x][threadIdx.y]);
  const int64_t own = blockIdx.x * int64_t(kWarp) + threadIdx.y;
  if (threadIdx.x == 0 && own < width) which.to[own] = sum;
}
