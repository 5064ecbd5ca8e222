#include "ops/gemm/gemm_padding.h"

#include <algorithm>
#include <cstdint>

#include "runtime/f32_math.h"
#include "runtime/tuning.h"
#include "tensor/kernels.h"

namespace tessera::ops {
namespace {

/// Elements in 16 bytes.
int64_t unit_of(DType dtype) {
  return 16 / int64_t(size_of(dtype));
}

// Rates in 16 bits of an H100 SXM: T = 36096, 512 -> 1365 takes 0.57 ms as it is, 512 -> 1368 takes 0.096
// ms. Those of TF32 count as half of them. A kernel of a few microseconds costs its launch and its tail
// whatever it moves.
constexpr double kBytesPerSecond = 2.5e12, kLaunchSeconds = 3e-6;
constexpr double kSlowFlops = 80e12, kFastFlops = 450e12;
constexpr int64_t kTile = 64;  // narrower results cost as much as a tile
constexpr double kSectorBytes = 32;

int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

/// Whether vectors of 16 bytes can be loaded from the start of every row on.
bool aligned(const Tensor& x) {
  const int64_t unit = unit_of(x.dtype());
  bool fits = reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  for (int dim = 0; dim + 1 < x.rank(); ++dim)
    fits = fits && (x.size(dim) == 1 || x.layout().stride(dim) % unit == 0);
  return fits;
}

/// x with a single matrix where a leading dimension is expanded.
Layout distinct(const Tensor& x) {
  Layout layout = x.layout();
  for (int dim = 0; dim + 2 < x.rank(); ++dim)
    if (layout.stride(dim) == 0) layout.shape = layout.shape.with(dim, 1);
  return layout;
}

Tensor view(const Tensor& x, const Layout& layout) {
  return Tensor::view_of(x.storage(), layout, x.dtype());
}

/// x with its rows prolonged into their pads.
Tensor prolonged(const Tensor& x, int64_t columns) {
  Layout layout = x.layout();
  layout.shape = layout.shape.with(-1, columns);
  return view(x, layout);
}

/// Of a tensor that is an operator's scratch: its padding is never read. Not a write that the tape must
/// hear of: the elements stay.
void zero_pads(const Tensor& x, int64_t columns) {
  Layout pads = distinct(x);
  pads.offset += x.size(-1);
  pads.shape = pads.shape.with(-1, columns - x.size(-1));
  if constexpr (kCuda) fill_cuda(view(x, pads), 0);
}

/// A copy of x [..., r, c] as [..., rows, columns]; what was expanded stays so.
Tensor padded_copy(const Tensor& x, int64_t rows, int64_t columns) {
  const Tensor once = view(x, distinct(x));
  const Tensor y = Tensor::empty(once.shape().with(-2, rows).with(-1, columns), x.dtype(), x.device());
  if constexpr (kCuda) padded_copy_cuda(y, once);
  return y.expand(x.shape().with(-2, rows).with(-1, columns));
}

/// How an operand gets its extents.
enum class Way : uint8_t { as_it_lies, pads, zeroed_pads, copy };

/// An operand as rows: the dense dimension last.
struct Operand {
  Tensor x;
  int64_t rows, columns;  // rounded up
  Way way;

  Operand(const Tensor& given, bool transposed, int64_t rows, int64_t columns, bool sums_columns)
      : x(transposed ? given.transpose(-1, -2) : given), rows(rows), columns(columns), way(Way::copy) {
    if (rows != x.size(-2) || !aligned(x)) return;
    if (columns == x.size(-1)) {
      way = Way::as_it_lies;
    } else if (sums_columns ? owns_scratch_pads(x, columns) : owns_pads(x, columns)) {
      way = sums_columns ? Way::zeroed_pads : Way::pads;
    }
  }

  double seconds() const {
    const Shape shape = distinct(x).shape;
    const double matrices = double(shape.count()) / (double(x.size(-2)) * double(x.size(-1)));
    switch (way) {
      case Way::as_it_lies:
      case Way::pads:
        return 0;
      case Way::zeroed_pads:
        return kLaunchSeconds + matrices * double(x.size(-2)) * 2 * kSectorBytes / kBytesPerSecond;
      default:
        return kLaunchSeconds + double(size_of(x.dtype())) *
                                    (double(shape.count()) + matrices * double(rows) * double(columns)) /
                                    kBytesPerSecond;
    }
  }

  Tensor make(bool transposed) const {
    Tensor made = x;
    if (way == Way::copy) {
      made = padded_copy(x, rows, columns);
    } else if (way != Way::as_it_lies) {
      if (way == Way::zeroed_pads) zero_pads(x, columns);
      made = prolonged(x, columns);
    }
    return transposed ? made.transpose(-1, -2) : made;
  }
};

double product_seconds(double rows, int64_t n, int64_t k, double bytes, double flops_per_second) {
  const double flops = 2 * rows * double(round_up(n, kTile)) * double(k);
  return std::max(flops / flops_per_second, bytes / kBytesPerSecond);
}

}  // namespace

bool multiply_padded(const Tensor& d, const Tensor& a, const Tensor& b, const MultiplyOptions& options,
                     bool transpose_a, bool transpose_b) {
  const auto forced = tuning::ForceRow::forced("gemm");
  if (forced == 0) return false;
  const int64_t m = d.size(-2), n = d.size(-1), k = a.size(-1), unit = unit_of(a.dtype());
  if (transpose_a && m == 1) return false;
  // Only the extents along dense dimensions matter, and n always is one: that of d.
  const int64_t unit_n = transpose_b ? unit_of(d.dtype()) : unit;
  const int64_t to_m = transpose_a ? round_up(m, unit) : m, to_n = round_up(n, unit_n),
                to_k = !transpose_a || transpose_b ? round_up(k, unit) : k;
  if (to_m == m && to_n == n && to_k == k) return false;

  const Operand left(a, transpose_a, transpose_a ? to_k : to_m, transpose_a ? to_m : to_k, !transpose_a);
  const Operand right(b, transpose_b, transpose_b ? to_n : to_k, transpose_b ? to_k : to_n, transpose_b);
  const bool in_place = to_m == m && aligned(d) && (to_n == n || owns_pads(d, to_n));
  const bool copies_bias = options.bias.defined() && to_n != n;
  // A sum with d is rounded once, so what is added to it must not be rounded before.
  const DType scratch = options.accumulate ? DType::f32 : d.dtype();
  const double rows = double(d.count()) / double(n), of_d = double(d.count()) * double(size_of(d.dtype()));
  double extra = left.seconds() + right.seconds() + (copies_bias ? kLaunchSeconds : 0);
  if (!in_place)
    extra += kLaunchSeconds + ((options.accumulate ? 2 : 1) * of_d +
                               rows * double(to_m) / double(m) * double(to_n) * double(size_of(scratch))) /
                                  kBytesPerSecond;
  if (extra > 0 && forced != 1) {
    const double size = double(size_of(a.dtype())), share = 2 / size;  // of the rates
    const double bytes =
        of_d + size * (double(distinct(a).shape.count()) + double(distinct(b).shape.count()));
    const double slow = product_seconds(rows, n, k, bytes, share * kSlowFlops);
    const double fast =
        product_seconds(rows * double(to_m) / double(m), to_n, to_k, bytes, share * kFastFlops);
    if (fast + extra >= slow) return false;
  }

  MultiplyOptions padded{.alpha = options.alpha, .accumulate = in_place && options.accumulate};
  if (options.bias.defined()) {
    const Tensor bias = options.bias.detach();
    padded.bias = copies_bias ? padded_copy(bias.rank() < 2 ? bias.reshape({1, n}) : bias, 1, to_n) : bias;
  }
  const Tensor result = in_place
                            ? prolonged(d.detach(), to_n)
                            : Tensor::empty(d.shape().with(-2, to_m).with(-1, to_n), scratch, d.device());
  multiply(result, left.make(transpose_a), right.make(transpose_b), padded);
  if (in_place) return true;
  const Tensor wanted = result.slice(-2, 0, m).slice(-1, 0, n);
  if (options.accumulate) {
    accumulate(d.detach(), wanted);
  } else {
    d.copy_from(wanted);
  }
  return true;
}

bool pads_to_long(const Tensor& a) {
  const bool tensor_cores =
      size_of(a.dtype()) == 2 || (a.dtype() == DType::f32 && f32_math() == F32Math::tf32);
  if (!a.device().is_cuda() || !tensor_cores || tuning::ForceRow::forced("gemm") == 0 || a.count() == 0)
    return false;
  const int64_t columns = a.storage()->pitch_bytes / int64_t(size_of(a.dtype()));
  if (columns <= a.size(-1) || !aligned(a) || !owns_pads(a, columns)) return false;
  const Tensor x = prolonged(a, columns).transpose(-1, -2);
  return x.can_reshape({x.count() / x.size(-1), x.size(-1)});
}

std::pair<Tensor, Tensor> pad_to_long(const Tensor& a, const Tensor& b) {
  const int64_t columns = a.storage()->pitch_bytes / int64_t(size_of(a.dtype()));
  Tensor x;
  if (owns_scratch_pads(a, columns)) {
    zero_pads(a, columns);
    x = prolonged(a, columns);
  } else {
    // A copy with m first, so that the leading dimensions and the columns continue each other.
    Tensor from = a;
    for (int dim = a.rank() - 2; dim > 0; --dim) from = from.transpose(dim, dim - 1);
    x = padded_copy(from, from.size(-2), columns);
    for (int dim = 0; dim + 2 < a.rank(); ++dim) x = x.transpose(dim, dim + 1);
  }
  x = x.transpose(-1, -2);
  // An expanded b is copied as often as it counts.
  const Tensor y = Tensor::empty(b.shape().with(-2, columns), b.dtype(), b.device());
  if constexpr (kCuda) padded_copy_cuda(y, b);
  return {x.reshape({x.count() / x.size(-1), x.size(-1)}), y.reshape({y.count() / y.size(-1), y.size(-1)})};
}

}  // namespace tessera::ops
