#include "ops/gemm/gemm_fused_internal.h"
#include "ops/mlp/mlp_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

/// Its name, or null if there is nothing to compute.
const char* function_of(Activation kind) {
  return kind == Activation::none ? nullptr : name_of(kind);
}

/// Calls f with a value of the dtype, bf16 or f16.
template <class F>
void with_half([[maybe_unused]] DType dtype, [[maybe_unused]] F&& f) {
  if constexpr (kCuda) {
    if (dtype == DType::bf16)
      f(bf16());
    else
      f(f16());
  }
}

}  // namespace

bool fuses_up(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, Activation kind,
              const Gpu& gpu) {
  return fused_gemm_runs({function_of(kind), true, false, 1, 3, {&a, &h}, {&x, &up}}, gpu);
}

void fused_up(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, const Tensor& bias,
              Activation kind) {
  with_half(a.dtype(), [&]<class T>(T) { fused_up_cuda<T>(a, h, x, up, bias, kind); });
}

bool fuses_down_gradient(const Tensor& dh, const Tensor& a, const Tensor& dy, const Tensor& down,
                         const Tensor& h, Activation kind, const Gpu& gpu) {
  const int passes = a.defined() ? 2 : 1;
  return fused_gemm_runs({function_of(kind), false, false, passes, 3 * passes, {&dh, &a}, {&dy, &down, &h}},
                         gpu);
}

void fused_down_gradient(const Tensor& dh, const Tensor& a, const Tensor& dy, const Tensor& down,
                         const Tensor& h, Activation kind) {
  with_half(dh.dtype(), [&]<class T>(T) { fused_down_gradient_cuda<T>(dh, a, dy, down, h, kind); });
}

}  // namespace tessera::ops
