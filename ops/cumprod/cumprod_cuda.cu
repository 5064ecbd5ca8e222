#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/cumprod/cumprod_kernels.h"

/// Running products on a GPU. Both directions are scans of maps s -> add + times s: forward of products
/// alone, backward, from the end, of dy_i + x_(i+1) s. In f64, as on the CPU.
///
///   rows     The lines are innermost in memory: a warp takes a line, 32 elements per round: a scan over the
///            lanes composes the maps, and a carry holds s of the rounds before. Bound by the latency of a
///            line's rounds where there are few lines.
///   columns  A thread takes a line, its neighbours the next ones. If few lines would leave most of the GPU
///            idle, each is cut into chunks: a first launch composes the maps of every chunk, a second one
///            follows s through them, and the main one begins each chunk with its s. Cuts are a function of
///            the shape alone. Bound by memory.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / gpu::kWarp;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int64_t kTargetThreads = 1 << 17, kLeastChunk = 64;  // by columns: half of what the GPU holds

/// What step i reads: its map s -> add + times s, and what the new s is multiplied by.
template <class Number>
struct Step {
  Number times = 1, add = 0, share = 1;
};

/// y_i = x_0 ... x_i.
template <class T>
struct Forward {
  using Number = RunningSum<T>;
  using Y = std::conditional_t<std::is_integral_v<T>, int64_t, T>;
  const T* x;
  Y* y;
  int64_t x_stride, y_stride;
  static constexpr bool kReverse = false;
  __host__ __device__ Number start() const { return 1; }
  __device__ Step<Number> load(int64_t x_line, int64_t, int64_t i, int64_t) const {
    return {.times = widened(x[x_line + i * x_stride])};
  }
  __device__ void store(int64_t y_line, int64_t i, Number result) const {
    y[y_line + i * y_stride] = rounded<Y>(result);
  }
};

/// s_i = dy_i + x_(i+1) s_(i+1), dx_i = y_(i-1) s_i; the four lie alike.
template <class T>
struct Back {
  using Number = double;
  T* dx;
  const T *dy, *x, *y;
  int64_t stride;
  static constexpr bool kReverse = true;
  __host__ __device__ double start() const { return 0; }
  __device__ Step<double> load(int64_t, int64_t line, int64_t i, int64_t length) const {
    const int64_t at = line + i * stride;
    return {.times = i + 1 < length ? widened(x[at + stride]) : 0.0,
            .add = widened(dy[at]),
            .share = i > 0 ? widened(y[at - stride]) : 1.0};
  }
  __device__ void store(int64_t line, int64_t i, double result) const {
    dx[line + i * stride] = rounded<T>(result);
  }
};

template <class Scan>
__global__ void __launch_bounds__(kThreads) scan_rows(const ReducePlan plan, const Scan scan) {
  using Number = typename Scan::Number;
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % gpu::kWarp;
  for (int64_t line = int64_t(blockIdx.x) * kWarps + threadIdx.x / gpu::kWarp; line < plan.outputs;
       line += int64_t(gridDim.x) * kWarps) {
    int64_t x_line, y_line;
    plan.offsets(line, x_line, y_line);
    Number carry = scan.start();
    for (int64_t first = 0; first < plan.length; first += gpu::kWarp) {
      const int64_t step = first + lane, i = Scan::kReverse ? plan.length - 1 - step : step;
      const bool valid = step < plan.length;
      const Step<Number> own = valid ? scan.load(x_line, y_line, i, plan.length) : Step<Number>{};
      Number times = own.times, add = own.add;
#pragma unroll
      for (int reach = 1; reach < gpu::kWarp; reach *= 2) {
        const Number times_before = __shfl_up_sync(kAll, times, reach);
        const Number add_before = __shfl_up_sync(kAll, add, reach);
        if (lane < reach) continue;
        add += times * add_before;
        times *= times_before;
      }
      const Number s = add + times * carry;
      if (valid) scan.store(y_line, i, own.share * s);
      carry = __shfl_sync(kAll, s, gpu::kWarp - 1);
    }
  }
}

/// A product of many factors. Its exponent is apart, so that it does not leave the range of f64 before it
/// meets an s that brings it back.
template <class Number>
struct Product {
  Number number = 1;
  int exponent = 0;
  __device__ void multiply(Number factor) {
    number *= factor;
    if constexpr (std::is_same_v<Number, double>) {
      const double size = fabs(number);
      if ((size < 0x1p-300 && size > 0) || (size > 0x1p300 && size < __builtin_huge_val())) {
        const int shift = ilogb(number);
        number = scalbn(number, -shift), exponent += shift;
      }
    }
  }
  __device__ Number times(Number s) const {
    if constexpr (std::is_same_v<Number, double>)
      return exponent == 0 ? number * s : scalbn(number * s, exponent);
    else
      return number * s;
  }
};

/// The composed maps of a chunk: s -> add + times s. Then add is s ahead of the chunk.
template <class Number>
struct Map {
  Product<Number> times;
  Number add = 0;
};

/// By columns: each line in `chunks` of `length` steps; unit chunk * lines + line.
struct Chunks {
  int64_t chunks, length;
};

/// Calls visit(step, i) for the steps of a chunk, in order. kAhead are loaded before the first is visited.
template <class Scan, class Visit>
__device__ __forceinline__ void for_steps(const ReducePlan& plan, const Scan& scan, const Chunks& cut,
                                          int64_t x_line, int64_t y_line, int64_t chunk, Visit visit) {
  constexpr int kAhead = Scan::kReverse ? 8 : 16;  // backward holds three numbers per step
  const int64_t begin = chunk * cut.length, end = min(begin + cut.length, plan.length);
  for (int64_t first = begin; first < end; first += kAhead) {
    const auto index = [&](int k) { return Scan::kReverse ? plan.length - 1 - (first + k) : first + k; };
    Step<typename Scan::Number> steps[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (first + k < end) steps[k] = scan.load(x_line, y_line, index(k), plan.length);
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (first + k < end) visit(steps[k], index(k));
  }
}

/// maps [chunks, lines] = those of the chunks.
template <class Scan>
__global__ void __launch_bounds__(kThreads)
    map_columns(const ReducePlan plan, const Scan scan, const Chunks cut, Map<typename Scan::Number>* maps) {
  gpu::wait_and_launch_dependents();
  const int64_t units = plan.outputs * cut.chunks;
  for (int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x; unit < units;
       unit += int64_t(gridDim.x) * kThreads) {
    const int64_t chunk = ReducePlan::quotient(unit, plan.outputs);
    int64_t x_line, y_line;
    plan.offsets(unit - chunk * plan.outputs, x_line, y_line);
    Map<typename Scan::Number> map;
    for_steps(plan, scan, cut, x_line, y_line, chunk, [&](const auto& step, int64_t) {
      map.add = step.add + step.times * map.add;
      map.times.multiply(step.times);
    });
    maps[unit] = map;
  }
}

template <class Number>
__global__ void __launch_bounds__(kThreads)
    follow_maps(Map<Number>* maps, int64_t lines, int64_t chunks, Number start) {
  gpu::wait_and_launch_dependents();
  const int64_t line = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (line >= lines) return;
  constexpr int kAhead = 16;  // loads in flight
  Number s = start;
  for (int64_t first = 0; first < chunks; first += kAhead) {
    Map<Number> ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (first + k < chunks) ahead[k] = maps[(first + k) * lines + line];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k >= chunks) continue;
      maps[(first + k) * lines + line].add = s;
      s = ahead[k].add + ahead[k].times.times(s);
    }
  }
}

/// maps: null where a chunk is a whole line.
template <class Scan>
__global__ void __launch_bounds__(kThreads)
    scan_columns(const ReducePlan plan, const Scan scan, const Chunks cut,
                 const Map<typename Scan::Number>* maps) {
  gpu::wait_and_launch_dependents();
  const int64_t units = plan.outputs * cut.chunks;
  for (int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x; unit < units;
       unit += int64_t(gridDim.x) * kThreads) {
    const int64_t chunk = ReducePlan::quotient(unit, plan.outputs);
    int64_t x_line, y_line;
    plan.offsets(unit - chunk * plan.outputs, x_line, y_line);
    typename Scan::Number s = maps ? maps[unit].add : scan.start();
    for_steps(plan, scan, cut, x_line, y_line, chunk, [&](const auto& step, int64_t i) {
      s = step.add + step.times * s;
      scan.store(y_line, i, step.share * s);
    });
  }
}

template <class Scan>
void launch(Device device, const Lines& lines, const Scan& scan) {
  using Number = typename Scan::Number;
  const ReducePlan& plan = lines.plan;
  const auto grid_for = [&](int64_t blocks) {
    return gpu::LaunchShape{gpu::grid_of(std::min<int64_t>(blocks, int64_t(device.multiprocessors()) * 32)),
                            kThreads};
  };
  if (lines.by_rows())
    return gpu::launch_dependent(device, grid_for(gpu::ceil_div(plan.outputs, kWarps)), scan_rows<Scan>, plan,
                                 scan);
  Chunks cut{1, plan.length};
  if (plan.outputs <= kTargetThreads / 4 && plan.length >= 2 * kLeastChunk) {
    const int64_t wanted = std::min(plan.length / kLeastChunk, gpu::ceil_div(kTargetThreads, plan.outputs));
    cut.length = gpu::ceil_div(plan.length, wanted);
    cut.chunks = gpu::ceil_div(plan.length, cut.length);
  }
  const gpu::LaunchShape shape = grid_for(gpu::ceil_div(plan.outputs * cut.chunks, kThreads));
  if (cut.chunks == 1)
    return gpu::launch_dependent(device, shape, scan_columns<Scan>, plan, scan, cut,
                                 static_cast<const Map<Number>*>(nullptr));
  const Tensor scratch =
      Tensor::empty_packed({plan.outputs * cut.chunks * int64_t(sizeof(Map<Number>))}, DType::u8, device);
  auto* const maps = static_cast<Map<Number>*>(scratch.raw());
  gpu::launch_dependent(device, shape, map_columns<Scan>, plan, scan, cut, maps);
  gpu::launch_dependent(device, {gpu::grid_of(gpu::ceil_div(plan.outputs, kThreads)), kThreads},
                        follow_maps<Number>, maps, plan.outputs, cut.chunks, scan.start());
  gpu::launch_dependent(device, shape, scan_columns<Scan>, plan, scan, cut,
                        static_cast<const Map<Number>*>(maps));
}

}  // namespace

void cumprod_cuda(const Tensor& y, const Tensor& x, int dim) {
  const Lines lines(x.layout(), y.layout(), dim);
  dispatch_among<float, bf16, f16, int64_t, int32_t>(
      x.dtype(),
      [&]<class T>() {
        launch(x.device(), lines,
               Forward<T>{x.data<T>(), y.data<typename Forward<T>::Y>(), lines.plan.reduced_x[0],
                          lines.y_stride});
      },
      [&] {
        fail_at(Site::here(), "cumprod: dtype ", x.dtype(),
                " is not supported on device cuda; expected f32, bf16, f16, i64 or i32");
      });
}

void cumprod_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, int dim) {
  const Lines lines(x.layout(), dx.layout(), dim);
  dispatch_floating_cuda(x.dtype(), "cumprod", [&]<class T>() {
    launch(x.device(), lines, Back<T>{dx.data<T>(), dy.data<T>(), x.data<T>(), y.data<T>(), lines.y_stride});
  });
}

}  // namespace tessera::ops
