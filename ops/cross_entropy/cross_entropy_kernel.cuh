#pragma once

#include "gpu/dependent_launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/sum.cuh"
#include "ops/cross_entropy/cross_entropy_row.cuh"
#include "ops/reduce/persistent.cuh"

/// The kernels of cross_entropy; cross_entropy_cuda.cu says which one runs.

namespace tessera::ops {

/// Where the losses of the rows go: `losses` (of each, or null), and their sum through `partial` (two numbers
/// of every block) to *loss (or null). For the mean it is divided by the number of rows that count, which is
/// written to *count if `counts`, else was there before.
struct LossSink {
  float *losses, *loss;
  double* partial;
  unsigned* arrived;  // see gpu::last_block
  float* count;
  bool mean, counts;
};

/// True for the threads of the last block, of which thread 0 gets the sum over the grid of `value`.
__device__ __forceinline__ bool sum_over_grid(double& value, double* partial, unsigned* arrived) {
  value = gpu::block_sum(value);
  if (threadIdx.x == 0) partial[blockIdx.x] = value;
  if (!gpu::last_block(arrived)) return false;
  value = 0;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += blockDim.x) value += partial[b];
  value = gpu::block_sum(value);
  return true;
}

__device__ __forceinline__ void sum_losses(const LossSink& sink, double sum, double counted) {
  if (!sink.loss) return;
  if (sink.counts) {
    counted = gpu::block_sum(counted);
    if (threadIdx.x == 0) sink.partial[gridDim.x + blockIdx.x] = counted;
    __syncthreads();  // before block_sum's memory is used again
  }
  if (!sum_over_grid(sum, sink.partial, sink.arrived)) return;
  if (sink.counts) {
    __syncthreads();
    counted = 0;
    for (unsigned b = threadIdx.x; b < gridDim.x; b += blockDim.x) counted += sink.partial[gridDim.x + b];
    counted = gpu::block_sum(counted);
    if (threadIdx.x == 0) *sink.count = float(counted);
  } else if (sink.mean) {
    counted = double(*sink.count);
  }
  if (threadIdx.x == 0) *sink.loss = float(sink.mean ? sum / counted : sum);
}

inline constexpr int kCountThreads = 256;

/// *count = the number of targets that are not ignored.
static __global__ void __launch_bounds__(kCountThreads)
    cross_entropy_count(Indices targets, int64_t rows, int64_t ignored, double* partial, unsigned* arrived,
                        float* count) {
  gpu::wait_and_launch_dependents();
  double counted = 0;  // exact: a sum of ones
  for (int64_t row = blockIdx.x * int64_t(kCountThreads) + threadIdx.x; row < rows;
       row += int64_t(gridDim.x) * kCountThreads)
    counted += targets[row] != ignored;
  if (sum_over_grid(counted, partial, arrived) && threadIdx.x == 0) *count = float(counted);
}

/// kThreads threads share a row: 4, 8, 32 or all of the block.
template <class T, int kThreads, int kBlockThreads, int kUnroll, bool kSmooth>
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_forward(CrossEntropyRows<T> args, LossSink sink, float* tops, float* log_sums) {
  constexpr int kPack = gpu::kPackOf<T>, kRows = kBlockThreads / kThreads;
  __shared__ float scratch[gpu::kWarp];
  gpu::wait_and_launch_dependents();
  const int rank = int(threadIdx.x) % kThreads;
  double sum = 0, counted = 0;
  // Every thread makes the same number of rounds: shuffles and barriers need them all.
  for (int64_t base = blockIdx.x * int64_t(kRows); base < args.rows; base += int64_t(gridDim.x) * kRows) {
    const int64_t row = base + threadIdx.x / kThreads;
    const bool inside = row < args.rows;
    const int64_t target = inside ? args.targets[row] : args.ignored;
    const bool counts = args.counts(target), live = counts && args.valid(target);
    const T* const x = args.logits + (live ? row * args.stride : 0);
    const float chosen = live ? float(x[target]) : 0.0f, first = live && kSmooth ? float(x[0]) : 0.0f,
                origin = isinf(first) ? 0.0f : first;
    RowSums<T, kSmooth> sums;
    for (int64_t begin = int64_t(rank) * kPack; begin < (live ? args.classes : 0);
         begin += int64_t(kThreads) * kPack * kUnroll) {
      float values[kUnroll][kPack];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        gpu::load_row(values[u], x, begin + int64_t(u) * kThreads * kPack, args.classes, args.whole,
                      -INFINITY);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t left = args.classes - begin - int64_t(u) * kThreads * kPack;
        sums.add(values[u], left < kPack ? int(left) : kPack, origin);
      }
    }
    sums.template join<kThreads>(scratch);
    if (rank != 0 || !inside) continue;
    const float log_sum = logf(sums.sum);
    const float loss = live     ? sums.loss(log_sum, chosen, origin, args.smoothing, args.classes)
                       : counts ? __int_as_float(0x7FC00000)
                                : 0.0f;
    tops[row] = sums.top, log_sums[row] = log_sum;
    sum += double(loss), counted += counts;
    if (sink.losses) sink.losses[row] = loss;
  }
  sum_losses(sink, sum, counted);
}

template <class T, int kThreads, int kBlockThreads, int kUnroll>
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_backward(CrossEntropyRows<T> args, T* dlogits, int64_t to_stride, const float* dloss,
                           bool each, const float* count, const float* tops, const float* log_sums, float on,
                           float off) {
  constexpr int kPack = gpu::kPackOf<T>, kRows = kBlockThreads / kThreads;
  gpu::wait_and_launch_dependents();
  const int rank = int(threadIdx.x) % kThreads;
  const int64_t row = blockIdx.x * int64_t(kRows) + threadIdx.x / kThreads;
  if (row >= args.rows) return;
  const int64_t target = args.targets[row];
  const T* const x = args.logits + row * args.stride;
  T* const dx = dlogits + row * to_stride;
  if (!args.counts(target) || !args.valid(target)) {
    float values[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = args.counts(target) ? __int_as_float(0x7FC00000) : 0.0f;
    for (int64_t first = int64_t(rank) * kPack; first < args.classes; first += kThreads * kPack)
      gpu::store_row(dx, first, args.classes, args.whole, values);
    return;
  }
  const float g = (each ? dloss[row] : *dloss) / (count ? *count : 1.0f), top = tops[row],
              log_sum = log_sums[row];
  for (int64_t begin = int64_t(rank) * kPack; begin < args.classes;
       begin += int64_t(kThreads) * kPack * kUnroll) {
    float values[kUnroll][kPack];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      gpu::load_row(values[u], x, begin + int64_t(u) * kThreads * kPack, args.classes, args.whole, 0.0f);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t first = begin + int64_t(u) * kThreads * kPack;
      row_gradient<T>(values[u], top, log_sum, g, on, off, first, target);
      gpu::store_row(dx, first, args.classes, args.whole, values[u]);
    }
  }
}

/// Forward and gradient in one: the first `held` packs of a block's row lie in shared memory, thread t
/// holding the packs t, t + kThreads, ... that it alone reads and writes, so no barrier is needed but for the
/// sums. As soon as a pack's gradient is written, the next row's pack is on its way to its place. Packs
/// beyond (of rows longer than shared memory, or not aligned) are read twice, the second time mostly from L2.
template <class T, int kThreads, bool kSmooth>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    cross_entropy_in_place(CrossEntropyRows<T> args, T* logits, LossSink sink, int held, float on, float off,
                           const float* dloss) {
  constexpr int kPack = gpu::kPackOf<T>, kGroups = 4;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[gpu::kWarp];
  using Pack = gpu::Pack<T, kPack>;
  Pack* const kept = reinterpret_cast<Pack*>(shared);
  const auto base = uint32_t(__cvta_generic_to_shared(shared));
  const int rank = int(threadIdx.x), full = int(args.classes / kPack);  // packs that lie inside the row
  const int group = (held + kThreads * kGroups - 1) / (kThreads * kGroups) * kThreads;  // packs of a group
  gpu::wait_and_launch_dependents();
  const float g = (dloss ? *dloss : 1.0f) / (sink.mean ? *sink.count : 1.0f);
  const auto fetch = [&](const T* x, int pack) {
    if (pack < full) {
      gpu::cp_async_16(base + uint32_t(pack) * 16, x + pack * kPack, true);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        kept[pack].at[i] = pack * kPack + i < args.classes ? x[pack * kPack + i] : T(-INFINITY);
    }
  };
  const auto live_row = [&](int64_t row) {
    if (row >= args.rows) return false;
    const int64_t target = args.targets[row];
    return args.counts(target) && args.valid(target);
  };
  double sum = 0;
  int64_t row = blockIdx.x;
  const bool begins = live_row(row);
#pragma unroll
  for (int part = 0; part < kGroups; ++part) {
    const int end = min(held, (part + 1) * group);
    for (int pack = part * group + rank; begins && pack < end; pack += kThreads)
      fetch(logits + row * args.stride, pack);
    gpu::cp_async_commit();
  }
  for (; row < args.rows; row += gridDim.x) {
    const int64_t target = args.targets[row], next = row + gridDim.x;
    const bool counts = args.counts(target), live = counts && args.valid(target), ahead = live_row(next);
    T* const x = logits + row * args.stride;
    const T* const next_x = logits + (ahead ? next * args.stride : 0);
    float top = 0, log_sum = 0, loss = counts ? __int_as_float(0x7FC00000) : 0.0f;
    if (live) {
      const float chosen = float(x[target]), first = kSmooth ? float(x[0]) : 0.0f,
                  origin = isinf(first) ? 0.0f : first;
      RowSums<T, kSmooth> sums;
#pragma unroll 1
      for (int64_t at = (int64_t(held) + rank) * kPack; at < args.classes; at += kThreads * kPack) {
        float values[kPack];
        gpu::load_row(values, x, at, args.classes, args.whole, -INFINITY);
        sums.add(values, args.classes - at < kPack ? int(args.classes - at) : kPack, origin);
      }
#pragma unroll
      for (int part = 0; part < kGroups; ++part) {
        if (part == 0) gpu::cp_async_wait<3>();
        if (part == 1) gpu::cp_async_wait<2>();
        if (part == 2) gpu::cp_async_wait<1>();
        if (part == 3) gpu::cp_async_wait<0>();
        const int end = min(held, (part + 1) * group);
#pragma unroll 2
        for (int pack = part * group + rank; pack < end; pack += kThreads) {
          const Pack raw = kept[pack];
          float values[kPack];
#pragma unroll
          for (int i = 0; i < kPack; ++i) values[i] = float(raw.at[i]);
          sums.add(values, pack < full ? kPack : int(args.classes - int64_t(full) * kPack), origin);
        }
      }
      sums.template join<kThreads>(scratch);  // also: every thread has read the target's logit
      log_sum = logf(sums.sum);
      top = sums.top;
      loss = sums.loss(log_sum, chosen, origin, args.smoothing, args.classes);
    }
    if (rank == 0) sum += double(loss);
#pragma unroll
    for (int part = 0; part < kGroups; ++part) {
      const int end = min(held, (part + 1) * group);
#pragma unroll 2
      for (int pack = part * group + rank; pack < end; pack += kThreads) {
        float values[kPack];
        if (live) {
          const Pack raw = kept[pack];
#pragma unroll
          for (int i = 0; i < kPack; ++i) values[i] = float(raw.at[i]);
          row_gradient<T>(values, top, log_sum, g, on, off, int64_t(pack) * kPack, target);
        } else {
#pragma unroll
          for (int i = 0; i < kPack; ++i) values[i] = loss;
        }
        gpu::store_row(x, int64_t(pack) * kPack, args.classes, true, values);
        if (ahead) fetch(next_x, pack);
      }
      gpu::cp_async_commit();
    }
#pragma unroll 1
    for (int64_t at = (int64_t(held) + rank) * kPack; at < args.classes; at += kThreads * kPack) {
      float values[kPack];
      if (live) {
        gpu::load_row(values, x, at, args.classes, args.whole, 0.0f);
        row_gradient<T>(values, top, log_sum, g, on, off, at, target);
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i) values[i] = loss;
      }
      gpu::store_row(x, at, args.classes, args.whole, values);
    }
  }
  sum_losses(sink, sum, 0);
}

/// Gradients for a dloss of *made_for (null: 1) become those for *dloss.
template <class T>
__global__ void __launch_bounds__(256)
    cross_entropy_scale(T* dlogits, int64_t stride, int64_t rows, int64_t classes, bool whole,
                        const float* dloss, const float* made_for) {
  constexpr int kPack = gpu::kPackOf<T>;
  gpu::wait_and_launch_dependents();
  const float g = made_for ? *dloss / *made_for : *dloss;
  if (g == 1.0f) return;
  const int64_t packs_per_row = gpu::ceil_div(classes, kPack);
  for (int64_t at = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; at < rows * packs_per_row;
       at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = at / packs_per_row, first = (at - row * packs_per_row) * kPack;
    float values[kPack];
    gpu::load_row(values, dlogits + row * stride, first, classes, whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] *= g;
    gpu::store_row(dlogits + row * stride, first, classes, whole, values);
  }
}

}  // namespace tessera::ops
