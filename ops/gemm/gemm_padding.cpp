#include "ops/gemm/gemm_padding.h"

#include <algorithm>
#include <cstdint>

#include "ops/gemm/gemm_costs.h"
#include "ops/gemm/gemm_tf32.h"
#include "runtime/f32_math.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"
#include "tensor/kernels.h"

namespace tessera::ops {
namespace {

/// Elements in 16 bytes.
int64_t unit_of(DType dtype) {
  return 16 / int64_t(size_of(dtype));
}

constexpr int64_t kTile = 64;  // narrower results cost as much as a tile
constexpr double kSectorBytes = 32;

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
Tensor extended_into_padding(const Tensor& x, int64_t columns) {
  Layout layout = x.layout();
  layout.shape = layout.shape.with(-1, columns);
  return view(x, layout);
}

/// Of a tensor that is an operator's scratch: its padding is never read. Not a write that the tape must
/// hear of: the elements stay.
void zero_row_padding(const Tensor& x, int64_t columns) {
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
enum class PaddingMethod : uint8_t { unchanged, pads, zeroed_row_padding, copy };

/// An operand as rows: the dense dimension last.
struct Operand {
  Tensor x;
  int64_t rows, columns;  // rounded up
  PaddingMethod way;

  Operand(const Tensor& given, bool transposed, int64_t rows, int64_t columns, bool sums_columns)
      : x(transposed ? given.transpose(-1, -2) : given),
        rows(rows),
        columns(columns),
        way(PaddingMethod::copy) {
    if (rows != x.size(-2) || !aligned(x)) return;
    if (columns == x.size(-1)) {
      way = PaddingMethod::unchanged;
    } else if (sums_columns ? owns_scratch_padding(x, columns) : owns_row_padding(x, columns)) {
      way = sums_columns ? PaddingMethod::zeroed_row_padding : PaddingMethod::pads;
    }
  }

  double seconds(const PaddingCosts& c) const {
    const Shape shape = distinct(x).shape;
    const double matrices = double(shape.count()) / (double(x.size(-2)) * double(x.size(-1)));
    switch (way) {
      case PaddingMethod::unchanged:
      case PaddingMethod::pads:
        return 0;
      case PaddingMethod::zeroed_row_padding:
        return c.launch + matrices * double(x.size(-2)) * 2 * kSectorBytes / c.bytes_per_second;
      default:
        return c.launch + double(size_of(x.dtype())) *
                              (double(shape.count()) + matrices * double(rows) * double(columns)) /
                              c.bytes_per_second;
    }
  }

  Tensor make(bool transposed) const {
    Tensor made = x;
    if (way == PaddingMethod::copy) {
      made = padded_copy(x, rows, columns);
    } else if (way != PaddingMethod::unchanged) {
      if (way == PaddingMethod::zeroed_row_padding) zero_row_padding(x, columns);
      made = extended_into_padding(x, columns);
    }
    return transposed ? made.transpose(-1, -2) : made;
  }
};

double gemm_seconds(double rows, int64_t n, int64_t k, double bytes, double flops_per_second,
                    double bytes_per_second) {
  const double flops = 2 * rows * double(round_up(n, kTile)) * double(k);
  return std::max(flops / flops_per_second, bytes / bytes_per_second);
}

/// The GEMM with its extents rounded up. Only those along dense dimensions matter, and n always is one: that
/// of d.
struct PaddedGemm {
  int64_t m, n, k, to_m, to_n, to_k;

  explicit PaddedGemm(const CublasGemm& g) : m(g.d.size(-2)), n(g.d.size(-1)), k(g.a.size(-1)) {
    const int64_t unit = unit_of(g.a.dtype()), unit_n = g.transpose_b ? unit_of(g.d.dtype()) : unit;
    to_m = g.transpose_a ? round_up(m, unit) : m, to_n = round_up(n, unit_n);
    to_k = !g.transpose_a || g.transpose_b ? round_up(k, unit) : k;
  }
  bool changes() const { return to_m != m || to_n != n || to_k != k; }
  Operand left(const CublasGemm& g) const {
    return Operand(g.a, g.transpose_a, g.transpose_a ? to_k : to_m, g.transpose_a ? to_m : to_k,
                   !g.transpose_a);
  }
  Operand right(const CublasGemm& g) const {
    return Operand(g.b, g.transpose_b, g.transpose_b ? to_n : to_k, g.transpose_b ? to_k : to_n,
                   g.transpose_b);
  }
  bool in_place(const CublasGemm& g) const {
    return to_m == m && aligned(g.d) && (to_n == n || owns_row_padding(g.d, to_n));
  }
  bool copies_bias(const CublasGemm& g) const { return g.options.bias.defined() && to_n != n; }
};

/// A sum with d is rounded once, so what is added to it must not be rounded before.
DType scratch_dtype(const CublasGemm& g) {
  return g.options.accumulate ? DType::f32 : g.d.dtype();
}

/// Bytes of all operands and d, once.
double bytes_once(const CublasGemm& g) {
  return double(g.d.count()) * double(size_of(g.d.dtype())) +
         double(size_of(g.a.dtype())) *
             (double(distinct(g.a).shape.count()) + double(distinct(g.b).shape.count()));
}

Reason padded_lacks(const CublasGemm& g, const Gpu&) {
  if (size_of(g.a.dtype()) != 2 && !g.tf32) return "16 bits or TF32";
  if (std::min(g.d.size(-1), g.a.size(-1)) < 2 || (g.transpose_a && g.d.size(-2) == 1)) return "matrices";
  return PaddedGemm(g).changes() ? Reason() : "an odd extent";
}

Estimate padded_estimate(const CublasGemm& g, const Gpu& gpu) {
  const PaddingCosts& c = gemm_costs(gpu).padding;
  const PaddedGemm p(g);
  const double rows = double(g.d.count()) / double(p.n),
               of_d = double(g.d.count()) * double(size_of(g.d.dtype()));
  double extra = p.left(g).seconds(c) + p.right(g).seconds(c) + (p.copies_bias(g) ? c.launch : 0);
  if (!p.in_place(g))
    extra += c.launch +
             ((g.options.accumulate ? 2 : 1) * of_d +
              rows * double(p.to_m) / double(p.m) * double(p.to_n) * double(size_of(scratch_dtype(g)))) /
                 c.bytes_per_second;
  const double share = 2 / double(size_of(g.a.dtype()));  // of the rates
  const double fast = gemm_seconds(rows * double(p.to_m) / double(p.m), p.to_n, p.to_k, bytes_once(g),
                                   share * c.fast_flops, c.bytes_per_second);
  return {fast + extra, extra > 0 ? fast + extra : 0};
}

Estimate plain_estimate(const CublasGemm& g, const Gpu& gpu) {
  if (!padded_lacks(g, gpu).empty()) return Estimate::otherwise();
  const PaddingCosts& c = gemm_costs(gpu).padding;
  const double rows = double(g.d.count()) / double(g.d.size(-1)), share = 2 / double(size_of(g.a.dtype()));
  return {gemm_seconds(rows, g.d.size(-1), g.a.size(-1), bytes_once(g), share * c.slow_flops, c.slow_bytes)};
}

void run_padded(const CublasGemm& g) {
  const PaddedGemm p(g);
  const MultiplyOptions& options = g.options;
  const bool in_place = p.in_place(g);
  MultiplyOptions padded{.alpha = options.alpha, .accumulate = in_place && options.accumulate};
  if (options.bias.defined()) {
    const Tensor bias = options.bias.detach();
    padded.bias =
        p.copies_bias(g) ? padded_copy(bias.rank() < 2 ? bias.reshape({1, p.n}) : bias, 1, p.to_n) : bias;
  }
  const Tensor result =
      in_place ? extended_into_padding(g.d.detach(), p.to_n)
               : Tensor::empty(g.d.shape().with(-2, p.to_m).with(-1, p.to_n), scratch_dtype(g), g.d.device());
  multiply(result, p.left(g).make(g.transpose_a), p.right(g).make(g.transpose_b), padded);
  if (in_place) return;
  const Tensor wanted = result.slice(-2, 0, p.m).slice(-1, 0, p.n);
  if (options.accumulate) {
    accumulate(g.d.detach(), wanted);
  } else {
    g.d.copy_from(wanted);
  }
}

constexpr const char* kPadded[] = {"cublas padded", nullptr};

/// What cuBLASLt is given. "cublas" also answers to "cublas padded", which rounds whatever can be rounded.
constexpr Variant<CublasGemm> kVariants[] = {
    {"cublas tf32 transposed", tf32_transposed_lacks, tf32_transposed_estimate, run_tf32_transposed},
    {"cublas tf32 parts", tf32_parts_lacks, tf32_parts_estimate, run_tf32_parts},
    {"cublas", lacks_nothing<CublasGemm>, plain_estimate, nullptr, kPadded},
    {"cublas padded", padded_lacks, padded_estimate, run_padded}};

}  // namespace

std::string describe_problem(const CublasGemm& g) {
  return text_of(describe(g.d), " = ", describe(g.a), " times ", describe(g.b));
}

bool run_rearranged(const CublasGemm& gemm) {
  const auto& variant = choose("gemm", kVariants, gemm, Gpu(gemm.d.device()));
  if (variant.launch) variant.launch(gemm);
  return variant.launch != nullptr;
}

bool rounds_in_place(const CublasGemm& g) {
  const PaddedGemm p(g);
  const auto in_place = [](const Operand& x) {
    return x.way == PaddingMethod::unchanged || x.way == PaddingMethod::pads;
  };
  return p.changes() && p.in_place(g) && !p.copies_bias(g) && in_place(p.left(g)) && in_place(p.right(g));
}

std::string_view cublas_variant(const CublasGemm& gemm, const Gpu& gpu) {
  return choose("gemm", kVariants, gemm, gpu).name;
}

bool pads_to_long(const Tensor& a) {
  const bool tensor_cores =
      size_of(a.dtype()) == 2 || (a.dtype() == DType::f32 && f32_math() == F32Math::tf32);
  const std::string* const forced = ForceVariant::forced("gemm");
  if (!a.device().is_cuda() || !tensor_cores || (forced && *forced == "cublas") || a.count() == 0)
    return false;
  const int64_t columns = a.storage()->pitch_bytes / int64_t(size_of(a.dtype()));
  if (columns <= a.size(-1) || !aligned(a) || !owns_row_padding(a, columns)) return false;
  const Tensor x = extended_into_padding(a, columns).transpose(-1, -2);
  return x.can_reshape({x.count() / x.size(-1), x.size(-1)});
}

std::pair<Tensor, Tensor> pad_to_long(const Tensor& a, const Tensor& b) {
  const int64_t columns = a.storage()->pitch_bytes / int64_t(size_of(a.dtype()));
  Tensor x;
  if (owns_scratch_padding(a, columns)) {
    zero_row_padding(a, columns);
    x = extended_into_padding(a, columns);
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
