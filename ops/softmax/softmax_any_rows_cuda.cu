#include "ops/softmax/softmax_math.cuh"

/// Rows that start anywhere, such as those of a tensor whose last dimensions have one element (their rows lie
/// densely, whatever their width), and narrow rows. One read and one write an element: bound by memory. A row
/// is seen from the 16 bytes before its start: packs that hold some of it are read whole, what is not its own
/// counts as nothing, and only its own is written. All operands' rows must lie alike.
///
/// Rows of up to 256 columns belong to 2, 4, ... 32 lanes of one pack each, so that a warp reads up to 16
/// rows at once; then to a warp, a block of 256 and one of 1024. Longer ones are read twice by a block.

namespace tessera::ops::softmax_detail {
namespace {

using gpu::column_of;
using gpu::for_chunks;

constexpr int kLongBlock = 512;  // of rows that are read in pieces
constexpr int kChunkSteps = 2;   // words a thread holds of a piece

/// How many elements of the 16 bytes at `row` lie before it.
template <class T>
__device__ __forceinline__ int lead_of(const T* row) {
  return int(reinterpret_cast<uintptr_t>(row) / sizeof(T)) & (kPackOf<T> - 1);
}

/// The words of a thread's share that hold elements before `end`.
template <int kThreads, int kSteps, class T>
__device__ __forceinline__ void load(Words<T> (&share)[kSteps], const T* from, int rank, int end) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int first = column_of<T, kThreads>(s, rank);
    share[s] = {};
    if (first < end) share[s] = gpu::load_words(from + first);
  }
}

/// The values of a share; `fill` outside [begin, end).
template <int kThreads, int kSteps, class T>
__device__ __forceinline__ void unpack(float (&values)[kSteps][kPackOf<T>], const Words<T> (&share)[kSteps],
                                       int rank, int begin, int end, float fill) {
  constexpr int kPack = kPackOf<T>;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    gpu::unpack(values[s], share[s]);
    const int first = column_of<T, kThreads>(s, rank);
    if (first < begin || first + kPack > end)
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        if (first + i < begin || first + i >= end) values[s][i] = fill;
  }
}

/// The same in place, with zeros: of gradients, which are summed.
template <int kThreads, int kSteps, class T>
__device__ __forceinline__ void clear_outside(Words<T> (&share)[kSteps], int rank, int begin, int end) {
  float values[kSteps][kPackOf<T>];
  unpack<kThreads>(values, share, rank, begin, end, 0.0f);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int first = column_of<T, kThreads>(s, rank);
    if (first < begin || end < first + kPackOf<T>) share[s] = gpu::round_to_words<T>(values[s]);
  }
}

template <int kThreads, int kSteps, class T>
__device__ __forceinline__ void store(T* to, const Words<T> (&share)[kSteps], int rank, int begin, int end) {
  constexpr int kPack = kPackOf<T>;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int first = column_of<T, kThreads>(s, rank);
    if (first >= end) continue;
    if (first >= begin && first + kPack <= end) {
      gpu::store_words(to + first, share[s]);
    } else if (first >= begin) {
      gpu::store_tail(to + first, share[s], end - first);
    } else {
      float values[kPack];
      gpu::unpack(values, share[s]);
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        if (first + i >= begin && first + i < end) to[first + i] = T(values[i]);
    }
  }
}

/// Combines the values of the threads that share a row: a part of a warp, a warp or the block.
template <class Op, int kThreads>
__device__ __forceinline__ float reduce(float value, float* scratch) {
  if constexpr (kThreads <= kWarp) {
    return gpu::warp_reduce<Op, kThreads>(value);
  } else {
    return gpu::block_reduce<Op>(value, scratch);
  }
}

/// A thread's row; threads past the last row walk along with that and write nothing.
template <int kThreads>
struct OwnRow {
  int64_t row;
  bool live;

  __device__ __forceinline__ explicit OwnRow(int64_t rows) {
    row = gpu::first_row<kThreads>();
    live = row < rows;
    if (!live) row = rows - 1;
  }
};

template <class T, bool kLog, int kThreads, int kSteps, int kBlock>
__global__ void __launch_bounds__(kBlock) forward_any(Rows<T> args) {
  constexpr int kPack = kPackOf<T>;
  __shared__ float scratch[kWarp];
  const OwnRow<kThreads> own(args.rows);
  const int rank = int(threadIdx.x) % kThreads;
  const T* const row = args.a + own.row * args.a_stride;
  const int begin = lead_of(row), end = begin + int(args.width);
  Words<T> share[kSteps];
  load<kThreads>(share, row - begin, rank, end);
  float values[kSteps][kPack], top = Max::kIdentity, sum = 0;
  unpack<kThreads>(values, share, rank, begin, end, Max::kIdentity);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i) top = Max{}(top, values[s][i]);
  top = reduce<Max, kThreads>(top, scratch);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float shifted = values[s][i] - top, e = exponential<T>(shifted);
      sum += e;
      values[s][i] = kLog ? shifted : e;
    }
  sum = reduce<Sum, kThreads>(sum, scratch);
  const float log_sum = logf(sum), inverse = 1.0f / sum;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[s][i] = kLog ? values[s][i] - log_sum : values[s][i] * inverse;
    share[s] = gpu::round_to_words<T>(values[s]);
  }
  if (own.live) store<kThreads>(args.to + own.row * args.to_stride - begin, share, rank, begin, end);
}

template <class T, bool kLog, int kThreads, int kSteps, int kBlock>
__global__ void __launch_bounds__(kBlock) backward_any(Rows<T> args) {
  __shared__ float scratch[kWarp];
  const OwnRow<kThreads> own(args.rows);
  const int rank = int(threadIdx.x) % kThreads;
  const T* const row = args.a + own.row * args.a_stride;
  const int begin = lead_of(row), end = begin + int(args.width);
  Words<T> grads[kSteps], results[kSteps];
  load<kThreads>(grads, row - begin, rank, end);
  load<kThreads>(results, args.b + own.row * args.b_stride - begin, rank, end);
  clear_outside<kThreads>(grads, rank, begin, end);
  clear_outside<kThreads>(results, rank, begin, end);
  const float sum = reduce<Sum, kThreads>(sum_of<kLog>(grads, results), scratch);
  slopes<kLog>(grads, results, sum);
  if (own.live) store<kThreads>(args.to + own.row * args.to_stride - begin, grads, rank, begin, end);
}

/// visit(base, begin, end) for the pieces of a row whose first element is `lead` after its first 16 bytes.
template <int kChunk, class Visit>
__device__ __forceinline__ void for_spans(int lead, int64_t width, Visit&& visit) {
  for_chunks<kChunk>(lead + width,
                     [&](int64_t base, int columns) { visit(base, base == 0 ? lead : 0, columns); });
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kLongBlock) forward_any_long(Rows<T> args) {
  constexpr int kPack = kPackOf<T>, kChunk = kLongBlock * kChunkSteps * kPack;
  __shared__ float scratch[kWarp];
  const int64_t own = blockIdx.x;
  const int rank = int(threadIdx.x), lead = lead_of(args.a + own * args.a_stride);
  const T* const from = args.a + own * args.a_stride - lead;
  T* const to = args.to + own * args.to_stride - lead;
  Words<T> share[kChunkSteps];
  float values[kChunkSteps][kPack];
  RunningSoftmax running;
  for_spans<kChunk>(lead, args.width, [&](int64_t base, int begin, int end) {
    load<kLongBlock>(share, from + base, rank, end);
    unpack<kLongBlock>(values, share, rank, begin, end, Max::kIdentity);
#pragma unroll
    for (int s = 0; s < kChunkSteps; ++s) running.add(values[s]);
  });
  running = running.reduce_row<kLongBlock>(scratch);
  const float log_sum = logf(running.sum), inverse = 1.0f / running.sum;
  for_spans<kChunk>(lead, args.width, [&](int64_t base, int begin, int end) {
    load<kLongBlock>(share, from + base, rank, end);
    unpack<kLongBlock>(values, share, rank, begin, end, Max::kIdentity);
#pragma unroll
    for (int s = 0; s < kChunkSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float shifted = values[s][i] - running.top;
        values[s][i] = kLog ? shifted - log_sum : exponential<T>(shifted) * inverse;
      }
      share[s] = gpu::round_to_words<T>(values[s]);
    }
    store<kLongBlock>(to + base, share, rank, begin, end);
  });
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kLongBlock) backward_any_long(Rows<T> args) {
  constexpr int kChunk = kLongBlock * kChunkSteps * kPackOf<T>;
  __shared__ float scratch[kWarp];
  const int64_t own = blockIdx.x;
  const int rank = int(threadIdx.x), lead = lead_of(args.a + own * args.a_stride);
  Words<T> grads[kChunkSteps], results[kChunkSteps];
  const auto load_chunk = [&](int64_t base, int begin, int end) {
    load<kLongBlock>(grads, args.a + own * args.a_stride - lead + base, rank, end);
    load<kLongBlock>(results, args.b + own * args.b_stride - lead + base, rank, end);
    clear_outside<kLongBlock>(grads, rank, begin, end);
    clear_outside<kLongBlock>(results, rank, begin, end);
  };
  float sum = 0;
  for_spans<kChunk>(lead, args.width, [&](int64_t base, int begin, int end) {
    load_chunk(base, begin, end);
    sum += sum_of<kLog>(grads, results);
  });
  sum = gpu::block_reduce<Sum>(sum, scratch);
  for_spans<kChunk>(lead, args.width, [&](int64_t base, int begin, int end) {
    load_chunk(base, begin, end);
    slopes<kLog>(grads, results, sum);
    store<kLongBlock>(args.to + own * args.to_stride - lead + base, grads, rank, begin, end);
  });
}

/// How many threads hold a row, and how many words each.
template <class T, int kThreads, int kColumns>
struct Resident {
  static constexpr int threads = kThreads, steps = kColumns / kPackOf<T>,
                       block = kThreads <= kWarp ? 128 : kThreads;
  static dim3 grid(const Rows<T>& rows) {
    return gpu::grid_of(ceil_div(rows.rows, gpu::rows_at_once<kThreads>(block)));
  }
};

/// Calls `resident(Resident)` or `longer()`, by where a row and what lies before its start fit.
template <class T, class OfResident, class Longer>
void by_width(const Rows<T>& rows, OfResident&& resident, Longer&& longer) {
  const int64_t width =
      rows.width + (gpu::is_pack_aligned(rows.to, rows.to_stride, kPackOf<T>) ? 0 : kPackOf<T> - 1);
  if (width <= 16) {
    resident(Resident<T, 2, 8>{});
  } else if (width <= 32) {
    resident(Resident<T, 4, 8>{});
  } else if (width <= 64) {
    resident(Resident<T, 8, 8>{});
  } else if (width <= 128) {
    resident(Resident<T, 16, 8>{});
  } else if (width <= 256) {
    resident(Resident<T, kWarp, 8>{});
  } else if (width <= 1024) {
    resident(Resident<T, kWarp, 32>{});
  } else if (width <= 8192) {
    resident(Resident<T, 256, 32>{});
  } else if (width <= 16384) {
    resident(Resident<T, 1024, 16>{});
  } else {
    longer();
  }
}

template <class T, bool kLog>
void forward(Device device, const Rows<T>& rows) {
  by_width(
      rows,
      [&]<class H>(H) {
        gpu::launch(device, {H::grid(rows), H::block}, forward_any<T, kLog, H::threads, H::steps, H::block>,
                    rows);
      },
      [&] {
        gpu::launch(device, {gpu::grid_of(rows.rows), kLongBlock}, forward_any_long<T, kLog>, rows);
      });
}

template <class T, bool kLog>
void backward(Device device, const Rows<T>& rows) {
  by_width(
      rows,
      [&]<class H>(H) {
        gpu::launch(device, {H::grid(rows), H::block}, backward_any<T, kLog, H::threads, H::steps, H::block>,
                    rows);
      },
      [&] {
        gpu::launch(device, {gpu::grid_of(rows.rows), kLongBlock}, backward_any_long<T, kLog>, rows);
      });
}

}  // namespace

template <class T>
void forward_any_rows(Device device, const Rows<T>& rows, bool log) {
  log ? forward<T, true>(device, rows) : forward<T, false>(device, rows);
}
template <class T>
void backward_any_rows(Device device, const Rows<T>& rows, bool log) {
  log ? backward<T, true>(device, rows) : backward<T, false>(device, rows);
}

template void forward_any_rows(Device, const Rows<float>&, bool);
template void forward_any_rows(Device, const Rows<bf16>&, bool);
template void forward_any_rows(Device, const Rows<f16>&, bool);
template void backward_any_rows(Device, const Rows<float>&, bool);
template void backward_any_rows(Device, const Rows<bf16>&, bool);
template void backward_any_rows(Device, const Rows<f16>&, bool);

}  // namespace tessera::ops::softmax_detail
