#include "ops/gemm/gemm_tf32.h"

#include <algorithm>

#include "ops/gemm/gemm_costs.h"
#include "ops/gemm/gemm_padding.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"
#include "tensor/kernels.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

/// Whether a copy of b with k along its rows costs less than it gains.
bool transposing_pays(double rows, double n, double k, const Tf32Costs& c) {
  constexpr int64_t kMostCopied = 64 << 20;
  const double flops = 2 * rows * n * k;
  if (4 * n * k > kMostCopied) return false;
  return flops * (1 / c.across - 1 / c.along) > c.launch + 8 * n * k / c.copy_bytes;
}

/// In how many parts of equal length k is summed: 1 unless the tiles of d (128 x 128 of them) take more than
/// one wave of SMs and leave a third of the last one's idle. (m = 3072, n = 768, k = 65536: 144 tiles on 132
/// SMs run at 143 TFLOP/s; below one wave cuBLASLt splits k itself.)
int64_t parts_of_k(int64_t m, int64_t n, int64_t k, int multiprocessors) {
  constexpr int64_t kTile = 128, kLong = 8192, kMostWaves = 3, kMostBytes = int64_t(128) << 20;
  constexpr double kBusy = 0.7;
  const int64_t tiles = ceil_div(m, kTile) * ceil_div(n, kTile);
  const auto busy = [&](int64_t blocks) {
    return double(blocks) / double(round_up(blocks, multiprocessors));
  };
  if (k < kLong || tiles <= multiprocessors || tiles > kMostWaves * multiprocessors || busy(tiles) >= kBusy)
    return 1;
  int64_t best = 1;
  for (int64_t parts = 2; parts <= 8; ++parts)
    if (k % parts == 0 && parts * m * n * 4 <= kMostBytes && busy(parts * tiles) > busy(best * tiles) + 0.02)
      best = parts;
  return best;
}

}  // namespace

Reason tf32_transposed_lacks(const CublasGemm& g, const Gpu&) {
  if (!g.tf32) return "f32 in TF32";
  if (g.transpose_a || g.transpose_b || g.b.rank() != 2) return "a with dense k, and b one matrix without";
  return {};
}

Estimate tf32_transposed_estimate(const CublasGemm& g, const Gpu& gpu) {
  const int64_t n = g.d.size(-1), k = g.a.size(-1);
  const bool pays =
      transposing_pays(double(g.d.count()) / double(n), double(n), double(k), gemm_costs(gpu).tf32);
  return pays ? Estimate::preferred() : Estimate::slower();
}

void run_tf32_transposed(const CublasGemm& g) {
  const Tensor along = as_scratch(Tensor::empty({g.d.size(-1), g.a.size(-1)}, DType::f32, g.b.device()));
  if constexpr (kCuda) transposed_copy_cuda(along, g.b);
  multiply(g.d, g.a, along.transpose(0, 1), g.options);
}

Reason tf32_parts_lacks(const CublasGemm& g, const Gpu&) {
  if (!g.tf32) return "f32 in TF32";
  if (!g.transpose_a || g.transpose_b || g.a.rank() != 2 || g.b.rank() != 2 || g.d.rank() != 2 ||
      g.options.bias.defined())
    return "matrices whose k is not dense, and no bias";
  return {};
}

Estimate tf32_parts_estimate(const CublasGemm& g, const Gpu& gpu) {
  const int64_t parts = parts_of_k(g.d.size(0), g.d.size(1), g.a.size(1), gpu.multiprocessors);
  return parts > 1 ? Estimate::preferred() : Estimate::slower();
}

void run_tf32_parts(const CublasGemm& g) {
  const int64_t m = g.d.size(0), n = g.d.size(1), k = g.a.size(1);
  const int64_t parts = parts_of_k(m, n, k, g.d.device().multiprocessors());
  // [k, m] and [k, n] cut along k are batches of matrices.
  const auto cut = [&](const Tensor& x) {
    Layout layout = x.layout();
    layout.shape = {parts, k / parts, x.size(1)};
    layout.strides = {x.layout().stride(0) * (k / parts), x.layout().stride(0), x.layout().stride(1)};
    return Tensor::view_of(x.storage(), layout, x.dtype());
  };
  const Tensor sums = Tensor::empty({parts, m, n}, DType::f32, g.d.device());
  multiply(sums, cut(g.a.transpose(0, 1)).transpose(1, 2), cut(g.b), {.alpha = g.options.alpha});
  if (!g.options.accumulate) g.d.copy_from(sums.select(0, 0));
  for (int64_t part = g.options.accumulate ? 0 : 1; part < parts; ++part)
    accumulate(g.d, sums.select(0, part));
}

}  // namespace tessera::ops
