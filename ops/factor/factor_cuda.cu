#include <algorithm>
#include <vector>

#include "gpu/launch.cuh"
#include "ops/factor/cusolver_internal.cuh"
#include "ops/factor/factor_kernels.h"

/// cuSOLVER's Householder QR and its SVD by bidiagonalisation, in f64, which a Hopper GPU multiplies as fast
/// as f32. Its matrices are column-major. Reads and writes here are element by element and partly
/// uncoalesced: next to O(n^3) of f64 they do not show.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

gpu::LaunchShape grid_of(int64_t count) {
  return {.grid = unsigned(std::clamp<int64_t>(gpu::ceil_div(count, kThreads), 1, 4096)), .block = kThreads};
}

/// to [columns, rows] = from [rows, columns]^T if `transposes`, else the same order. *bad = 1 if an element
/// is not finite; any thread may write it.
__global__ void widen(double* to, const float* from, int* bad, int64_t rows, int64_t columns,
                      bool transposes) {
  const int64_t count = rows * columns;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const float value = from[i];
    to[transposes ? i % columns * rows + i / columns : i] = double(value);
    if (!isfinite(value)) *bad = 1;
  }
}

/// to [rows, columns], row-major, of a matrix whose columns are `ld` apart; with `upper` zeros below the
/// diagonal.
__global__ void take_columns(float* to, const double* from, int64_t rows, int64_t columns, int64_t ld,
                             bool upper) {
  const int64_t count = rows * columns;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / columns, column = i % columns;
    to[i] = upper && column < row ? 0.0f : float(from[column * ld + row]);
  }
}

__global__ void narrow(float* to, const double* from, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads)
    to[i] = float(from[i]);
}

struct Solver {
  decltype(&cusolverDnXgeqrf_bufferSize) geqrf_size;
  decltype(&cusolverDnXgeqrf) geqrf;
  decltype(&cusolverDnDorgqr_bufferSize) orgqr_size;
  decltype(&cusolverDnDorgqr) orgqr;
  decltype(&cusolverDnXgesvd_bufferSize) gesvd_size;
  decltype(&cusolverDnXgesvd) gesvd;

  Solver() {
    const SolverLibrary& library = SolverLibrary::loaded();
    library.find(geqrf_size, "cusolverDnXgeqrf_bufferSize"), library.find(geqrf, "cusolverDnXgeqrf");
    library.find(orgqr_size, "cusolverDnDorgqr_bufferSize"), library.find(orgqr, "cusolverDnDorgqr");
    library.find(gesvd_size, "cusolverDnXgesvd_bufferSize"), library.find(gesvd, "cusolverDnXgesvd");
  }
};

const Solver& solver() {
  static const Solver loaded;
  return loaded;
}

double* doubles(const Tensor& bytes) {
  return reinterpret_cast<double*>(bytes.data<uint8_t>());
}

Tensor doubles_on(Device device, int64_t count) {
  return solver_bytes(device, size_t(count) * sizeof(double));
}

/// The SVD of a [m, n] with m <= n: as LAPACK on the CPU, that of the transpose, whose factors lie as ours
/// do.
int wide_svd(const Tensor& u, const Tensor& s, const Tensor& vt, const Tensor& a) {
  const Device device = a.device();
  const int64_t m = a.size(0), n = a.size(1), k = m;
  const SolverLibrary& library = SolverLibrary::loaded();
  const cusolverDnHandle_t handle = library.handle_of(device);
  const SolverLibrary::Params params = library.make_params();
  const Tensor matrix = doubles_on(device, m * n), left = doubles_on(device, n * k),
               values = doubles_on(device, k), right = doubles_on(device, k * m),
               status = Tensor::zeros({2}, DType::i32, device);
  int* const info = status.data<int32_t>();
  gpu::launch(device, grid_of(m * n), widen, doubles(matrix), a.data<float>(), info + 1, m, n, false);
  if (status.to_vector<int32_t>()[1] != 0) return -1;
  size_t device_bytes = 0, host_bytes = 0;
  SolverLibrary::check_status(
      solver().gesvd_size(handle, params.get(), 'S', 'S', n, m, CUDA_R_64F, doubles(matrix), n, CUDA_R_64F,
                          doubles(values), CUDA_R_64F, doubles(left), n, CUDA_R_64F, doubles(right), k,
                          CUDA_R_64F, &device_bytes, &host_bytes),
      "asking for memory");
  const Tensor work = solver_bytes(device, std::max(device_bytes, size_t{1}));
  std::vector<char> host(std::max(host_bytes, size_t{1}));
  SolverLibrary::check_status(
      solver().gesvd(handle, params.get(), 'S', 'S', n, m, CUDA_R_64F, doubles(matrix), n, CUDA_R_64F,
                     doubles(values), CUDA_R_64F, doubles(left), n, CUDA_R_64F, doubles(right), k, CUDA_R_64F,
                     work.data<uint8_t>(), device_bytes, host.data(), host_bytes, info),
      "the singular value decomposition");
  gpu::launch(device, grid_of(u.count()), narrow, u.data<float>(), doubles(right), u.count());
  gpu::launch(device, grid_of(k), narrow, s.data<float>(), doubles(values), k);
  gpu::launch(device, grid_of(vt.count()), narrow, vt.data<float>(), doubles(left), vt.count());
  return status.to_vector<int32_t>()[0];
}

}  // namespace

int qr_cuda(const Tensor& q, const Tensor& r, const Tensor& a) {
  const Device device = a.device();
  const int64_t m = a.size(0), n = a.size(1), k = std::min(m, n);
  const SolverLibrary& library = SolverLibrary::loaded();
  const cusolverDnHandle_t handle = library.handle_of(device);
  const SolverLibrary::Params params = library.make_params();
  const Tensor matrix = doubles_on(device, m * n), tau = doubles_on(device, k),
               status = Tensor::zeros({3}, DType::i32, device);
  int* const info = status.data<int32_t>();
  gpu::launch(device, grid_of(m * n), widen, doubles(matrix), a.data<float>(), info + 2, m, n, true);
  size_t device_bytes = 0, host_bytes = 0;
  SolverLibrary::check_status(
      solver().geqrf_size(handle, params.get(), m, n, CUDA_R_64F, doubles(matrix), m, CUDA_R_64F,
                          doubles(tau), CUDA_R_64F, &device_bytes, &host_bytes),
      "asking for memory");
  int elements = 0;
  SolverLibrary::check_status(
      solver().orgqr_size(handle, int(m), int(k), int(k), doubles(matrix), int(m), doubles(tau), &elements),
      "asking for memory");
  const Tensor work =
      solver_bytes(device, std::max({device_bytes, size_t(elements) * sizeof(double), size_t{1}}));
  std::vector<char> host(std::max(host_bytes, size_t{1}));
  SolverLibrary::check_status(
      solver().geqrf(handle, params.get(), m, n, CUDA_R_64F, doubles(matrix), m, CUDA_R_64F, doubles(tau),
                     CUDA_R_64F, work.data<uint8_t>(), device_bytes, host.data(), host_bytes, info),
      "the QR factorisation");
  gpu::launch(device, grid_of(r.count()), take_columns, r.data<float>(), doubles(matrix), k, n, m, true);
  SolverLibrary::check_status(solver().orgqr(handle, int(m), int(k), int(k), doubles(matrix), int(m),
                                             doubles(tau), doubles(work), elements, info + 1),
                              "the orthogonal factor");
  gpu::launch(device, grid_of(q.count()), take_columns, q.data<float>(), doubles(matrix), m, k, m, false);
  const std::vector<int32_t> outcome = status.to_vector<int32_t>();
  return outcome[2] != 0 ? -1 : outcome[0] != 0 ? outcome[0] : outcome[1];
}

int svd_cuda(const Tensor& u, const Tensor& s, const Tensor& vt, const Tensor& a) {
  if (a.size(0) <= a.size(1)) return wide_svd(u, s, vt, a);
  const int64_t k = a.size(1);
  const Tensor left = Tensor::empty_packed({k, k}, a.dtype(), a.device()),
               right = Tensor::empty_packed({k, a.size(0)}, a.dtype(), a.device());
  const int info = wide_svd(left, s, right, a.transpose(0, 1).packed());
  u.copy_from(right.transpose(0, 1));
  vt.copy_from(left.transpose(0, 1));
  return info;
}

}  // namespace tessera::ops
