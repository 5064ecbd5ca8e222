#include <initializer_list>
#include <limits>

#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_names_internal.h"
#include "ops/mlp/mlp_kernels.h"
#include "runtime/has_cuda.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

/// Whether TMA can read the matrix, and, `written`, write it.
bool is_tma_compatible(const Tensor& x, bool written) {
  if (!x.defined()) return true;
  const int64_t columns = x.size(1), unit = 16 / int64_t(size_of(x.dtype()));
  return x.count() > 0 && x.size(0) < std::numeric_limits<int32_t>::max() / 2 &&
         reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && (columns == 1 || x.layout().stride(1) == 1) &&
         x.layout().stride(0) >= columns && x.layout().stride(0) % unit == 0 &&
         (!written || columns % unit == 0 || owns_row_padding(x, (columns + unit - 1) / unit * unit));
}

/// A GEMM of an MLP next to its activation: the tensors that it writes and reads.
struct Fused {
  Activation kind;
  std::initializer_list<const Tensor*> written, read;
};

std::string describe_problem(const Fused& fused) {
  const Tensor* const* const read = fused.read.begin();
  return text_of("a GEMM with ", name_of(fused.kind), " of ", describe(*read[0]), " and ",
                 describe(*read[1]));
}

Reason epilogue_lacks(const Fused& fused, const Gpu& gpu) {
  const DType dtype = (*fused.written.begin())->dtype();
  if (gpu.major != 9) return "a GPU of compute capability 9.0";
  if (dtype != DType::bf16 && dtype != DType::f16) return "bf16 or f16";
  if (fused.kind == Activation::none) return "an activation";
  for (const Tensor* x : fused.written)
    if (!is_tma_compatible(*x, true)) return "results that TMA can write";
  for (const Tensor* x : fused.read)
    if (!is_tma_compatible(*x, false)) return "operands that TMA can read";
  return {};
}

/// The activation in the GEMM's epilogue, or as a kernel of its own. Forced by the name of the GEMM's
/// variant.
constexpr Variant<Fused, void()> kVariants[] = {
    {"epilogue", epilogue_lacks, is_preferred<Fused>, nullptr, kWgmmaVariants},
    {"separate", lacks_nothing<Fused>, is_otherwise<Fused>, nullptr, kForcedVariants}};

bool fuses(const Fused& fused, const Gpu& gpu) {
  return choose_index("gemm", kVariants, fused, gpu) == 0;
}

}  // namespace

bool fuses_up(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, Activation kind,
              const Gpu& gpu) {
  return fuses({kind, {&a, &h}, {&x, &up}}, gpu);
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
                         const Tensor& h, Activation kind, const Gpu& gpu) {
  return fuses({kind, {&dh, &a}, {&dy, &down, &h}}, gpu);
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
