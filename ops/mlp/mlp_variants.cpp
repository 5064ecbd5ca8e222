#include <initializer_list>
#include <limits>

#include "ops/gemm/gemm_models_internal.h"
#include "ops/gemm/gemm_names_internal.h"
#include "ops/mlp/mlp_kernels.h"
#include "runtime/has_cuda.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

/// Whether TMA can read the matrix, or the batch of them, and, `written`, write it.
bool is_tma_compatible(const Tensor& x, bool written) {
  if (!x.defined()) return true;
  const int64_t columns = x.size(-1), unit = 16 / int64_t(size_of(x.dtype()));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  return x.count() > 0 && x.size(-2) < kMost && columns < kMost &&
         reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && (columns == 1 || x.layout().stride(-1) == 1) &&
         x.layout().stride(-2) >= columns && x.layout().stride(-2) % unit == 0 &&
         (x.rank() == 2 || x.size(0) == 1 || x.layout().stride(0) % unit == 0) &&
         (!written || columns % unit == 0 || owns_row_padding(x, (columns + unit - 1) / unit * unit));
}

/// A GEMM of an MLP next to its activation: the tensors that it writes and reads, of which the first two are
/// the GEMM's operands.
struct Fused {
  Activation kind;
  bool transposed;  // the GEMM multiplies by the transpose of the second operand
  int passes;       // over rows like the result's, that the epilogue saves
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

/// Only if the epilogue lacks nothing.
Gemm gemm_of(const Fused& fused) {
  const Tensor &d = **fused.written.begin(), &a = **fused.read.begin(), &b = *fused.read.begin()[1];
  Gemm g{.m = d.size(-2), .n = d.size(-1), .k = a.size(-1), .in = d.dtype(), .out = d.dtype()};
  g.transpose_b = fused.transposed, g.owns_d_padding = true;
  g.a = a.raw(), g.lda = a.layout().stride(-2);
  g.b = b.raw(), g.ldb = b.layout().stride(-2);
  g.d = d.raw(), g.ldd = d.layout().stride(-2);
  if (d.rank() == 3)
    g.batch = d.size(0), g.stride_a = a.layout().stride(0), g.stride_b = b.layout().stride(0),
    g.stride_d = d.layout().stride(0);
  return g;
}

/// Tiles of 128 x 128, the first of kGemmTiles, whose k is not split: too slow where they are few and k is
/// long.
Estimate estimate_epilogue(const Fused& fused, const Gpu& gpu) {
  const Gemm g = gemm_of(fused);
  const int64_t tiles = g.batch * ((g.m + 127) / 128) * ((g.n + 127) / 128);
  if (2 * tiles > gpu.multiprocessors) return Estimate::preferred();
  return {choose_gemm(g, gpu, 0, false).seconds};
}

/// A GEMM as multiply would run it, and the passes, each of which reads one or two tensors and writes one.
/// Forced GEMMs of tiles have the epilogue wherever it can run.
Estimate estimate_separate(const Fused& fused, const Gpu& gpu) {
  constexpr double kClearly = 0.85;  // the part of the other's time that it may take: the models are 14 % off
  if (ForceVariant::forced("gemm") || !epilogue_lacks(fused, gpu).empty()) return Estimate::otherwise();
  const Gemm g = gemm_of(fused);
  const GemmOnGpu& on = gemm_on_gpu(g, gpu);
  const PaddingCosts& pass = on.costs().padding;
  const std::string_view variant = gemm_variant_unforced(on);
  const double gemm = variant == "wgmma"    ? on.wgmma().seconds
                      : variant == "narrow" ? on.narrow().seconds
                                            : on.cublas_seconds();
  const double bytes = 3 * double(g.batch) * double(g.m) * double(g.n) * double(size_of(g.out));
  const double seconds = gemm + fused.passes * (pass.launch + bytes / pass.bytes_per_second);
  return {seconds, seconds / kClearly};
}

/// The activation in the GEMM's epilogue, or as a kernel of its own. Forced by the name of the GEMM's
/// variant.
constexpr Variant<Fused, void()> kVariants[] = {
    {"epilogue", epilogue_lacks, estimate_epilogue, nullptr, kWgmmaVariants},
    {"separate", lacks_nothing<Fused>, estimate_separate, nullptr, kForcedVariants}};

bool fuses(const Fused& fused, const Gpu& gpu) {
  return choose_index("gemm", kVariants, fused, gpu) == 0;
}

}  // namespace

bool fuses_up(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, Activation kind,
              const Gpu& gpu) {
  return fuses({kind, true, 1, {&a, &h}, {&x, &up}}, gpu);
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
  return fuses({kind, false, a.defined() ? 2 : 1, {&dh, &a}, {&dy, &down, &h}}, gpu);
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
