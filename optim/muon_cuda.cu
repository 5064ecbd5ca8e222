#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/sum.cuh"
#include "optim/muon_kernels.h"

/// Muon's kernels next to its GEMMs: bound by memory, element by element.
///
/// A block of 16 warps takes about 16,384 elements of one matrix, whole rows, a warp per row; 32 neighbours
/// of a row are one access of 128 bytes. The norm of a matrix needs two kernels: sums of squares per block,
/// in f64, then every block adds those of its matrix in their order (a matrix of 100 million elements has
/// 6,104, 49 KiB from L2) and divides its rows. Together 4 bytes per element for the sums, and 4 read and 2
/// written for X in bf16: with f32 directions of 85 million elements about 0.2 ms at 4.2 TB/s, next to some 3
/// ms of GEMMs.

namespace tessera::optim {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

/// A batch of matrices with dense rows.
template <class T>
struct Matrices {
  T* data;
  int64_t matrix_stride, row_stride;
  __device__ T* row(int64_t matrix, int64_t row) const {
    return data + matrix * matrix_stride + row * row_stride;
  }
};

template <class T>
Matrices<T> matrices(const Tensor& batch) {
  return {static_cast<T*>(batch.raw()), batch.layout().stride(0), batch.layout().stride(1)};
}

struct Extent {
  int64_t rows, columns, at_once;  // at_once: rows of one block
};

template <class F>
__device__ __forceinline__ void for_each_element(const Extent& extent, F&& f) {
  const int64_t first = blockIdx.x * extent.at_once, end = min(extent.rows, first + extent.at_once);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  for (int64_t row = first + warp; row < end; row += kWarps)
    for (int64_t column = lane; column < extent.columns; column += 32) f(row, column);
}

__global__ void __launch_bounds__(kThreads)
    squares_kernel(Matrices<const float> d, Extent extent, double* partials) {
  gpu::wait_and_launch_dependents();
  double sum = 0;
  for_each_element(extent, [&](int64_t row, int64_t column) {
    const double value = d.row(blockIdx.y, row)[column];
    sum += value * value;
  });
  sum = gpu::block_sum(sum);
  if (threadIdx.x == 0) partials[int64_t(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    normalize_kernel(Matrices<T> x, Matrices<const float> d, Extent extent, const double* partials) {
  gpu::wait_and_launch_dependents();
  __shared__ double inverse;  // may exceed f32: momentum decays to subnormal numbers where no gradient comes
  double sum = 0;
  for (unsigned part = threadIdx.x; part < gridDim.x; part += kThreads)
    sum += partials[int64_t(blockIdx.y) * gridDim.x + part];
  sum = gpu::block_sum(sum);
  if (threadIdx.x == 0) inverse = sum > 0 ? 1 / sqrt(sum) : 0;
  __syncthreads();
  const double factor = inverse;
  for_each_element(extent, [&](int64_t row, int64_t column) {
    x.row(blockIdx.y, row)[column] = T(float(d.row(blockIdx.y, row)[column] * factor));
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    begin_polynomial_kernel(Matrices<T> p, Matrices<const T> gram, Extent extent, float a, float b) {
  gpu::wait_and_launch_dependents();
  for_each_element(extent, [&](int64_t row, int64_t column) {
    const float value = b * float(gram.row(blockIdx.y, row)[column]);
    p.row(blockIdx.y, row)[column] = T(value + (row == column ? a : 0.0f));
  });
}

Extent extent_of(const Tensor& batch) {
  return {batch.size(1), batch.size(2), rows_per_part(batch.size(2))};
}

gpu::LaunchShape shape_of(const Tensor& batch) {
  const Extent extent = extent_of(batch);
  return {dim3(unsigned((extent.rows + extent.at_once - 1) / extent.at_once), unsigned(batch.size(0))),
          kThreads};
}

}  // namespace

void normalize_cuda(const Tensor& x, const Tensor& d, const Tensor& partials) {
  const Device device = d.device();
  gpu::launch_dependent(device, shape_of(d), squares_kernel, matrices<const float>(d), extent_of(d),
                        partials.data<double>());
  dispatch_floating_cuda(x.dtype(), "muon", [&]<class T>() {
    gpu::launch_dependent(device, shape_of(d), normalize_kernel<T>, matrices<T>(x), matrices<const float>(d),
                          extent_of(d), static_cast<const double*>(partials.data<double>()));
  });
}

void begin_polynomial_cuda(const Tensor& p, const Tensor& gram, double a, double b) {
  dispatch_floating_cuda(p.dtype(), "muon", [&]<class T>() {
    gpu::launch_dependent(p.device(), shape_of(p), begin_polynomial_kernel<T>, matrices<T>(p),
                          matrices<const T>(gram), extent_of(p), float(a), float(b));
  });
}

}  // namespace tessera::optim
