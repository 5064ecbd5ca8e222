#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/cumprod/cumprod_kernels.h"

/// Running products on a GPU. Both directions are scans of maps s -> add + times s: forward of products
/// alone, backward, from the end, of dy_i + x_(i+1) s. Where the lines are innermost in memory, or too few
/// for a thread each to fill the GPU, a warp takes a line, 32 elements per round: a scan over the lanes
/// composes the maps, and a carry holds s of the rounds before. Else a thread takes a line, its neighbours
/// the next ones. In f64, as on the CPU; bound by the latency of a line's rounds where there are few lines.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / gpu::kWarp;
constexpr unsigned kAll = 0xFFFFFFFFu;

/// y_i = x_0 ... x_i.
template <class T>
struct Forward {
  using Number = RunningSum<T>;
  using Y = std::conditional_t<std::is_integral_v<T>, int64_t, T>;
  const T* x;
  Y* y;
  int64_t x_stride, y_stride;
  static constexpr bool kReverse = false;
  __device__ Number start() const { return 1; }
  __device__ Number times(int64_t x_line, int64_t, int64_t i, int64_t) const {
    return widened(x[x_line + i * x_stride]);
  }
  __device__ Number add(int64_t, int64_t) const { return 0; }
  __device__ void store(int64_t y_line, int64_t i, Number s) const {
    y[y_line + i * y_stride] = rounded<Y>(s);
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
  __device__ double start() const { return 0; }
  __device__ double times(int64_t, int64_t line, int64_t i, int64_t length) const {
    return i + 1 < length ? widened(x[line + (i + 1) * stride]) : 0.0;
  }
  __device__ double add(int64_t line, int64_t i) const { return widened(dy[line + i * stride]); }
  __device__ void store(int64_t line, int64_t i, double s) const {
    dx[line + i * stride] = rounded<T>(i > 0 ? widened(y[line + (i - 1) * stride]) * s : s);
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
      Number times = valid ? scan.times(x_line, y_line, i, plan.length) : Number(1);
      Number add = valid ? scan.add(y_line, i) : Number(0);
#pragma unroll
      for (int reach = 1; reach < gpu::kWarp; reach *= 2) {
        const Number times_before = __shfl_up_sync(kAll, times, reach);
        const Number add_before = __shfl_up_sync(kAll, add, reach);
        if (lane < reach) continue;
        add += times * add_before;
        times *= times_before;
      }
      const Number s = add + times * carry;
      if (valid) scan.store(y_line, i, s);
      carry = __shfl_sync(kAll, s, gpu::kWarp - 1);
    }
  }
}

template <class Scan>
__global__ void __launch_bounds__(kThreads) scan_columns(const ReducePlan plan, const Scan scan) {
  gpu::wait_and_launch_dependents();
  for (int64_t line = int64_t(blockIdx.x) * kThreads + threadIdx.x; line < plan.outputs;
       line += int64_t(gridDim.x) * kThreads) {
    int64_t x_line, y_line;
    plan.offsets(line, x_line, y_line);
    typename Scan::Number s = scan.start();
    for (int64_t step = 0; step < plan.length; ++step) {
      const int64_t i = Scan::kReverse ? plan.length - 1 - step : step;
      s = scan.add(y_line, i) + scan.times(x_line, y_line, i, plan.length) * s;
      scan.store(y_line, i, s);
    }
  }
}

template <class Scan>
void launch(Device device, const Lines& lines, const Scan& scan) {
  const bool rows = lines.by_rows() || lines.plan.outputs < int64_t(device.multiprocessors()) * kThreads;
  const int64_t blocks = std::min<int64_t>(gpu::ceil_div(lines.plan.outputs, rows ? kWarps : kThreads),
                                           int64_t(device.multiprocessors()) * 32);
  gpu::launch_dependent(device, {gpu::grid_of(blocks), kThreads}, rows ? scan_rows<Scan> : scan_columns<Scan>,
                        lines.plan, scan);
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
