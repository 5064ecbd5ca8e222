#include <algorithm>
#include <vector>

#include "gpu/launch.cuh"
#include "ops/factor/cusolver_internal.cuh"
#include "ops/inverse_factor/inverse_factor_kernels.h"

/// As on the CPU (inverse_factor_cpu.cpp): rows and columns in reverse order, cuSOLVER's Cholesky factor and
/// triangular inverse of the upper triangle of a column-major matrix, which reversed once more is U row by
/// row. In f64, which a Hopper GPU multiplies as fast as f32: 2 n^3 / 3 FLOPs, n = 11008: some 20 ms.
/// cuSOLVER's results are deterministic unless a program asks for others.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

__global__ void reverse_into_f64(double* to, const float* from, const float* shift, int64_t n) {
  const int64_t count = n * n;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / n, column = i % n;
    // The upper triangle alone is read, here and by cuSOLVER.
    to[count - 1 - i] = row <= column ? double(from[i]) + (row == column ? double(shift[row]) : 0.0) : 0.0;
  }
}

/// `bad` becomes 1 if an element is not finite; any thread may write it.
__global__ void reverse_into_f32(float* to, const double* from, int* bad, int64_t n) {
  const int64_t count = n * n;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const float value = i / n <= i % n ? float(from[count - 1 - i]) : 0.0f;
    to[i] = value;
    if (!isfinite(value)) *bad = 1;
  }
}

struct Solver {
  decltype(&cusolverDnXpotrf_bufferSize) potrf_size;
  decltype(&cusolverDnXpotrf) potrf;
  decltype(&cusolverDnXtrtri_bufferSize) trtri_size;
  decltype(&cusolverDnXtrtri) trtri;

  Solver() {
    const SolverLibrary& library = SolverLibrary::loaded();
    library.find(potrf_size, "cusolverDnXpotrf_bufferSize"), library.find(potrf, "cusolverDnXpotrf");
    library.find(trtri_size, "cusolverDnXtrtri_bufferSize"), library.find(trtri, "cusolverDnXtrtri");
  }
};

const Solver& solver() {
  static const Solver loaded;
  return loaded;
}

}  // namespace

bool inverse_factor_cuda(const Tensor& u, const Tensor& a, const Tensor& shift) {
  const Device device = u.device();
  const int64_t n = u.size(0);
  const cusolverDnHandle_t handle = SolverLibrary::loaded().handle_of(device);
  const SolverLibrary::Params params = SolverLibrary::loaded().make_params();

  const Tensor matrix = solver_bytes(device, size_t(n * n) * sizeof(double)),
               status = Tensor::zeros({3}, DType::i32, device);
  auto* const elements = reinterpret_cast<double*>(matrix.data<uint8_t>());
  int* const info = status.data<int32_t>();
  const gpu::LaunchShape grid{.grid = unsigned(std::min<int64_t>(4096, gpu::ceil_div(n * n, kThreads))),
                              .block = kThreads};
  gpu::launch(device, grid, reverse_into_f64, elements, a.data<float>(), shift.data<float>(), n);

  constexpr auto kUpper = CUBLAS_FILL_MODE_UPPER;
  constexpr auto kDiagonal = CUBLAS_DIAG_NON_UNIT;
  size_t factor_bytes = 0, factor_host_bytes = 0, inverse_bytes = 0, inverse_host_bytes = 0;
  SolverLibrary::check_status(solver().potrf_size(handle, params.get(), kUpper, n, CUDA_R_64F, elements, n,
                                                  CUDA_R_64F, &factor_bytes, &factor_host_bytes),
                              "asking for memory");
  SolverLibrary::check_status(solver().trtri_size(handle, kUpper, kDiagonal, n, CUDA_R_64F, elements, n,
                                                  &inverse_bytes, &inverse_host_bytes),
                              "asking for memory");
  const Tensor work = solver_bytes(device, std::max({factor_bytes, inverse_bytes, size_t{1}}));
  std::vector<char> host(std::max({factor_host_bytes, inverse_host_bytes, size_t{1}}));
  uint8_t* const bytes = work.data<uint8_t>();
  SolverLibrary::check_status(
      solver().potrf(handle, params.get(), kUpper, n, CUDA_R_64F, elements, n, CUDA_R_64F, bytes,
                     factor_bytes, host.data(), factor_host_bytes, info),
      "the Cholesky factor");
  if (status.to_vector<int32_t>()[0] != 0) return false;
  SolverLibrary::check_status(solver().trtri(handle, kUpper, kDiagonal, n, CUDA_R_64F, elements, n, bytes,
                                             inverse_bytes, host.data(), inverse_host_bytes, info + 1),
                              "the triangular inverse");
  gpu::launch(device, grid, reverse_into_f32, u.data<float>(), elements, info + 2, n);
  const std::vector<int32_t> outcome = status.to_vector<int32_t>();
  return outcome[1] == 0 && outcome[2] == 0;
}

}  // namespace tessera::ops
