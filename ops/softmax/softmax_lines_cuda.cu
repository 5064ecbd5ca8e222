#include <bit>

#include "ops/softmax/softmax_math.cuh"

/// Along a dimension that is not the last: one read and one write an element forward, two reads and one write
/// backward, bound by memory. A thread has a unit of neighbouring lines, a pack of 16 bytes where all
/// operands are aligned for it, else one, so that neighbouring threads read neighbouring memory. `parts`
/// threads of a block share a line, its elements alternating: as many as it takes for each to keep its
/// elements in registers, and more where units are few. Longer lines are read twice, in batches.

namespace tessera::ops::softmax_detail {
namespace {

/// Lines a thread holds, the threads of a block, the blocks that should share an SM (forward,
/// backward), the elements of a line that stay in a thread's registers and that are read at once where they
/// do not. No more of either: each is code that a short launch must fetch.
template <class T, bool kPacked>
struct Unit {
  static constexpr int lines = kPacked ? kPackOf<T> : 1, block = 256, blocks = kPacked ? 3 : 4,
                       blocks_backward = kPacked ? 2 : 4, held = kPacked ? 8 : 16, ahead = kPacked ? 4 : 8;
};

/// How lines are assigned: `parts` threads, a power of two, share a unit, block / parts units belong to a
/// block; a run of `inner` neighbouring lines has `units_of_run` units.
struct Schedule {
  int64_t units, inner, units_of_run;
  int parts;
};

/// One element of each of a thread's lines, as it is in memory.
template <class T, int kLines>
using Element = std::conditional_t<kLines == 1, T, Words<T>>;

template <class T>
__device__ __forceinline__ void fetch(T& to, const T* from) {
  to = *from;
}
template <class T>
__device__ __forceinline__ void fetch(Words<T>& to, const T* from) {
  to = gpu::load_words(from);
}
template <class T>
__device__ __forceinline__ void spread(float (&values)[1], const T& from) {
  values[0] = float(from);
}
template <class T>
__device__ __forceinline__ void spread(float (&values)[kPackOf<T>], const Words<T>& from) {
  gpu::unpack(values, from);
}
/// Writes the first `count` of the values.
template <class T>
__device__ __forceinline__ void put(T* to, const float (&values)[1], int) {
  *to = T(values[0]);
}
template <class T>
__device__ __forceinline__ void put(T* to, const float (&values)[kPackOf<T>], int count) {
  const Words<T> words = gpu::round_to_words<T>(values);
  if (count == kPackOf<T>) {
    gpu::store_words(to, words);
  } else {
    gpu::store_tail(to, words, count);
  }
}

/// A thread's unit and its part of the unit's lines.
template <int N, int kLines, int kBlock>
struct Own {
  int64_t at[N];
  int64_t length;
  int count;  // lines of the unit; 0 if it does not exist
  int part, parts;
  int lanes, warps;  // units side by side in a warp, and warps that share them

  __device__ __forceinline__ Own(const Lines<N>& lines, const Schedule& schedule) {
    const int units = kBlock / schedule.parts, warp = int(threadIdx.x) / kWarp,
              lane = int(threadIdx.x) % kWarp;
    lanes = min(units, kWarp);
    parts = schedule.parts;
    warps = parts * lanes / kWarp;
    part = warp % warps * (kWarp / lanes) + lane / lanes;
    const int64_t unit = blockIdx.x * int64_t(units) + warp / warps * lanes + lane % lanes;
    length = lines.length;
    const bool exists = unit < schedule.units;
    int64_t run = 0;
    if (exists)  // a division of 64 bits is a hundred instructions
      run = schedule.units <= 0xFFFFFFFF ? int64_t(uint32_t(unit) / uint32_t(schedule.units_of_run))
                                         : unit / schedule.units_of_run;
    const int64_t first = exists ? (unit - run * schedule.units_of_run) * kLines : 0;
    count = exists ? int(min(schedule.inner - first, int64_t(kLines))) : 0;
    const auto& starts = lines.starts;
    for (int n = 0; n < N; ++n) at[n] = first * starts.strides[n][starts.rank - 1];
    for (int d = starts.rank - 2; d >= 0; --d) {
      const int64_t outer = d > 0 ? run / starts.sizes[d] : 0, index = run - outer * starts.sizes[d];
      run = outer;
      for (int n = 0; n < N; ++n) at[n] += index * starts.strides[n][d];
    }
  }

  /// Elements of this thread's part.
  __device__ __forceinline__ int64_t elements() const {
    return count == 0 ? 0 : (length - part + parts - 1) / parts;
  }

  /// Combines the values of the threads that share the unit, line by line; each gets the result.
  template <class Op>
  __device__ __forceinline__ void combine(float (&values)[kLines], float* scratch) const {
    for (int step = kWarp / 2; step >= lanes; step /= 2)
#pragma unroll
      for (int i = 0; i < kLines; ++i)
        values[i] = Op{}(values[i], __shfl_xor_sync(0xFFFFFFFFu, values[i], step));
    if (warps == 1) return;
    const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
    __syncthreads();  // threads may still read the last result
    if (lane < lanes) write(scratch_of(scratch, warp, lane), values);
    __syncthreads();
    const int first = warp / warps * warps;
    read(values, scratch_of(scratch, first, lane % lanes));
    for (int w = 1; w < warps; ++w) {
      float others[kLines];
      read(others, scratch_of(scratch, first + w, lane % lanes));
#pragma unroll
      for (int i = 0; i < kLines; ++i) values[i] = Op{}(values[i], others[i]);
    }
  }

 private:
  static __device__ __forceinline__ float* scratch_of(float* scratch, int warp, int lane) {
    return scratch + (warp * kWarp + lane) * kLines;
  }
  /// 16 bytes at a time.
  static __device__ __forceinline__ void write(float* to, const float (&from)[kLines]) {
    if constexpr (kLines == 1) {
      *to = from[0];
    } else {
#pragma unroll
      for (int i = 0; i < kLines; i += 4)
        *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    }
  }
  static __device__ __forceinline__ void read(float (&to)[kLines], const float* from) {
    if constexpr (kLines == 1) {
      to[0] = *from;
    } else {
#pragma unroll
      for (int i = 0; i < kLines; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
      }
    }
  }
};

template <class T, bool kLog, bool kPacked>
__global__ void __launch_bounds__(Unit<T, kPacked>::block, Unit<T, kPacked>::blocks)
    forward_resident(Lines<2> lines, Schedule schedule, T* y, const T* x) {
  using S = Unit<T, kPacked>;
  constexpr int kLines = S::lines, kHeld = S::held;
  __shared__ __align__(16) float scratch[S::block * kLines];
  const Own<2, kLines, S::block> own(lines, schedule);
  const int64_t elements = own.elements();
  x += own.at[1] + own.part * lines.strides[1];
  y += own.at[0] + own.part * lines.strides[0];
  Element<T, kLines> share[kHeld];
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    if (n >= elements) break;
    fetch(share[n], x + n * (own.parts * lines.strides[1]));
  }
  float top[kLines], sum[kLines] = {}, values[kLines];
#pragma unroll
  for (int i = 0; i < kLines; ++i) top[i] = Max::kIdentity;
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    if (n >= elements) break;
    spread(values, share[n]);
#pragma unroll
    for (int i = 0; i < kLines; ++i) top[i] = Max{}(top[i], values[i]);
  }
  own.template combine<Max>(top, scratch);
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    if (n >= elements) break;
    spread(values, share[n]);
#pragma unroll
    for (int i = 0; i < kLines; ++i) sum[i] += exponential<T>(values[i] - top[i]);
  }
  own.template combine<Sum>(sum, scratch);
#pragma unroll
  for (int i = 0; i < kLines; ++i) sum[i] = kLog ? logf(sum[i]) : 1.0f / sum[i];
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    if (n >= elements) break;
    spread(values, share[n]);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const float shifted = values[i] - top[i];
      values[i] = kLog ? shifted - sum[i] : exponential<T>(shifted) * sum[i];
    }
    put(y + n * (own.parts * lines.strides[0]), values, own.count);
  }
}

template <class T, bool kLog, bool kPacked>
__global__ void __launch_bounds__(Unit<T, kPacked>::block)
    forward_long(Lines<2> lines, Schedule schedule, T* y, const T* x) {
  using S = Unit<T, kPacked>;
  constexpr int kLines = S::lines, kAhead = S::ahead;
  __shared__ __align__(16) float scratch[S::block * kLines];
  const Own<2, kLines, S::block> own(lines, schedule);
  const int64_t elements = own.elements(), step = own.parts * lines.strides[1];
  x += own.at[1] + own.part * lines.strides[1];
  y += own.at[0] + own.part * lines.strides[0];
  Element<T, kLines> share[kAhead];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (first + n < elements) fetch(share[n], x + (first + n) * step);
  };
  RunningSoftmax part[kLines];
  for (int64_t first = 0; first < elements; first += kAhead) {
    load(first);
    float all[kLines][kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      float values[kLines];
      spread(values, share[n]);
#pragma unroll
      for (int i = 0; i < kLines; ++i) all[i][n] = first + n < elements ? values[i] : Max::kIdentity;
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) part[i].add(all[i]);
  }
  float top[kLines], sum[kLines];
#pragma unroll
  for (int i = 0; i < kLines; ++i) top[i] = part[i].top;
  own.template combine<Max>(top, scratch);
#pragma unroll
  for (int i = 0; i < kLines; ++i)
    sum[i] = part[i].top == Max::kIdentity ? 0.0f : part[i].sum * expf(part[i].top - top[i]);
  own.template combine<Sum>(sum, scratch);
#pragma unroll
  for (int i = 0; i < kLines; ++i) sum[i] = kLog ? logf(sum[i]) : 1.0f / sum[i];
  for (int64_t first = 0; first < elements; first += kAhead) {
    load(first);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (first + n >= elements) break;
      float values[kLines];
      spread(values, share[n]);
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const float shifted = values[i] - top[i];
        values[i] = kLog ? shifted - sum[i] : exponential<T>(shifted) * sum[i];
      }
      put(y + (first + n) * own.parts * lines.strides[0], values, own.count);
    }
  }
}

/// kHolds: the lines stay in registers.
template <class T, bool kLog, bool kPacked, bool kHolds>
__global__ void __launch_bounds__(Unit<T, kPacked>::block, Unit<T, kPacked>::blocks_backward)
    backward_kernel(Lines<3> lines, Schedule schedule, T* dx, const T* dy, const T* y) {
  using S = Unit<T, kPacked>;
  constexpr int kLines = S::lines, kShare = kHolds ? S::held : S::ahead;
  __shared__ __align__(16) float scratch[S::block * kLines];
  const Own<3, kLines, S::block> own(lines, schedule);
  const int64_t elements = own.elements();
  dx += own.at[0] + own.part * lines.strides[0];
  dy += own.at[1] + own.part * lines.strides[1];
  y += own.at[2] + own.part * lines.strides[2];
  Element<T, kLines> grads[kShare], results[kShare];
  float sum[kLines] = {};
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      if (first + n >= elements) break;
      fetch(grads[n], dy + (first + n) * own.parts * lines.strides[1]);
      fetch(results[n], y + (first + n) * own.parts * lines.strides[2]);
    }
  };
  const auto add = [&](int64_t first) {
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      if (first + n >= elements) break;
      float grad[kLines], result[kLines];
      spread(grad, grads[n]);
      spread(result, results[n]);
#pragma unroll
      for (int i = 0; i < kLines; ++i) sum[i] += kLog ? grad[i] : result[i] * grad[i];
    }
  };
  const auto write = [&](int64_t first) {
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      if (first + n >= elements) break;
      float grad[kLines], result[kLines];
      spread(grad, grads[n]);
      spread(result, results[n]);
#pragma unroll
      for (int i = 0; i < kLines; ++i) grad[i] = slope<T, kLog>(grad[i], result[i], sum[i]);
      put(dx + (first + n) * own.parts * lines.strides[0], grad, own.count);
    }
  };
  if constexpr (kHolds) {
    load(0);
    add(0);
    own.template combine<Sum>(sum, scratch);
    write(0);
  } else {
    for (int64_t first = 0; first < elements; first += kShare) load(first), add(first);
    own.template combine<Sum>(sum, scratch);
    for (int64_t first = 0; first < elements; first += kShare) load(first), write(first);
  }
}

/// Whether packs of neighbouring lines lie as such in all tensors, whose elements begin at `data`.
template <class T, int N>
bool packed(const Lines<N>& lines, const T* const (&data)[N]) {
  const int inner = lines.starts.rank - 1;
  bool fits = lines.starts.sizes[inner] >= kPackOf<T>;
  for (int n = 0; n < N; ++n) {
    fits = fits && lines.starts.strides[n][inner] == 1 &&
           gpu::is_pack_aligned(data[n], lines.strides[n], kPackOf<T>);
    for (int d = 0; d < inner; ++d) fits = fits && lines.starts.strides[n][d] % kPackOf<T> == 0;
  }
  return fits;
}

/// Parts: as many as keep a line in the registers of its threads, then as many as occupy the GPU, as long as
/// neighbouring threads still share 64 bytes where the lines allow that.
template <int N>
Schedule schedule(const Lines<N>& lines, int lines_of_unit, int block, int held, int multiprocessors) {
  Schedule d;
  d.inner = lines.starts.sizes[lines.starts.rank - 1];
  d.units_of_run = ceil_div(d.inner, lines_of_unit);
  d.units = lines.starts.count / d.inner * d.units_of_run;
  const uint64_t beside = std::bit_ceil(uint64_t(std::min<int64_t>(d.units_of_run, block)));
  const int64_t most = block / int64_t(std::min<uint64_t>(beside, lines_of_unit > 1 ? 4 : 32));
  int64_t parts = 1;
  while (parts < most && parts * held < lines.length) parts *= 2;
  while (parts < most && parts * 8 <= lines.length && d.units * parts < int64_t(multiprocessors) * 1024)
    parts *= 2;
  d.parts = int(parts);
  return d;
}

/// Calls launch<kPacked>(deal, whether the lines are held).
template <class T, int N, class Launch>
void with_schedule(const Lines<N>& lines, const T* const (&data)[N], Device device, Launch&& launch) {
  const auto go = [&]<bool kPacked>() {
    using S = Unit<T, kPacked>;
    const Schedule d = schedule(lines, S::lines, S::block, S::held, device.multiprocessors());
    const dim3 grid = gpu::grid_of(ceil_div(d.units, S::block / d.parts));
    launch.template operator()<kPacked>(gpu::LaunchShape{grid, S::block}, d,
                                        int64_t(d.parts) * S::held >= lines.length);
  };
  packed<T>(lines, data) ? go.template operator()<true>() : go.template operator()<false>();
}

template <class T, bool kLog>
void forward(const Tensor& y, const Tensor& x, int dim) {
  const auto lines = lines_along(dim, y, x);
  with_schedule<T>(lines, {y.data<T>(), x.data<T>()}, y.device(),
                   [&]<bool kPacked>(gpu::LaunchShape shape, const Schedule& d, bool holds) {
                     gpu::launch(y.device(), shape,
                                 holds ? forward_resident<T, kLog, kPacked> : forward_long<T, kLog, kPacked>,
                                 lines, d, y.data<T>(), x.data<T>());
                   });
}

template <class T, bool kLog>
void backward(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim) {
  const auto lines = lines_along(dim, dx, dy, y);
  with_schedule<T>(lines, {dx.data<T>(), dy.data<T>(), y.data<T>()}, dx.device(),
                   [&]<bool kPacked>(gpu::LaunchShape shape, const Schedule& d, bool holds) {
                     gpu::launch(dx.device(), shape,
                                 holds ? backward_kernel<T, kLog, kPacked, true>
                                       : backward_kernel<T, kLog, kPacked, false>,
                                 lines, d, dx.data<T>(), dy.data<T>(), y.data<T>());
                   });
}

}  // namespace

template <class T>
void forward_lines(const Tensor& y, const Tensor& x, int dim, bool log) {
  log ? forward<T, true>(y, x, dim) : forward<T, false>(y, x, dim);
}
template <class T>
void backward_lines(const Tensor& dx, const Tensor& dy, const Tensor& y, int dim, bool log) {
  log ? backward<T, true>(dx, dy, y, dim) : backward<T, false>(dx, dy, y, dim);
}

template void forward_lines<float>(const Tensor&, const Tensor&, int, bool);
template void forward_lines<bf16>(const Tensor&, const Tensor&, int, bool);
template void forward_lines<f16>(const Tensor&, const Tensor&, int, bool);
template void backward_lines<float>(const Tensor&, const Tensor&, const Tensor&, int, bool);
template void backward_lines<bf16>(const Tensor&, const Tensor&, const Tensor&, int, bool);
template void backward_lines<f16>(const Tensor&, const Tensor&, const Tensor&, int, bool);

}  // namespace tessera::ops::softmax_detail
