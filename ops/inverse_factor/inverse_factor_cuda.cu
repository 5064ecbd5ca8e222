#include <cusolverDn.h>
#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "gpu/launch.cuh"
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

/// cuSOLVER brings cuSPARSE and a linker with it, some 400 MB: it is loaded when it is first needed, so that
/// no other command needs it.
struct Solver {
  void* library = nullptr;
  decltype(&cusolverDnCreate) create;
  decltype(&cusolverDnDestroy) destroy;
  decltype(&cusolverDnSetStream) set_stream;
  decltype(&cusolverDnCreateParams) create_params;
  decltype(&cusolverDnDestroyParams) destroy_params;
  decltype(&cusolverDnXpotrf_bufferSize) potrf_size;
  decltype(&cusolverDnXpotrf) potrf;
  decltype(&cusolverDnXtrtri_bufferSize) trtri_size;
  decltype(&cusolverDnXtrtri) trtri;

  Solver() {
    const std::string name = "libcusolver.so." + std::to_string(CUSOLVER_VER_MAJOR);
    library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    check(library != nullptr, "inverse_factor: ", name, " cannot be loaded (", library ? "" : ::dlerror(),
          "); install cuSOLVER of the CUDA toolkit, or add its folder to LD_LIBRARY_PATH");
    find(create, "cusolverDnCreate"), find(destroy, "cusolverDnDestroy"),
        find(set_stream, "cusolverDnSetStream");
    find(create_params, "cusolverDnCreateParams"), find(destroy_params, "cusolverDnDestroyParams");
    find(potrf_size, "cusolverDnXpotrf_bufferSize"), find(potrf, "cusolverDnXpotrf");
    find(trtri_size, "cusolverDnXtrtri_bufferSize"), find(trtri, "cusolverDnXtrtri");
  }

 private:
  template <class F>
  void find(F& function, const char* name) {
    function = reinterpret_cast<F>(::dlsym(library, name));
    check(function != nullptr, "inverse_factor: cuSOLVER has no ", name,
          "; install that of the CUDA toolkit ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10);
  }
};

const Solver& solver() {
  static const Solver loaded;
  return loaded;
}

void check_solver(cusolverStatus_t status, const char* what) {
  check(status == CUSOLVER_STATUS_SUCCESS, "inverse_factor: ", what, " failed with cuSOLVER's status ",
        int(status), "; is there enough memory?");
}

/// One handle per thread and device, made at its first use.
cusolverDnHandle_t handle_of(Device device) {
  struct Owner {
    cusolverDnHandle_t handle = nullptr;
    ~Owner() {
      if (handle) solver().destroy(handle);
    }
  };
  thread_local std::vector<std::pair<std::string, std::unique_ptr<Owner>>> owners;
  device.activate();
  for (const auto& [name, owner] : owners)
    if (name == device.name()) return owner->handle;
  auto owner = std::make_unique<Owner>();
  check_solver(solver().create(&owner->handle), "its initialisation");
  owners.emplace_back(device.name(), std::move(owner));
  return owners.back().second->handle;
}

Tensor bytes_on(Device device, size_t bytes) {
  return Tensor::empty_packed({int64_t(bytes)}, DType::u8, device);
}

}  // namespace

bool inverse_factor_cuda(const Tensor& u, const Tensor& a, const Tensor& shift) {
  const Device device = u.device();
  const int64_t n = u.size(0);
  const cusolverDnHandle_t handle = handle_of(device);
  check_solver(solver().set_stream(handle, device.stream()), "setting its stream");
  cusolverDnParams_t made = nullptr;
  check_solver(solver().create_params(&made), "making its parameters");
  const std::unique_ptr<std::remove_pointer_t<cusolverDnParams_t>, decltype(&cusolverDnDestroyParams)> params(
      made, solver().destroy_params);

  const Tensor matrix = bytes_on(device, size_t(n * n) * sizeof(double)),
               status = Tensor::zeros({3}, DType::i32, device);
  auto* const elements = reinterpret_cast<double*>(matrix.data<uint8_t>());
  int* const info = status.data<int32_t>();
  const gpu::LaunchShape grid{.grid = unsigned(std::min<int64_t>(4096, gpu::ceil_div(n * n, kThreads))),
                              .block = kThreads};
  gpu::launch(device, grid, reverse_into_f64, elements, a.data<float>(), shift.data<float>(), n);

  constexpr auto kUpper = CUBLAS_FILL_MODE_UPPER;
  constexpr auto kDiagonal = CUBLAS_DIAG_NON_UNIT;
  size_t factor_bytes = 0, factor_host_bytes = 0, inverse_bytes = 0, inverse_host_bytes = 0;
  check_solver(solver().potrf_size(handle, params.get(), kUpper, n, CUDA_R_64F, elements, n, CUDA_R_64F,
                                   &factor_bytes, &factor_host_bytes),
               "asking for memory");
  check_solver(solver().trtri_size(handle, kUpper, kDiagonal, n, CUDA_R_64F, elements, n, &inverse_bytes,
                                   &inverse_host_bytes),
               "asking for memory");
  const Tensor work = bytes_on(device, std::max({factor_bytes, inverse_bytes, size_t{1}}));
  std::vector<char> host(std::max({factor_host_bytes, inverse_host_bytes, size_t{1}}));
  uint8_t* const bytes = work.data<uint8_t>();
  check_solver(solver().potrf(handle, params.get(), kUpper, n, CUDA_R_64F, elements, n, CUDA_R_64F, bytes,
                              factor_bytes, host.data(), factor_host_bytes, info),
               "the Cholesky factor");
  if (status.to_vector<int32_t>()[0] != 0) return false;
  check_solver(solver().trtri(handle, kUpper, kDiagonal, n, CUDA_R_64F, elements, n, bytes, inverse_bytes,
                              host.data(), inverse_host_bytes, info + 1),
               "the triangular inverse");
  gpu::launch(device, grid, reverse_into_f32, u.data<float>(), elements, info + 2, n);
  const std::vector<int32_t> outcome = status.to_vector<int32_t>();
  return outcome[1] == 0 && outcome[2] == 0;
}

}  // namespace tessera::ops
