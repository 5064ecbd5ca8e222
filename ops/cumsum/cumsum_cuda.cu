#include <algorithm>

#include "gpu/elementwise.cuh"
#include "gpu/grid.cuh"
#include "ops/cumsum/cumsum_kernels.h"

/// Running sums on a GPU: one read of x and one write of y, bound by memory.
///
///   rows     The lines are innermost in memory, and not short. A warp takes a line, 32 words of 16 bytes in
///            each round: each lane adds up its own elements, a scan over the lanes gives what lies before
///            them, and a carry what earlier rounds had.
///   columns  A dimension that stays is innermost, or lines are short: a thread takes a line, its neighbours
///            the next ones.
/// If few lines would leave most of the GPU idle, each is cut into chunks: a first launch sums every chunk, a
/// second one makes running sums of these (by rows), and the main one begins each chunk with them. x is read
/// twice then.
///
/// Sums are f64, as on the CPU: a long sum that cancels stays right. Additions in f64 stay below what memory
/// takes, conversions do not (16 per clock and SM), so of 16-bit numbers the running sums within a word are
/// f32, and what lies before it, from f64, is added as two f32: off by 2^-23 of the larger of both at most.
/// Cuts and orders are functions of the shape alone.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / gpu::kWarp;
constexpr int64_t kTargetWarps = 8192;                              // 64 on each of about 128 SMs
constexpr int64_t kTargetThreads = 1 << 17;                         // by columns: half of what the GPU holds
constexpr int64_t kRowChunk = 4096, kColumnChunk = 64;              // least elements of a chunk
constexpr int64_t kMostRowChunks = 1024, kMostColumnChunks = 8192;  // of a line: one warp scans their sums

/// What a launch works on: chunk c of a line has its elements c chunk_length ... (c + 1) chunk_length - 1.
struct Work {
  Lines lines;
  int64_t chunks = 1, chunk_length = 0;
  bool packs = false;  // rows: read and written by words
};

bool by_warps(const Lines& lines) {
  return lines.by_rows() && (lines.plan.kept_rank == 0 || lines.plan.length > gpu::kWarp);
}

/// Running sums within a word of elements of type T: f32 of 16-bit floats, an eighth of them, so that eight
/// do not overflow.
template <class T>
inline constexpr bool kShort = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;
template <class T>
using WordSum = std::conditional_t<kShort<T>, float, RunningSum<T>>;

template <class T>
__device__ __forceinline__ WordSum<T> word_term(T x) {
  if constexpr (kShort<T>)
    return 0.125f * float(x);
  else
    return widened(x);
}

/// What lies before a word, as it is added to the sums in it.
template <class T>
struct Before {
  RunningSum<T> sum;
  template <class Y>
  __device__ __forceinline__ Y plus(WordSum<T> own) const {
    return rounded<Y>(own + sum);
  }
};
template <class T>
requires kShort<T>
struct Before<T> {
  float high, low;
  __device__ __forceinline__ explicit Before(double sum)
      : high(float(0.125 * sum)), low(isinf(high) ? 0.0f : float(0.125 * sum - double(high))) {}
  template <class Y>
  __device__ __forceinline__ Y plus(float own) const {
    return Y(8.0f * (high + (low + own)));
  }
};

/// What lies before this chunk of the line, in the order of the sums; `sums` [lines, chunks] are those of the
/// chunks up to each, itself included.
template <bool kReverse, class Sum>
__device__ __forceinline__ Sum sum_before(const Sum* sums, int64_t line, int64_t chunk, int64_t chunks) {
  const int64_t before = kReverse ? chunk + 1 : chunk - 1;
  return sums && before >= 0 && before < chunks ? sums[line * chunks + before] : Sum(0);
}

template <bool kReverse, class T, class Y>
__global__ void __launch_bounds__(kThreads)
    scan_rows(const Work work, const T* x, Y* y, const RunningSum<T>* sums) {
  using Sum = RunningSum<T>;
  constexpr int kPack = gpu::kPackOf<T>;
  constexpr unsigned kAll = 0xFFFFFFFFu;
  gpu::wait_and_launch_dependents();
  const ReducePlan& plan = work.lines.plan;
  const int lane = int(threadIdx.x) % gpu::kWarp;
  const int64_t x_stride = plan.reduced_x[0], y_stride = work.lines.y_stride;
  const int64_t units = plan.outputs * work.chunks;
  for (int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / gpu::kWarp; unit < units;
       unit += int64_t(gridDim.x) * kWarps) {
    const int64_t line = ReducePlan::quotient(unit, work.chunks), chunk = unit - line * work.chunks;
    int64_t x_offset, y_offset;
    plan.offsets(line, x_offset, y_offset);
    const int64_t begin = chunk * work.chunk_length;
    const int64_t end = begin + work.chunk_length < plan.length ? begin + work.chunk_length : plan.length;
    const int64_t rounds = gpu::ceil_div(end - begin, gpu::kWarp * kPack);
    Sum carry = sum_before<kReverse>(sums, line, chunk, work.chunks);
    const auto first_of = [&](int64_t round) {
      return begin + ((kReverse ? rounds - 1 - round : round) * gpu::kWarp + lane) * kPack;
    };
    const auto is_whole = [&](int64_t first) { return work.packs && end - first >= kPack; };
    gpu::PackedWords<T, kPack> next;
    const auto load = [&](int64_t round) {
      const int64_t first = first_of(round);
      if (round < rounds && is_whole(first))
        next = gpu::load_partial_pack<kPack>(x + x_offset + first, kPack);
    };
    load(0);
    for (int64_t round = 0; round < rounds; ++round) {
      const int64_t first = first_of(round);
      const int64_t left = end - first;  // 0 or less: nothing for this lane
      const bool whole = is_whole(first);
      WordSum<T> values[kPack];  // own elements, then their running sums
      if (whole) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) values[k] = word_term(next[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kPack; ++k)
          values[k] = k < left ? word_term(x[x_offset + (first + k) * x_stride]) : WordSum<T>(0);
      }
      load(round + 1);
#pragma unroll
      for (int k = 1; k < kPack; ++k) {
        if constexpr (kReverse)
          values[kPack - 1 - k] += values[kPack - k];
        else
          values[k] += values[k - 1];
      }
      Sum through = Sum(values[kReverse ? 0 : kPack - 1]);  // of the lanes up to this one
      if constexpr (kShort<T>) through *= 8;
#pragma unroll
      for (int step = 1; step < gpu::kWarp; step *= 2) {
        const Sum other =
            kReverse ? __shfl_down_sync(kAll, through, step) : __shfl_up_sync(kAll, through, step);
        if (kReverse ? lane + step < gpu::kWarp : lane >= step) through += other;
      }
      Sum before = kReverse ? __shfl_down_sync(kAll, through, 1) : __shfl_up_sync(kAll, through, 1);
      if (lane == (kReverse ? gpu::kWarp - 1 : 0)) before = Sum(0);
      const Before<T> all_before{before + carry};
      carry += __shfl_sync(kAll, through, kReverse ? 0 : gpu::kWarp - 1);
      if (whole) {
        gpu::Pack<Y, kPack> pack;
#pragma unroll
        for (int k = 0; k < kPack; ++k) pack.at[k] = all_before.template plus<Y>(values[k]);
        gpu::store_pack<kPack>(y + y_offset + first, pack);
      } else {
#pragma unroll
        for (int k = 0; k < kPack; ++k)
          if (k < left) y[y_offset + (first + k) * y_stride] = all_before.template plus<Y>(values[k]);
      }
    }
  }
}

/// sums [lines, chunks] = those of the chunks.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_rows(const Work work, const T* x, RunningSum<T>* sums) {
  using Sum = RunningSum<T>;
  constexpr int kPack = gpu::kPackOf<T>;
  gpu::wait_and_launch_dependents();
  const ReducePlan& plan = work.lines.plan;
  const int lane = int(threadIdx.x) % gpu::kWarp;
  const int64_t units = plan.outputs * work.chunks;
  for (int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / gpu::kWarp; unit < units;
       unit += int64_t(gridDim.x) * kWarps) {
    const int64_t line = unit / work.chunks, begin = (unit - line * work.chunks) * work.chunk_length;
    const int64_t end = begin + work.chunk_length < plan.length ? begin + work.chunk_length : plan.length;
    int64_t x_offset, y_offset;
    plan.offsets(line, x_offset, y_offset);
    Sum sum = 0;
    for (int64_t first = begin + lane * kPack; first < end; first += gpu::kWarp * kPack) {
      if (work.packs && end - first >= kPack) {
        const auto pack = gpu::load_pack<kPack>(x + x_offset + first);
#pragma unroll
        for (int k = 0; k < kPack; ++k) sum += widened(pack.at[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kPack; ++k)
          if (first + k < end) sum += widened(x[x_offset + (first + k) * plan.reduced_x[0]]);
      }
    }
    for (int step = gpu::kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (lane == 0) sums[unit] = sum;
  }
}

/// Of a thread that walks along a line: its line and chunk. Neighbouring threads have neighbouring lines.
struct ColumnUnit {
  int64_t line, chunk, begin, end, x_offset, y_offset;
  __device__ __forceinline__ ColumnUnit(const Work& work, int64_t unit) {
    const ReducePlan& plan = work.lines.plan;
    const int64_t columns = plan.kept_sizes[plan.kept_rank - 1];
    const int64_t rest = unit / columns, outer = rest / work.chunks;
    line = outer * columns + (unit - rest * columns), chunk = rest - outer * work.chunks;
    begin = chunk * work.chunk_length;
    end = begin + work.chunk_length < plan.length ? begin + work.chunk_length : plan.length;
    plan.offsets(line, x_offset, y_offset);
  }
};

template <bool kReverse, class T, class Y>
__global__ void __launch_bounds__(kThreads)
    scan_columns(const Work work, const T* x, Y* y, const RunningSum<T>* sums) {
  using Sum = RunningSum<T>;
  constexpr int kAhead = 8;  // loads in flight: no addition waits for one alone
  gpu::wait_and_launch_dependents();
  const int64_t x_stride = work.lines.plan.reduced_x[0], y_stride = work.lines.y_stride;
  const int64_t units = work.lines.plan.outputs * work.chunks;
  for (int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x; number < units;
       number += int64_t(gridDim.x) * kThreads) {
    const ColumnUnit unit(work, number);
    Sum sum = sum_before<kReverse>(sums, unit.line, unit.chunk, work.chunks);
    for (int64_t done = 0; done < unit.end - unit.begin; done += kAhead) {
      const int64_t left = unit.end - unit.begin - done;
      const int64_t first = kReverse ? unit.end - 1 - done : unit.begin + done;
      Sum values[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        values[k] =
            k < left ? widened(x[unit.x_offset + (kReverse ? first - k : first + k) * x_stride]) : Sum(0);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        sum += values[k];
        if (k < left) y[unit.y_offset + (kReverse ? first - k : first + k) * y_stride] = rounded<Y>(sum);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) sum_columns(const Work work, const T* x, RunningSum<T>* sums) {
  gpu::wait_and_launch_dependents();
  const int64_t stride = work.lines.plan.reduced_x[0];
  const int64_t units = work.lines.plan.outputs * work.chunks;
  for (int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x; number < units;
       number += int64_t(gridDim.x) * kThreads) {
    const ColumnUnit unit(work, number);
    RunningSum<T> sum = 0;
#pragma unroll 8
    for (int64_t i = unit.begin; i < unit.end; ++i) sum += widened(x[unit.x_offset + i * stride]);
    sums[unit.line * work.chunks + unit.chunk] = sum;
  }
}

gpu::LaunchShape shape_of(Device device, int64_t blocks) {
  return {gpu::grid_of(std::min<int64_t>(blocks, int64_t(device.multiprocessors()) * 32)), kThreads};
}

template <class T, class Y>
void launch_scan(Device device, const Work& work, const T* x, Y* y, const RunningSum<T>* sums, Running way) {
  const int64_t units = work.lines.plan.outputs * work.chunks;
  const auto launch = [&]<bool kReverse>() {
    if (by_warps(work.lines))
      gpu::launch_dependent(device, shape_of(device, gpu::ceil_div(units, kWarps)), scan_rows<kReverse, T, Y>,
                            work, x, y, sums);
    else
      gpu::launch_dependent(device, shape_of(device, gpu::ceil_div(units, kThreads)),
                            scan_columns<kReverse, T, Y>, work, x, y, sums);
  };
  way == Running::forward ? launch.template operator()<false>() : launch.template operator()<true>();
}

/// Cuts the lines into chunks if few of them would work.
template <class T>
void cut(Work& work) {
  const int64_t lines = work.lines.plan.outputs, length = work.lines.plan.length;
  const bool rows = by_warps(work.lines);
  const int64_t target = rows ? kTargetWarps : kTargetThreads, least = rows ? kRowChunk : kColumnChunk;
  const int64_t most = rows ? kMostRowChunks : kMostColumnChunks;
  work.chunk_length = length;
  if (lines > target / 4 || length < 2 * least) return;
  const int64_t wanted = std::min({gpu::ceil_div(length, least), gpu::ceil_div(target, lines), most});
  const int64_t unit = rows ? gpu::kWarp * gpu::kPackOf<T> : 1;  // chunks begin at whole rounds
  work.chunk_length = gpu::ceil_div(gpu::ceil_div(length, wanted), unit) * unit;
  work.chunks = gpu::ceil_div(length, work.chunk_length);
}

/// Whether every line begins at a word, and goes on to the next element, in x and in y.
template <class T, class Y>
bool fits_packs(const Lines& lines, const T* x, const Y* y) {
  constexpr int64_t kX = gpu::kPackOf<T>, kY = gpu::kPackOf<Y>;
  bool fits = lines.plan.reduced_x[0] == 1 && lines.y_stride == 1 &&
              reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
  for (int dim = 0; dim < lines.plan.kept_rank; ++dim)
    fits = fits && lines.plan.kept_x[dim] % kX == 0 && lines.plan.kept_y[dim] % kY == 0;
  return fits;
}

template <class T, class Y>
void run(Device device, const Lines& lines, const T* x, Y* y, Running way) {
  using Sum = RunningSum<T>;
  Work work{lines};
  work.packs = fits_packs(lines, x, y);
  cut<T>(work);
  if (work.chunks == 1) return launch_scan<T, Y>(device, work, x, y, nullptr, way);

  const int64_t rows = lines.plan.outputs, units = rows * work.chunks;
  const Tensor scratch = Tensor::empty_packed({rows, work.chunks}, DType::i64, device);
  auto* const sums = static_cast<Sum*>(scratch.raw());
  static_assert(sizeof(Sum) == sizeof(int64_t));
  if (by_warps(lines))
    gpu::launch_dependent(device, shape_of(device, gpu::ceil_div(units, kWarps)), sum_rows<T>, work, x, sums);
  else
    gpu::launch_dependent(device, shape_of(device, gpu::ceil_div(units, kThreads)), sum_columns<T>, work, x,
                          sums);
  Work whole{Lines(scratch.layout(), scratch.layout(), 1)};
  whole.chunk_length = work.chunks;
  launch_scan<Sum, Sum>(device, whole, sums, sums, nullptr, way);  // in place: a lane writes what it has read
  launch_scan<T, Y>(device, work, x, y, sums, way);
}

}  // namespace

void cumsum_cuda(const Tensor& y, const Tensor& x, int dim, Running way) {
  dispatch_summed<float, bf16, f16>(
      x.dtype(),
      [&]<class T, class Y>() {
        run(x.device(), Lines(x.layout(), y.layout(), dim), x.data<T>(), y.data<Y>(), way);
      },
      [&] {
        fail_at(Site::here(), "cumsum: dtype ", x.dtype(),
                " is not supported on device cuda; expected f32, bf16, f16, i64, i32 or bool");
      });
}

}  // namespace tessera::ops
