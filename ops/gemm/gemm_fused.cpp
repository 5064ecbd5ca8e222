#include "ops/gemm/gemm_fused_internal.h"

#include <limits>

#include "ops/gemm/gemm_models_internal.h"
#include "ops/gemm/gemm_names_internal.h"
#include "runtime/integers.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

int64_t tma_unit(const Tensor& x) {
  return 16 / int64_t(size_of(x.dtype()));
}

/// Places in kGemmTiles.
constexpr int kSquare = 0, kWide = 6;
static_assert(kGemmTiles[kSquare].columns == 128 && kGemmTiles[kWide].columns == 256);

/// Only if the epilogue lacks nothing.
Gemm gemm_of(const FusedGemm& fused) {
  const Tensor &d = *fused.written[0], &a = *fused.read[0], &b = *fused.read[1];
  Gemm g{.m = d.size(-2), .n = d.size(-1), .k = a.size(-1), .in = d.dtype(), .out = d.dtype()};
  if (fused.gated) g.n *= 2;
  g.transpose_b = fused.transposed, g.owns_d_padding = true;
  g.a = a.raw(), g.lda = a.layout().stride(-2);
  g.b = b.raw(), g.ldb = b.layout().stride(-2);
  g.d = d.raw(), g.ldd = d.layout().stride(-2);
  if (d.rank() == 3)
    g.batch = d.size(0), g.stride_a = a.layout().stride(0), g.stride_b = b.layout().stride(0),
    g.stride_d = d.layout().stride(0);
  return g;
}

/// Tiles whose k is not split: too slow where they are few and k is long.
Estimate estimate_epilogue(const FusedGemm& fused, const Gpu& gpu) {
  const Gemm g = gemm_of(fused);
  const int64_t tiles = g.batch * ceil_div(g.m, 128) * ceil_div(g.n, 128);
  if (2 * tiles > gpu.multiprocessors) return Estimate::preferred();
  return {choose_gemm(g, gpu, kSquare, false).seconds};
}

/// A GEMM as multiply would run it, and the passes. Forced GEMMs of tiles have the epilogue wherever it can
/// run.
Estimate estimate_separate(const FusedGemm& fused, const Gpu& gpu) {
  constexpr double kClearly = 0.85;  // the part of the other's time that it may take: the models are 14 % off
  if (ForceVariant::forced("gemm") || !fused_gemm_lacks(fused, gpu).empty()) return Estimate::otherwise();
  const Gemm g = gemm_of(fused);
  const GemmOnGpu& on = gemm_on_gpu(g, gpu);
  const PaddingCosts& pass = on.costs().padding;
  const double bytes = fused.moved * double(fused.written[0]->count()) * double(size_of(g.out));
  const double seconds = on.unforced_seconds() + fused.passes * pass.launch + bytes / pass.bytes_per_second;
  return {seconds, seconds / kClearly};
}

/// Forced by the name of the GEMM's variant.
constexpr Variant<FusedGemm, void()> kVariants[] = {
    {"epilogue", fused_gemm_lacks, estimate_epilogue, nullptr, kWgmmaVariants},
    {"separate", lacks_nothing<FusedGemm>, estimate_separate, nullptr, kForcedVariants}};

}  // namespace

std::string describe_problem(const FusedGemm& fused) {
  return text_of("a GEMM with ", fused.function ? fused.function : "none", " of ", describe(*fused.read[0]),
                 " and ", describe(*fused.read[1]));
}

bool is_tma_readable(const Tensor& x) {
  const int64_t columns = x.size(-1);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  return x.count() > 0 && x.size(-2) < kMost && columns < kMost &&
         reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && (columns == 1 || x.layout().stride(-1) == 1) &&
         x.layout().stride(-2) >= columns && x.layout().stride(-2) % tma_unit(x) == 0 &&
         (x.rank() == 2 || x.size(0) == 1 || x.layout().stride(0) % tma_unit(x) == 0);
}

bool is_tma_writable(const Tensor& x) {
  const int64_t columns = x.size(-1), unit = tma_unit(x);
  return is_tma_readable(x) && (columns % unit == 0 || owns_row_padding(x, round_up(columns, unit)));
}

Reason fused_gemm_lacks(const FusedGemm& fused, const Gpu& gpu) {
  const DType dtype = fused.written[0]->dtype();
  if (gpu.major != 9) return "a GPU of compute capability 9.0";
  if (dtype != DType::bf16 && dtype != DType::f16) return "bf16 or f16";
  if (!fused.function) return "an activation";
  for (const Tensor* x : fused.written)
    if (x && x->defined() && !is_tma_writable(*x)) return "results that TMA can write";
  for (const Tensor* x : fused.read)
    if (x && x->defined() && !is_tma_readable(*x)) return "operands that TMA can read";
  return {};
}

bool fused_gemm_runs(const FusedGemm& fused, const Gpu& gpu) {
  return choose_index("gemm", kVariants, fused, gpu) == 0;
}

bool fused_gemm_is_wide(const FusedGemm& fused, const Gpu& gpu) {
  constexpr double kAsFast = 1.05;  // where the models are this close, the wide tile was the faster
  const Gemm g = gemm_of(fused);
  return choose_gemm(g, gpu, kWide, false).seconds < kAsFast * choose_gemm(g, gpu, kSquare, false).seconds;
}

}  // namespace tessera::ops
