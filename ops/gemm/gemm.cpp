#include "ops/gemm/gemm.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "autograd/tape.h"
#include "ops/gemm/gemm_models_internal.h"
#include "ops/gemm/gemm_names_internal.h"
#include "ops/gemm/gemm_padding.h"
#include "ops/gemm/gemm_tf32.h"
#include "runtime/f32_math.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"
#include "tensor/elementwise.h"
#include "tensor/kernels.h"
#include "tensor/pads.h"
#include "tensor/precision.h"

namespace tessera::ops {
namespace {

/// Rows, columns and k that kernels and cuBLASLt count in 32 bits.
constexpr int64_t kMostExtent = int64_t{1} << 30;

bool is_half(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::f16;
}

/// An r x c matrix with these strides as BLAS takes it.
struct Stored {
  bool fits = false;
  bool transposed = false;  // its columns are the dense ones
  int64_t ld = 0;
};

/// Of a single row or column the distance to the next is free: one that keeps vectors aligned.
Stored stored(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, DType dtype) {
  if (columns <= 1 ? rows <= 1 || row_stride != 1
                   : column_stride == 1 && (rows <= 1 || row_stride >= columns))
    return {rows <= 1 || row_stride >= 1, false, rows > 1 ? row_stride : row_pitch(columns, dtype)};
  const bool fits = (rows <= 1 || row_stride == 1) && (columns <= 1 || column_stride >= rows);
  return {fits, true, columns > 1 ? column_stride : row_pitch(rows, dtype)};
}

Stored stored(const Tensor& x) {
  return stored(x.size(-2), x.size(-1), x.layout().stride(-2), x.layout().stride(-1), x.dtype());
}

Shape leading(const Tensor& x) {
  return Shape(x.shape().sizes().first(size_t(x.rank() - 2)));
}

Shape joined(const Shape& lead, int64_t rows, int64_t columns) {
  return lead.inserted(lead.rank(), rows).inserted(lead.rank() + 1, columns);
}

/// Where the rows of `x` [..., r, c] lie: a layout over [..., r], or over [..., 1] if they stand still.
Layout rows_of(const Tensor& x, bool move) {
  if (!x.defined() || x.rank() < 2) return {};
  Layout layout = x.layout();
  layout.shape = x.shape().without(-1);
  if (!move) layout.shape = layout.shape.with(-1, 1);
  return layout;
}

/// The product in f32 of widened copies, rounded once.
void multiply_widened(const Tensor& d, const Tensor& a, const Tensor& b, const MultiplyOptions& options) {
  const auto wide = [](const Tensor& x) { return x.defined() ? x.detach().to(DType::f32) : Tensor(); };
  const Tensor sum = Tensor::empty(d.shape(), DType::f32, d.device());
  if (options.accumulate) sum.copy_from(d);
  multiply(sum, wide(a), wide(b),
           {.alpha = options.alpha,
            .accumulate = options.accumulate,
            .bias = wide(options.bias),
            .residual = wide(options.residual)});
  d.copy_from(sum);
}

/// Whether gemm_cuda takes the bias along: vectors and edges are where cuBLASLt's epilogues have gaps.
bool fuses_bias(const Gemm& g) {
  const auto aligned = [](const void* pointer, int64_t stride, DType dtype) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * int64_t(size_of(dtype)) % 16 == 0;
  };
  return std::min({g.m, g.n, g.k}) > 1 && g.in == g.out && aligned(g.d, g.ldd, g.out) &&
         aligned(g.d, g.stride_d, g.out) && aligned(g.bias, g.stride_bias, g.in);
}

/// Makes a batch one product where a stands still and the columns of b, d and the bias go on from matrix to
/// matrix: groups that share their input.
void fold_batch(Gemm& g) {
  const bool b_goes_on =
      g.transpose_b ? g.stride_b == g.n * g.ldb : g.stride_b == g.n && g.ldb >= g.n * g.batch;
  if (g.batch == 1 || g.stride_a != 0 || !b_goes_on || g.stride_d != g.n || g.ldd < g.n * g.batch ||
      (g.bias && g.stride_bias != g.n))
    return;
  g.n *= g.batch;
  g.batch = 1;
  g.stride_b = g.stride_d = g.stride_bias = 0;
}

char* advanced(const Tensor& x, int64_t elements) {
  return static_cast<char*>(x.raw()) + elements * int64_t(size_of(x.dtype()));
}

/// d = alpha a b (+ d) (+ bias) as products of matrices: one problem, and the loop over what its batch does
/// not cover.
struct Products {
  Gemm gemm;
  Tensor residual;       // the c of all products, laid out as d
  StridedLoop<4> loop;   // d, a, b, bias
  int dims, batch = -1;  // those of the loop that are walked, and the one among them that is the batch
  int64_t calls = 1;

  Products(const Tensor& d, const Tensor& a, const Tensor& b, const Tensor& bias,
           const MultiplyOptions& options) {
    const int64_t m = d.size(-2), n = d.size(-1), k = a.size(-1);
    // The loop over [..., m], in which b and the bias stand still along m: neighbouring matrices merge to
    // longer ones exactly where those two stand still and the rows of a and d go on.
    const Layout of_d = rows_of(d, true), of_a = rows_of(a, true), of_b = rows_of(b, false),
                 of_bias = rows_of(bias, false);
    loop = make_loop<4>(d.shape().without(-1), {&of_d, &of_a, &of_b, &of_bias});
    const int64_t a_column = a.layout().stride(-1);
    gemm = {.m = 1, .n = n, .k = k, .in = a.dtype(), .out = d.dtype(), .alpha = options.alpha};
    Stored left = stored(1, k, k, a_column, a.dtype());
    const Stored right = stored(b);
    gemm.ldd = row_pitch(n, d.dtype());
    dims = loop.rank;
    const int last = dims - 1;
    const int64_t d_row = loop.strides[0][last], a_row = loop.strides[1][last];
    if (loop.strides[2][last] == 0 && loop.strides[3][last] == 0 && d_row >= n) {
      const Stored rows = stored(loop.sizes[last], k, a_row, a_column, a.dtype());
      check(rows.fits || m == 1, "multiply: ", describe(a), " has rows that overlap; clone() it first");
      if (rows.fits) {
        left = rows;
        gemm.m = loop.sizes[last];
        gemm.ldd = d_row;
        --dims;
      }
    }
    gemm.transpose_a = left.transposed, gemm.lda = left.ld;
    gemm.transpose_b = right.transposed, gemm.ldb = right.ld;

    // The longest remaining dimension is the batch, the others are walked.
    for (int dim = 0; dim < dims; ++dim)
      if (batch < 0 || loop.sizes[dim] > loop.sizes[batch]) batch = dim;
    for (int dim = 0; dim < dims; ++dim) calls *= dim == batch ? 1 : loop.sizes[dim];
    if (batch >= 0) {
      gemm.batch = loop.sizes[batch];
      gemm.stride_d = loop.strides[0][batch], gemm.stride_a = loop.strides[1][batch];
      gemm.stride_b = loop.strides[2][batch], gemm.stride_bias = loop.strides[3][batch];
    }
    gemm.beta = options.accumulate ? 1 : 0;
    gemm.d = d.raw(), gemm.a = a.raw(), gemm.b = b.raw();
    gemm.bias = bias.defined() ? bias.raw() : nullptr;
    const auto copied = [&](const Tensor& x, const Tensor& rows) {  // rows: with k along them
      const int64_t whole = round_up(k, 8);
      if (!is_half(x.dtype()) || k % 8 == 0 || owns_scratch_padding(rows, whole)) return 0.0;
      return double(x.count()) * double(size_of(x.dtype()));
    };
    if (!gemm.transpose_a) gemm.copied += copied(a, a);
    if (gemm.transpose_b) gemm.copied += copied(b, b.transpose(-1, -2));
    const int64_t unit = std::max<int64_t>(16 / int64_t(size_of(d.dtype())), 1);
    gemm.owns_d_padding = owns_row_padding(d, round_up(n, unit));
  }

  /// Whether a (operand 1) or b (2) begins on a 16-byte boundary in every call if it does in the first one.
  bool keeps_alignment(int operand) const {
    for (int dim = 0; dim < dims; ++dim)
      if (dim != batch && loop.strides[operand][dim] * int64_t(size_of(gemm.in)) % 16 != 0) return false;
    return true;
  }

  /// Calls `one` for each; a bias it does not take along is what d starts as.
  template <class One>
  void run(const Tensor& d, const Tensor& a, const Tensor& b, const Tensor& bias, bool fuses, One&& one) {
    if (gemm.bias && !fuses) {
      d.copy_from(bias);
      gemm.bias = nullptr;
      gemm.beta = 1;
    }
    for (int64_t call = 0; call < calls; ++call) {
      int64_t rest = call, offset[4] = {};
      for (int dim = dims - 1; dim >= 0; --dim) {
        if (dim == batch) continue;
        for (int operand = 0; operand < 4; ++operand)
          offset[operand] += rest % loop.sizes[dim] * loop.strides[operand][dim];
        rest /= loop.sizes[dim];
      }
      gemm.d = advanced(d, offset[0]), gemm.a = advanced(a, offset[1]), gemm.b = advanced(b, offset[2]);
      if (residual.defined()) gemm.c = advanced(residual, offset[0]);
      if (gemm.bias) gemm.bias = advanced(bias, offset[3]);
      one(gemm);
    }
  }
};

}  // namespace

bool multiply_in_chunks(const Tensor& d, const Tensor& a, const Tensor& b, const MultiplyOptions& options,
                        int64_t most) {
  // Of the dimension that is `back` from the end, [begin, end); a dimension that is broadcast stays.
  const auto cut = [](const Tensor& x, int back, int64_t begin, int64_t end) {
    return x.defined() && x.rank() >= back && x.size(-back) > 1 ? x.slice(-back, begin, end) : x.detach();
  };
  // Halves along one dimension of d, or along k (back = 0).
  const auto halves = [&](int64_t size, int back) {
    const int64_t half = round_up(size / 2, 64), middle = half < size ? half : size / 2;
    for (const auto& [begin, end] : {std::pair{int64_t{0}, middle}, std::pair{middle, size}}) {
      MultiplyOptions piece = options;
      piece.sums = {};
      if (back == 0) {
        if (begin > 0) piece.bias = piece.residual = {}, piece.accumulate = true;
        multiply_in_chunks(d, a.slice(-1, begin, end), b.slice(-2, begin, end), piece, most);
        continue;
      }
      piece.bias = back == 2 ? options.bias : cut(options.bias, back, begin, end);
      piece.residual = cut(options.residual, back, begin, end);
      multiply_in_chunks(cut(d, back, begin, end), back == 1 ? a : cut(a, back, begin, end),
                         back == 2 ? b : cut(b, back, begin, end), piece, most);
    }
  };
  const int64_t k = a.size(-1), n = d.size(-1);
  if (k > most) {
    halves(k, 0);
  } else if (n > most) {
    halves(n, 1);
  } else if (n > 0 && d.count() / n > most) {
    int back = 2;
    for (int other = 3; other <= d.rank(); ++other)
      if (d.size(-other) > d.size(-back)) back = other;
    halves(d.size(-back), back);
  } else {
    MultiplyOptions piece = options;
    piece.sums = {};
    multiply(d, a, b, piece);
  }
  return false;
}

std::vector<std::string> gemm_variants() {
  return {std::begin(kGemmVariants), std::end(kGemmVariants) - 1};
}

PassVariant::PassVariant(const char* op, const Tensor& x) {
  const std::string* const forced = ForceVariant::forced(op);
  if (!forced || !variant_internal::has_part(kForcedVariants, *forced)) return;
  check(!forced->starts_with("wgmma") || !x.device().is_cuda() || is_half(x.dtype()), op, ": variant ",
        *forced, " needs bf16 or f16, not ", describe(x));
  force_.emplace("gemm", *forced);
}

bool writable(const Tensor& d) {
  const Stored rows = stored(d);
  return rows.fits && (!rows.transposed || d.size(-1) == 1);
}

namespace {

/// A call of multiply on CUDA, its operands as BLAS takes them.
struct Multiplication {
  const Tensor &d, &a, &b, &bias, &residual;
  const MultiplyOptions& options;
  Products& products;
};

/// Variants "wgmma" and "narrow" take the bias along, and a residual as their C.
template <class Kernel>
void run_own(Multiplication& call, Kernel&& kernel) {
  if (call.residual.defined()) {
    call.products.residual = call.residual;
    call.products.gemm.c = call.residual.raw();
    call.products.gemm.beta = 1;
  }
  call.products.run(call.d, call.a, call.b, call.bias, true,
                    [&](const Gemm& g) { kernel(g, call.d.device()); });
}

bool run_wgmma(Multiplication& call) {
  Gemm& gemm = call.products.gemm;
  if (call.options.sums.defined() && call.products.calls == 1 && gemm_sm90_sums(gemm))
    gemm.sums = call.options.sums.data<float>();
  run_own(call, gemm_wgmma);  // gemm_sm90 in gemm_sm90_launch.cuh, or gemm_stream_sm90
  return gemm.sums != nullptr;
}

bool run_narrow(Multiplication& call) {
  run_own(call, gemm_narrow);  // narrow_mma_cuda or narrow_cuda
  return false;
}

bool run_cublas(Multiplication& call) {
  if (call.residual.defined()) {
    multiply(call.d, call.a, call.b, {.alpha = call.options.alpha, .bias = call.bias});
    tessera::accumulate(call.d, call.residual);
    return false;
  }
  const CublasGemm problem(call.d, call.a, call.b, call.options, stored(call.a).transposed,
                           stored(call.b).transposed, call.products.gemm.tf32);
  if (run_rearranged(problem)) return false;
  // A product of one call takes the bias along; otherwise d starts as the bias, which is exact in d's dtype.
  if constexpr (kCuda)
    call.products.run(call.d, call.a, call.b, call.bias,
                      call.products.calls == 1 && fuses_bias(call.products.gemm),
                      [&](const Gemm& g) { gemm_cuda(g, call.d.device()); });
  return false;
}

constexpr const char* kPadded[] = {"cublas padded", nullptr};

/// How a GEMM runs on a GPU. What cuBLASLt is given is chosen in a second table, in gemm_padding.cpp.
constexpr Variant<GemmOnGpu, bool(Multiplication&)> kVariants[] = {
    {"wgmma", [](const GemmOnGpu& g, const Gpu& gpu) -> Reason { return gemm_sm90_lacks(g.gemm(), gpu); },
     [](const GemmOnGpu& g, const Gpu&) { return g.wgmma_estimate(); }, run_wgmma, kWgmmaVariants},
    {"cublas", lacks_nothing<GemmOnGpu>, [](const GemmOnGpu& g, const Gpu&) { return g.cublas_estimate(); },
     run_cublas, kPadded},
    {"narrow", [](const GemmOnGpu& g, const Gpu&) -> Reason { return gemm_narrow_lacks(g.gemm()); },
     [](const GemmOnGpu& g, const Gpu&) { return g.narrow_estimate(); }, run_narrow}};

size_t index_unforced(const GemmOnGpu& g) {
  return g.unforced([&] { return choose_index(nullptr, kVariants, g, g.gpu()); });
}

size_t index_of(const GemmOnGpu& g) {
  if (ForceVariant::forced("gemm") || ChoiceLog::current())
    return choose_index("gemm", kVariants, g, g.gpu());
  return index_unforced(g);
}

}  // namespace

std::string_view gemm_variant(const GemmOnGpu& problem) {
  return kVariants[index_of(problem)].name;
}

std::string_view gemm_variant_unforced(const GemmOnGpu& problem) {
  return kVariants[index_unforced(problem)].name;
}

bool multiply(const Tensor& d, const Tensor& a_given, const Tensor& b_given, const MultiplyOptions& options) {
  const int64_t m = d.size(-2), n = d.size(-1), k = a_given.size(-1);
  check(a_given.size(-2) == m && b_given.size(-2) == k && b_given.size(-1) == n &&
            broadcast(broadcast(leading(a_given), leading(b_given), "multiply"), leading(d), "multiply") ==
                leading(d),
        "multiply: ", d.shape(), " = ", a_given.shape(), " times ", b_given.shape());
  check(!options.bias.defined() || (!options.accumulate && options.bias.size(-1) == n), "multiply: a bias ",
        options.bias.shape(), " for ", d.shape());
  check(!options.residual.defined() || (!options.accumulate && options.residual.shape() == d.shape() &&
                                        options.residual.dtype() == d.dtype()),
        "multiply: a residual ", describe(options.residual), " for ", describe(d));
  if (d.count() == 0) return false;
  if (k == 0) {
    if (options.bias.defined()) {
      d.copy_from(options.bias);
    } else if (!options.accumulate) {
      d.fill(0);
    }
    if (options.residual.defined()) tessera::accumulate(d, options.residual);
    return false;
  }
  const bool tf32 = a_given.dtype() == DType::f32 && f32_math() == F32Math::tf32;
  if (d.device().is_cpu() && is_half(a_given.dtype())) {
    multiply_widened(d, a_given.detach(), b_given.detach(), options);
    return false;
  }
  if (d.device().is_cpu() && tf32) {
    const F32MathScope exact(F32Math::ieee);
    // Stored as it was: bits may depend on which way an operand lies.
    const auto rounded = [](const Tensor& x) {
      return stored(x).transposed ? rounded_to_tf32(x.transpose(-1, -2)).transpose(-1, -2)
                                  : rounded_to_tf32(x);
    };
    return multiply(d, rounded(a_given.detach()), rounded(b_given.detach()), options);
  }
  check(writable(d), "multiply: the result ", describe(d), " has no dense rows");
  if (d.device().is_cuda() && std::max({d.count() / n, n, k}) > kMostExtent)
    return multiply_in_chunks(d, a_given, b_given, options, kMostExtent);

  Tensor a = a_given.detach(), b = b_given.detach(), bias = options.bias.detach();
  if (!stored(a).fits) a = a.clone();
  if (!stored(b).fits) b = b.clone();
  if (bias.defined() && bias.size(-1) > 1 && bias.layout().stride(-1) != 1) bias = bias.clone();
  const Tensor residual = options.residual.detach();
  Products products(d, a, b, bias, options);
  if (d.device().is_cpu()) {
    if (residual.defined()) {
      multiply(d, a, b, {.alpha = options.alpha, .bias = bias});
      tessera::accumulate(d, residual);
    } else {
      products.run(d, a, b, bias, false, [](const Gemm& g) { gemm_cpu(g); });
    }
    return false;
  }
  if (!products.keeps_alignment(1) || !products.keeps_alignment(2)) {  // kernels are chosen by the first call
    if (!products.keeps_alignment(1)) a = a.clone();
    if (!products.keeps_alignment(2)) b = b.clone();
    products = Products(d, a, b, bias, options);
  }
  products.gemm.tf32 = tf32;
  products.gemm.takes_along = options.sums.defined() || residual.defined();
  if (is_half(a.dtype()))
    products.gemm.rounds_in_place =
        rounds_in_place({d, a, b, options, stored(a).transposed, stored(b).transposed, false});
  fold_batch(products.gemm);
  Multiplication call{d, a, b, bias, residual, options, products};
  if (residual.defined() && residual.layout().strides != d.layout().strides) return run_cublas(call);
  return kVariants[index_of(gemm_on_gpu(products.gemm, Gpu(d.device())))].launch(call);
}

namespace {

/// The operands of a sum with the leading dimensions of the whole, and d with ones where it is summed.
struct Sum {
  Tensor d, a, b;
  int64_t terms = 1;  // products that add up in one element of d
};

Sum spread_sum(const Tensor& d, const Tensor& a, const Tensor& b) {
  const Shape lead = broadcast(leading(a), leading(b), "multiply_sum");
  const int missing = lead.rank() - (d.rank() - 2);
  Shape ones = d.shape();
  for (int dim = 0; dim < missing; ++dim) ones = ones.inserted(0, 1);
  Sum sum{d.detach().reshape(ones), a.detach().expand(joined(lead, a.size(-2), a.size(-1))),
          b.detach().expand(joined(lead, b.size(-2), b.size(-1)))};
  for (int dim = 0; dim < lead.rank(); ++dim) {
    check(ones[dim] == lead[dim] || ones[dim] == 1, "multiply_sum: ", d.shape(), " += ", a.shape(), " times ",
          b.shape());
    if (ones[dim] != lead[dim]) sum.terms *= lead[dim];
  }
  return sum;
}

/// [terms..., k, columns] -> [terms * k, columns] as a view; undefined if there is none.
Tensor long_rows(const Tensor& x) {
  const Shape shape{x.count() / std::max<int64_t>(x.size(-1), 1), x.size(-1)};
  return x.count() > 0 && x.can_reshape(shape) ? x.reshape(shape) : Tensor();
}

bool is_long(const Sum& sum, Tensor& a, Tensor& b) {
  if (sum.d.count() != sum.d.size(-1) * sum.d.size(-2)) return false;
  a = long_rows(sum.a.transpose(-1, -2));
  b = long_rows(sum.b);
  return a.defined() && b.defined();
}

bool row_padding_is_columns(const Sum& sum) {
  return sum.d.count() == sum.d.size(-1) * sum.d.size(-2) && pads_to_long(sum.a);
}

/// A sum of products on a GPU: by variant "wgmma", which walks over the matrices where they are, or as one
/// long product of copies.
constexpr Variant<GemmOnGpu, void()> kTermsVariants[] = {
    {"wgmma", [](const GemmOnGpu& g, const Gpu& gpu) -> Reason { return gemm_sm90_lacks(g.gemm(), gpu); },
     [](const GemmOnGpu& g, const Gpu&) {
       const Estimate estimate = g.wgmma_estimate();
       return std::isinf(estimate.compared) ? estimate : Estimate::preferred();
     },
     nullptr, kWgmmaVariants},
    {"copied", lacks_nothing<GemmOnGpu>, is_otherwise<GemmOnGpu>, nullptr, kForcedVariants}};

/// The sum by variant "wgmma"; false, and nothing done, where that cannot or does not pay.
bool multiply_terms(const Sum& sum, bool accumulate) {
  const std::string* const forced = ForceVariant::forced("gemm");
  if (forced && !forced->starts_with("wgmma")) return false;
  const Shape of_a{sum.terms, sum.a.size(-2), sum.a.size(-1)},
      of_b{sum.terms, sum.b.size(-2), sum.b.size(-1)};
  if (!sum.a.can_reshape(of_a) || !sum.b.can_reshape(of_b)) return false;
  const Tensor a = sum.a.reshape(of_a), b = sum.b.reshape(of_b);
  const Stored left = stored(a), right = stored(b), into = stored(sum.d);
  if (!left.fits || !right.fits || !into.fits || into.transposed) return false;
  const int64_t unit = 16 / int64_t(size_of(sum.d.dtype())), n = sum.d.size(-1);
  const Gemm gemm{.m = sum.d.size(-2),
                  .n = n,
                  .k = a.size(-1),
                  .terms = sum.terms,
                  .in = a.dtype(),
                  .out = sum.d.dtype(),
                  .transpose_a = left.transposed,
                  .transpose_b = right.transposed,
                  .a = a.raw(),
                  .b = b.raw(),
                  .d = sum.d.raw(),
                  .lda = left.ld,
                  .ldb = right.ld,
                  .ldd = into.ld,
                  .stride_a = a.layout().stride(0),
                  .stride_b = b.layout().stride(0),
                  .beta = accumulate ? 1.0 : 0.0,
                  .owns_d_padding = owns_row_padding(sum.d, round_up(n, unit)),
                  .copied = double(a.count()) * double(size_of(a.dtype()))};
  const Device device = sum.d.device();
  const Gpu gpu(device);
  if (choose_index("gemm", kTermsVariants, gemm_on_gpu(gemm, gpu), gpu) != 0) return false;
  gemm_wgmma(gemm, device);
  return true;
}

}  // namespace

bool sum_is_one_gemm(const Tensor& d, const Tensor& a, const Tensor& b) {
  const Sum sum = spread_sum(d, a, b);
  Tensor left, right;
  return sum.terms <= 1 || is_long(sum, left, right) || row_padding_is_columns(sum);
}

bool multiply_sum(const Tensor& d, const Tensor& a, const Tensor& b, bool accumulate, const Tensor& sums) {
  if (d.count() == 0) return false;
  const Sum sum = spread_sum(d, a, b);
  if (sum.terms == 1) return multiply(sum.d, sum.a, sum.b, {.accumulate = accumulate, .sums = sums});
  if (sum.terms == 0) {
    if (!accumulate) d.fill(0);
    return false;
  }
  Tensor long_a, long_b;
  bool one_gemm = is_long(sum, long_a, long_b);
  if (!one_gemm && row_padding_is_columns(sum)) {
    if (multiply_terms(sum, accumulate)) return false;
    std::tie(long_a, long_b) = pad_to_long(sum.a, sum.b);
    one_gemm = true;
  }
  if (one_gemm)
    return multiply(sum.d.reshape({d.size(-2), d.size(-1)}), long_a.transpose(0, 1), long_b,
                    {.accumulate = accumulate, .sums = sums});
  for (int64_t term = 0; term < sum.terms; ++term) {
    Tensor left = sum.a, right = sum.b;
    int64_t rest = term;
    for (int dim = sum.d.rank() - 3; dim >= 0; --dim) {
      const int64_t size = left.size(dim);
      if (sum.d.size(dim) == size) continue;
      left = left.slice(dim, rest % size, rest % size + 1);
      right = right.slice(dim, rest % size, rest % size + 1);
      rest /= size;
    }
    multiply(sum.d, left, right, {.accumulate = accumulate || term > 0});
  }
  return false;
}

namespace {

/// Where a gradient is written: the leaf's buffer if it has a fitting dtype and layout, else a new tensor.
/// `once`: it is one product.
GradTarget gradient_target(Backward& entry, int input, const Tensor& like, GradientDType dtype, bool once) {
  const DType wide = sum_dtype(like.dtype());
  GradTarget target = entry.target(input);
  if (target.grad.defined()) {
    const DType held = target.grad.dtype();
    if (!(held == wide || (held == like.dtype() && once)) || !writable(target.grad)) target = {};
  }
  if (!target.grad.defined()) {
    // One product is rounded once: here, if it would only be rounded to that dtype where it is kept.
    const bool rounds = once && (dtype == GradientDType::same || entry.grad_dtype(input) == like.dtype());
    target = {Tensor::empty(like.shape(), rounds ? like.dtype() : wide, like.device()), false};
  }
  return target;
}

}  // namespace

bool multiply_gradient(Backward& entry, int input, const Tensor& like, GradientDType dtype, const Tensor& a,
                       const Tensor& b, const Tensor& sums) {
  const bool once = sum_is_one_gemm(like.detach(), a, b);
  const GradTarget target = gradient_target(entry, input, like, dtype, once);
  const bool summed = multiply_sum(target.grad, a, b, target.accumulate, sums);
  entry.written(input, target);
  return summed;
}

bool multiply_gradients(Backward& entry, const WeightGradient& first, const WeightGradient& second) {
  const Device device = first.dy.device();
  const int64_t m = first.dy.size(1), n = first.x.size(1), k = first.dy.size(0);
  if (!device.is_cuda() || !is_half(first.dy.dtype()) || std::min({m, n, k}) < 2 || second.x.size(1) != m ||
      second.dy.size(1) != n || first.weight.raw() == second.weight.raw())
    return false;
  for (const Tensor& x : {first.dy, first.x, second.dy, second.x})
    if (x.layout().stride(1) != 1 || x.layout().stride(0) < x.size(1)) return false;
  const auto product = [&](const Tensor& a, const Tensor& b) {
    Gemm g{.m = m, .n = n, .k = k, .in = a.dtype(), .out = DType::f32, .transpose_a = true};
    g.a = a.raw(), g.b = b.raw(), g.lda = a.layout().stride(0), g.ldb = b.layout().stride(0);
    g.ldd = row_pitch(n, g.out);
    return g;
  };
  Gemm one = product(first.dy, first.x), other = product(second.x, second.dy);
  if (first.sums.defined()) one.sums = first.sums.data<float>();
  if (second.sums.defined()) other.sums = second.sums.data<float>();
  one.takes_along = one.sums, other.takes_along = other.sums;
  if (!gemm_pair_pays(one, other, Gpu(device))) return false;
  const auto into = [&](Gemm& g, const WeightGradient& of) {
    GradTarget target = gradient_target(entry, of.input, of.weight, GradientDType::f32, true);
    g.d = target.grad.raw(), g.ldd = target.grad.layout().stride(0), g.out = target.grad.dtype();
    g.beta = target.accumulate ? 1 : 0;
    return target;
  };
  const GradTarget of_first = into(one, first), of_second = into(other, second);
  gemm_pair(one, other, device);
  entry.written(first.input, of_first);
  entry.written(second.input, of_second);
  return true;
}

Tensor flatten_leading(const Tensor& x, int keep) {
  int64_t rows = 1;
  for (int dim = 0; dim < x.rank() - keep; ++dim) rows *= x.size(dim);
  Shape shape(x.shape().sizes().last(size_t(keep)));
  shape = shape.inserted(0, rows);
  const Tensor plain = x.detach();
  return plain.can_reshape(shape) ? plain.reshape(shape) : plain.clone().reshape(shape);
}

void check_operand(const char* op, const char* name, const Tensor& x, const Tensor& first) {
  check(x.defined(), op, ": ", name, " is undefined");
  const bool arithmetic = x.dtype() == DType::f64 || x.dtype() == DType::f32 || is_half(x.dtype());
  const bool cpu = x.device().is_cpu();
  check(arithmetic && (cpu || x.dtype() != DType::f64), op, ": ", name, " ", describe(x), ": dtype ",
        x.dtype(), " is not supported on device ", x.device().name(), "; expected ", cpu ? "f64, " : "",
        "f32, bf16 or f16");
  check(x.dtype() == first.dtype() && x.device() == first.device(), op, ": ", name, " is ", describe(x),
        ", but the first operand is ", describe(first), "; cast or move one of them");
}

}  // namespace tessera::ops
