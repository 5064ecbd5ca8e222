#pragma once

#include <cusolverDn.h>
#include <dlfcn.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/error.h"
#include "tensor/tensor.h"

/// cuSOLVER for the operators that factorise matrices. It brings cuSPARSE and a linker with it, some 400 MB:
/// it is loaded when it is first needed, so that no other command needs it.

namespace tessera::ops {

class SolverLibrary {
 public:
  static const SolverLibrary& loaded() {
    static const SolverLibrary library;
    return library;
  }
  decltype(&cusolverDnSetStream) set_stream;
  decltype(&cusolverDnCreateParams) create_params;
  decltype(&cusolverDnDestroyParams) destroy_params;

  template <class F>
  void find(F& function, const char* name) const {
    function = reinterpret_cast<F>(::dlsym(library_, name));
    check(function != nullptr, "cuSOLVER has no ", name, "; install that of the CUDA toolkit ",
          CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10);
  }

  /// One handle per thread and device, made at its first use, on the device's stream.
  cusolverDnHandle_t handle_of(Device device) const {
    struct Owner {
      cusolverDnHandle_t handle = nullptr;
      ~Owner() {
        if (handle) loaded().destroy_(handle);
      }
    };
    thread_local std::vector<std::pair<std::string, std::unique_ptr<Owner>>> owners;
    device.activate();
    cusolverDnHandle_t handle = nullptr;
    for (const auto& [name, owner] : owners)
      if (name == device.name()) handle = owner->handle;
    if (!handle) {
      auto owner = std::make_unique<Owner>();
      check_status(create_(&owner->handle), "its initialisation");
      handle = owner->handle;
      owners.emplace_back(device.name(), std::move(owner));
    }
    check_status(set_stream(handle, device.stream()), "setting its stream");
    return handle;
  }

  using Params =
      std::unique_ptr<std::remove_pointer_t<cusolverDnParams_t>, decltype(&cusolverDnDestroyParams)>;
  Params make_params() const {
    cusolverDnParams_t made = nullptr;
    check_status(create_params(&made), "making its parameters");
    return Params(made, destroy_params);
  }

  static void check_status(cusolverStatus_t status, const char* what) {
    check(status == CUSOLVER_STATUS_SUCCESS, "cuSOLVER: ", what, " failed with the status ", int(status),
          "; is there enough memory?");
  }

 private:
  SolverLibrary() {
    const std::string name = "libcusolver.so." + std::to_string(CUSOLVER_VER_MAJOR);
    library_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    check(library_ != nullptr, name, " cannot be loaded (", library_ ? "" : ::dlerror(),
          "); install cuSOLVER of the CUDA toolkit, or add its folder to LD_LIBRARY_PATH");
    find(create_, "cusolverDnCreate"), find(destroy_, "cusolverDnDestroy"),
        find(set_stream, "cusolverDnSetStream");
    find(create_params, "cusolverDnCreateParams"), find(destroy_params, "cusolverDnDestroyParams");
  }

  void* library_ = nullptr;
  decltype(&cusolverDnCreate) create_;
  decltype(&cusolverDnDestroy) destroy_;
};

inline Tensor solver_bytes(Device device, size_t bytes) {
  return Tensor::empty_packed({int64_t(bytes)}, DType::u8, device);
}

}  // namespace tessera::ops
