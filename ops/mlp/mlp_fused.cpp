#include <initializer_list>
#include <limits>

#include "ops/gemm/gemm.h"
#include "ops/mlp/mlp_kernels.h"
#include "runtime/tuning.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

/// Whether TMA can read the matrix, and, `written`, write it.
bool lies_well(const Tensor& x, bool written) {
  if (!x.defined()) return true;
  const int64_t columns = x.size(1), unit = 16 / int64_t(size_of(x.dtype()));
  return x.count() > 0 && x.size(0) < std::numeric_limits<int32_t>::max() / 2 &&
         reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && (columns == 1 || x.layout().stride(1) == 1) &&
         x.layout().stride(0) >= columns && x.layout().stride(0) % unit == 0 &&
         (!written || columns % unit == 0 || owns_pads(x, (columns + unit - 1) / unit * unit));
}

bool fuses(Activation kind, std::initializer_list<const Tensor*> written,
           std::initializer_list<const Tensor*> read) {
  const Tensor& first = **written.begin();
  const auto row = tuning::ForceRow::forced("gemm");
  bool fits = first.device().is_cuda() && first.device().card().major == 9 &&
              (first.dtype() == DType::bf16 || first.dtype() == DType::f16) && kind != Activation::none &&
              (!row || *row == int(GemmRow::wgmma));
  for (const Tensor* x : written) fits = fits && lies_well(*x, true);
  for (const Tensor* x : read) fits = fits && lies_well(*x, false);
  return fits;
}

}  // namespace

bool fuses_up(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, Activation kind) {
  return fuses(kind, {&a, &h}, {&x, &up});
}

void fused_up(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, const Tensor& bias,
              Activation kind) {
  if constexpr (kCuda) {
    if (a.dtype() == DType::bf16)
      fused_up_cuda<bf16>(a, h, x, up, bias, kind);
    else
      fused_up_cuda<f16>(a, h, x, up, bias, kind);
  }
}

bool fuses_down_gradient(const Tensor& dh, const Tensor& a, const Tensor& dy, const Tensor& down,
                         const Tensor& h, Activation kind) {
  return fuses(kind, {&dh, &a}, {&dy, &down, &h});
}

void fused_down_gradient(const Tensor& dh, const Tensor& a, const Tensor& dy, const Tensor& down,
                         const Tensor& h, Activation kind) {
  if constexpr (kCuda) {
    if (dh.dtype() == DType::bf16)
      fused_down_gradient_cuda<bf16>(dh, a, dy, down, h, kind);
    else
      fused_down_gradient_cuda<f16>(dh, a, dy, down, h, kind);
  }
}

}  // namespace tessera::ops
