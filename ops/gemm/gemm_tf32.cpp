#include "ops/gemm/gemm_tf32.h"

#include <algorithm>

#include "runtime/tuning.h"
#include "tensor/kernels.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

// Rates of an H200 with b along and across k, in TFLOP/s: 336 and 213 (T = 36096, 1368 -> 512), 324 and 278
// (512 -> 1368), 390 and 335 (T = 65536, 3072 -> 768). A copy of a weight that L2 holds.
constexpr double kAlong = 335e12, kAcross = 280e12;
constexpr double kCopyBytes = 2e12, kLaunchSeconds = 4e-6, kMostCopied = 64 << 20;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// Whether a copy of b with k along its rows costs less than it gains.
bool transposing_pays(double rows, double n, double k) {
  const double flops = 2 * rows * n * k;
  if (4 * n * k > kMostCopied) return false;
  return flops * (1 / kAcross - 1 / kAlong) > kLaunchSeconds + 8 * n * k / kCopyBytes;
}

/// In how many parts of equal length k is summed: 1 unless the tiles of d (128 x 128 of them) take more than
/// one wave of SMs and leave a third of the last one's idle. (m = 3072, n = 768, k = 65536: 144 tiles on 132
/// SMs run at 143 TFLOP/s; below one wave cuBLASLt splits k itself.)
int64_t parts_of_k(int64_t m, int64_t n, int64_t k, int multiprocessors) {
  constexpr int64_t kTile = 128, kLong = 8192, kMostWaves = 3, kMostBytes = int64_t(128) << 20;
  constexpr double kBusy = 0.7;
  const int64_t tiles = ceil_div(m, kTile) * ceil_div(n, kTile);
  const auto busy = [&](int64_t blocks) {
    return double(blocks) / double(ceil_div(blocks, multiprocessors) * multiprocessors);
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

bool multiply_tf32(const Tensor& d, const Tensor& a, const Tensor& b, const MultiplyOptions& options,
                   bool transpose_a, bool transpose_b) {
  if (transpose_b || tuning::ForceRow::forced("gemm") || b.rank() != 2) return false;
  const int64_t m = d.size(-2), n = d.size(-1), k = a.size(-1);
  if (!transpose_a && transposing_pays(double(d.count()) / double(n), double(n), double(k))) {
    const Tensor along = as_scratch(Tensor::empty({n, k}, DType::f32, b.device()));
    if constexpr (kCuda) transposed_copy_cuda(along, b);
    multiply(d, a, along.transpose(0, 1), options);
    return true;
  }
  if (!transpose_a || a.rank() != 2 || d.rank() != 2 || options.bias.defined()) return false;
  const int64_t parts = parts_of_k(m, n, k, d.device().multiprocessors());
  if (parts == 1) return false;
  // [k, m] and [k, n] cut along k are batches of matrices.
  const Tensor rows = a.transpose(0, 1);
  const auto cut = [&](const Tensor& x) {
    Layout layout = x.layout();
    layout.shape = {parts, k / parts, x.size(1)};
    layout.strides = {x.layout().stride(0) * (k / parts), x.layout().stride(0), x.layout().stride(1)};
    return Tensor::view_of(x.storage(), layout, x.dtype());
  };
  const Tensor sums = Tensor::empty({parts, m, n}, DType::f32, d.device());
  multiply(sums, cut(rows).transpose(1, 2), cut(b), {.alpha = options.alpha});
  if (!options.accumulate) d.copy_from(sums.select(0, 0));
  for (int64_t part = options.accumulate ? 0 : 1; part < parts; ++part) accumulate(d, sums.select(0, part));
  return true;
}

}  // namespace tessera::ops
