#include "ops/norm/norm_rows.cuh"

/// Two reads and one write an element. Warps (blocks) walk the rows in steps of the grid. A thread keeps the
/// same columns in every row, so its share of dweight and dbias stays in its registers until the end; a block
/// adds the shares of its warps in order and writes one row of partial sums, and a second kernel adds those
/// rows in a fixed order. The grid, and so the order, depends on the problem and on the number of
/// multiprocessors alone.

namespace tessera::ops {
namespace {

using namespace norm_rows;

/// Columns of a thread that reads kSteps packs of a row.
template <class T, int kSteps>
constexpr int kColumns = kSteps* kPackOf<T>;

template <class T>
struct BackwardArgs {
  T* dx;                      // null: not wanted
  float *dweights, *dbiases;  // [blocks, width] partial sums; null: not wanted
  const T *dy, *x, *weight;   // the last may be null
  const float *mean, *rstd;   // mean may be null
  int64_t dx_stride, dy_stride, x_stride, rows, width;
  bool whole;
};

/// One pack of a row as the backward pass sees it. Past the row's end g is 0.
template <int kPack>
struct Part {
  float dy[kPack], xhat[kPack], g[kPack];

  template <class T>
  __device__ __forceinline__ void load(const BackwardArgs<T>& args, int64_t row, int64_t first, float mean,
                                       float rstd) {
    load_row(dy, args.dy + row * args.dy_stride, first, args.width, args.whole, 0.0f);
    load_row(xhat, args.x + row * args.x_stride, first, args.width, args.whole, mean);
    float weight[kPack];
    if (args.weight) load_row(weight, args.weight, first, args.width, args.whole, 1.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      xhat[i] = (xhat[i] - mean) * rstd;
      // Never fused into what follows: g and its mean must cancel where they are equal.
      g[i] = args.weight ? __fmul_rn(dy[i], weight[i]) : dy[i];
    }
  }
};

/// Adds the warps' values of a block, each thread's in its own columns, and writes them to a row of `width`.
template <int kSteps, int kPack>
__device__ void add_warps(float (&share)[kSteps][kPack], float* combined, float* to, int64_t width) {
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  for (int w = 0; w < kWarps; ++w) {
    if (warp == w)
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          float& sum = combined[(s * kPack + i) * kWarp + lane];
          sum = w == 0 ? share[s][i] : sum + share[s][i];
        }
    __syncthreads();
  }
  for (int at = int(threadIdx.x); at < kSteps * kPack * kWarp; at += kBlock) {
    const int s = at / (kPack * kWarp), i = at / kWarp % kPack;
    const int64_t column = int64_t(s * kWarp + lane) * kPack + i;
    if (column < width) to[column] = combined[at];
  }
  __syncthreads();  // before `combined` is used again
}

template <class T, bool kCentred, int kThreads, int kSteps>
__global__ void __launch_bounds__(kBlock, kColumns<T, kSteps> <= 16 ? 2 : 1)
    backward_rows(BackwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  __shared__ float combined[kThreads == kWarp ? kSteps * kPack * kWarp : 1];
  const int rank = int(threadIdx.x) % kThreads;
  float dweight[kSteps][kPack] = {}, dbias[kSteps][kPack] = {};
  for (int64_t step = 0; row_of<kThreads>(step) < args.rows; ++step) {
    const int64_t row = row_of<kThreads>(step);
    const float mean = kCentred ? args.mean[row] : 0.0f, rstd = args.rstd[row];
    float xhat[kSteps][kPack], g[kSteps][kPack], sum_g = 0, sum_gx = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Part<kPack> part;
      part.load(args, row, int64_t(s * kThreads + rank) * kPack, mean, rstd);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        dweight[s][i] += part.dy[i] * part.xhat[i];
        if (kCentred) dbias[s][i] += part.dy[i];
        xhat[s][i] = part.xhat[i];
        g[s][i] = part.g[i];
        sum_g += part.g[i];
        sum_gx += part.g[i] * part.xhat[i];
      }
    }
    if (!args.dx) continue;
    const float mean_g = kCentred ? row_reduce<Sum, kThreads>(sum_g, scratch) / float(args.width) : 0.0f;
    const float mean_gx = row_reduce<Sum, kThreads>(sum_gx, scratch) / float(args.width);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[s][i] = rstd * (g[s][i] - mean_g - xhat[s][i] * mean_gx);
      store_row(args.dx + row * args.dx_stride, int64_t(s * kThreads + rank) * kPack, args.width, args.whole,
                g[s]);
    }
  }
  if constexpr (kThreads == kWarp) {
    if (args.dweights) add_warps(dweight, combined, args.dweights + blockIdx.x * args.width, args.width);
    if (args.dbiases) add_warps(dbias, combined, args.dbiases + blockIdx.x * args.width, args.width);
  } else {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int64_t first = int64_t(s * kThreads + rank) * kPack;
      if (args.dweights)
        store_row(args.dweights + blockIdx.x * args.width, first, args.width, false, dweight[s]);
      if (args.dbiases) store_row(args.dbiases + blockIdx.x * args.width, first, args.width, false, dbias[s]);
    }
  }
}

/// Rows of any length: the block's partial sums stay in memory, where each column has one thread.
template <class T, bool kCentred>
__global__ void __launch_bounds__(kBlock) backward_long_rows(BackwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const int64_t start = int64_t(threadIdx.x) * kPack;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const float mean = kCentred ? args.mean[row] : 0.0f, rstd = args.rstd[row];
    float sum_g = 0, sum_gx = 0;
    Part<kPack> part;
    for (int64_t first = start; first < args.width; first += kBlock * kPack) {
      part.load(args, row, first, mean, rstd);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        sum_g += part.g[i];
        sum_gx += part.g[i] * part.xhat[i];
      }
    }
    const float mean_g = kCentred ? row_reduce<Sum, kBlock>(sum_g, scratch) / float(args.width) : 0.0f;
    const float mean_gx = row_reduce<Sum, kBlock>(sum_gx, scratch) / float(args.width);
    const auto add = [&](float* sums, int64_t column, float value) {
      if (!sums || column >= args.width) return;
      float& sum = sums[blockIdx.x * args.width + column];
      sum = row == blockIdx.x ? value : sum + value;
    };
    for (int64_t first = start; first < args.width; first += kBlock * kPack) {
      part.load(args, row, first, mean, rstd);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        add(args.dweights, first + i, part.dy[i] * part.xhat[i]);
        add(args.dbiases, first + i, part.dy[i]);
        part.g[i] = rstd * (part.g[i] - mean_g - part.xhat[i] * mean_gx);
      }
      if (args.dx) store_row(args.dx + row * args.dx_stride, first, args.width, args.whole, part.g);
    }
  }
}

/// to[c] = sum of partial[b][c] over the blocks: thread y of a column adds every 32nd, then those 32 are
/// added in order.
__global__ void __launch_bounds__(1024)
    add_partial_sums(float* to, const float* partial, int64_t blocks, int64_t width) {
  __shared__ float sums[kWarp][kWarp + 1];
  const int64_t column = blockIdx.x * int64_t(kWarp) + threadIdx.x;
  float sum = 0;
  if (column < width)
    for (int64_t b = threadIdx.y; b < blocks; b += kWarp) sum += partial[b * width + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int y = 1; y < kWarp; ++y) sum += sums[y][threadIdx.x];
  to[column] = sum;
}

/// Blocks of the backward pass: rows of partial sums, at most as many as run at once.
int64_t backward_blocks(Device device, int64_t rows, int64_t width) {
  const int64_t groups = width <= 1024 ? ceil_div(rows, kWarps) : rows;
  return std::min<int64_t>(groups, int64_t(device.card().multiprocessors) * (width <= 512 ? 2 : 1));
}

template <class T, bool kCentred>
void launch_backward(Device device, int64_t blocks, const BackwardArgs<T>& args) {
  constexpr int kPack = kPackOf<T>;
  const gpu::LaunchShape shape{dim3(unsigned(blocks)), kBlock};
  if (args.width <= 512) {
    gpu::launch(device, shape, backward_rows<T, kCentred, kWarp, 16 / kPack>, args);
  } else if (args.width <= 768) {
    gpu::launch(device, shape, backward_rows<T, kCentred, kWarp, 24 / kPack>, args);
  } else if (args.width <= 1024) {
    gpu::launch(device, shape, backward_rows<T, kCentred, kWarp, 32 / kPack>, args);
  } else if (args.width <= kBlock * 32) {
    gpu::launch(device, shape, backward_rows<T, kCentred, kBlock, 32 / kPack>, args);
  } else {
    gpu::launch(device, shape, backward_long_rows<T, kCentred>, args);
  }
}

}  // namespace

void norm_backward_cuda(const NormBackward& norm) {
  const bool centred = norm.mean.defined();
  dispatch_floating_cuda(norm.x.dtype(), centred ? "layernorm" : "rmsnorm", [&]<class T>() {
    const Device device = norm.x.device();
    const int64_t rows = norm.x.rows(), width = norm.x.row_length();
    if (width == 0) return;
    const int64_t blocks = backward_blocks(device, rows, width);
    const auto partial = [&](const Tensor& gradient) {
      return gradient.defined() ? Tensor::empty_packed({blocks, width}, DType::f32, device) : Tensor();
    };
    const Tensor dweights = partial(norm.dweight), dbiases = partial(norm.dbias);
    const BackwardArgs<T> args{norm.dx.defined() ? norm.dx.data<T>() : nullptr,
                               dweights.defined() ? dweights.data<float>() : nullptr,
                               dbiases.defined() ? dbiases.data<float>() : nullptr,
                               norm.dy.data<T>(),
                               norm.x.data<T>(),
                               data_or_null<T>(norm.weight),
                               centred ? norm.mean.data<float>() : nullptr,
                               norm.rstd.data<float>(),
                               norm.dx.defined() ? norm.dx.row_stride() : 0,
                               norm.dy.row_stride(),
                               norm.x.row_stride(),
                               rows,
                               width,
                               whole_rows<T>(norm.dx) && whole_rows<T>(norm.dy) && whole_rows<T>(norm.x) &&
                                   whole_rows<T>(norm.weight)};
    if (centred) {
      launch_backward<T, true>(device, blocks, args);
    } else {
      launch_backward<T, false>(device, blocks, args);
    }
    const auto finish = [&](const Tensor& gradient, const Tensor& partial_sums) {
      if (!gradient.defined()) return;
      const gpu::LaunchShape shape{dim3(unsigned(ceil_div(width, kWarp))), dim3(kWarp, kWarp)};
      gpu::launch(device, shape, add_partial_sums, gradient.data<float>(), partial_sums.data<float>(), blocks,
                  width);
    };
    finish(norm.dweight, dweights);
    finish(norm.dbias, dbiases);
  });
}

}  // namespace tessera::ops
