#include "ops/linear/sparse_low_rank.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/sparse_low_rank_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

/// Elements of a panel of dW, at most: 16 MiB in f32, and at 4096 columns 1024 rows, tiles for every SM.
constexpr int64_t kPanelElements = int64_t(1) << 22;

/// Calls f(first row, number of rows, first row of its a) for each part.
template <class F>
void for_each_part(const SparseLowRank& w, F&& f) {
  int64_t first = 0;
  for (size_t p = 0; p < w.rows.size(); ++p) {
    f(first, w.rows[p], int64_t(p) * w.rank());
    first += w.rows[p];
  }
}

void add_at(const Tensor& w, const Tensor& values, const Tensor& support) {
  if (w.device().is_cpu()) {
    add_at_cpu(w, values, support);
  } else {
    if constexpr (kCuda) add_at_cuda(w, values, support);
  }
}

void take_at(const Tensor& to, const Tensor& panel, const Tensor& support, int64_t first) {
  if (to.device().is_cpu()) {
    take_at_cpu(to, panel, support, first);
  } else {
    if constexpr (kCuda) take_at_cuda(to, panel, support, first);
  }
}

Tensor made_weight(const SparseLowRank& w) {
  const Tensor made = Tensor::empty({w.out(), w.in()}, w.a.dtype(), w.a.device()), a = w.a.detach(),
               b = w.b.detach();
  for_each_part(w, [&](int64_t row, int64_t rows, int64_t factor) {
    multiply(made.slice(0, row, row + rows), b.slice(0, row, row + rows),
             a.slice(0, factor, factor + w.rank()), {.alpha = w.scale});
  });
  if (w.values.count() > 0) add_at(made, w.values.detach().packed(), w.support.detach().packed());
  return made;
}

/// The gradients of a and b, of dy [N, out] and x [N, in].
void factor_gradients(Backward& entry, const SparseLowRank& w, const Tensor& dy, const Tensor& x) {
  const DType wide = sum_dtype(x.dtype());
  const int64_t tokens = x.size(0), rank = w.rank();
  const Device device = x.device();
  const auto matrix = [&](int64_t rows, int64_t columns, DType dtype) {
    return Tensor::empty({rows, columns}, dtype, device);
  };
  Tensor da = entry.needs(1) ? matrix(w.a.size(0), w.in(), wide) : Tensor(),
         db = entry.needs(2) ? matrix(w.out(), rank, wide) : Tensor();
  for_each_part(w, [&](int64_t row, int64_t rows, int64_t factor) {
    const Tensor own = dy.slice(1, row, row + rows), a = w.a.slice(0, factor, factor + rank),
                 b = w.b.slice(0, row, row + rows), inner = matrix(tokens, rank, x.dtype());
    if (db.defined()) {
      multiply(inner, x, a.transpose(0, 1), {.alpha = w.scale});
      multiply(db.slice(0, row, row + rows), own.transpose(0, 1), inner);
    }
    if (da.defined()) {
      multiply(inner, own, b, {.alpha = w.scale});
      multiply(da.slice(0, factor, factor + rank), inner.transpose(0, 1), x);
    }
  });
  if (da.defined()) entry.give(1, std::move(da));
  if (db.defined()) entry.give(2, std::move(db));
}

/// The gradient of the values: dy^T x at their places, panel by panel.
void value_gradient(Backward& entry, const SparseLowRank& w, const Tensor& dy, const Tensor& x) {
  if (!entry.needs(3)) return;
  const DType wide = sum_dtype(x.dtype());
  Tensor taken = Tensor::empty_packed({w.values.count()}, wide, x.device());
  taken.fill(0);
  const int64_t most = std::max<int64_t>(1, kPanelElements / std::max<int64_t>(1, w.in())),
                height = most < 128 ? most : most / 128 * 128;
  for (int64_t row = 0; row < w.out() && taken.count() > 0; row += height) {
    const int64_t end = std::min(w.out(), row + height);
    const Tensor panel = Tensor::empty({end - row, w.in()}, wide, x.device());
    multiply(panel, dy.slice(1, row, end).transpose(0, 1), x);
    take_at(taken, panel, w.support.packed(), row);
  }
  entry.give(3, std::move(taken));
}

}  // namespace

void check_sparse_low_rank(const char* op, const SparseLowRank& w) {
  check_operand(op, "a", w.a, w.a);
  check_operand(op, "b", w.b, w.a);
  check_operand(op, "values", w.values, w.a);
  check(w.a.rank() == 2 && w.b.rank() == 2, op, ": a is ", describe(w.a), " and b ", describe(w.b),
        "; expected matrices, [parts * rank, in] and [out, rank]");
  const int64_t parts = int64_t(w.rows.size());
  check(parts >= 1 && w.rank() >= 1 && w.a.size(0) == parts * w.rank(), op, ": a ", w.a.shape(), " and b ",
        w.b.shape(), " of ", parts, " parts; expected a [", parts,
        " * rank, in] and b [out, rank], with a rank of 1 or more");
  check(std::all_of(w.rows.begin(), w.rows.end(), [](int64_t rows) { return rows >= 1; }) &&
            std::accumulate(w.rows.begin(), w.rows.end(), int64_t{0}) == w.out(),
        op, ": the rows of the parts do not add up to b's, ", w.b.shape());
  check(w.support.defined() && w.support.dtype() == DType::i32 && w.support.rank() == 1 &&
            w.values.rank() == 1 && w.support.count() == w.values.count() &&
            w.support.device() == w.a.device(),
        op, ": support is ", describe(w.support), " and values ", describe(w.values),
        "; expected i32 and values of one length, on one device");
  check(w.in() == 0 || w.out() <= std::numeric_limits<int32_t>::max() / w.in(), op, ": a weight of ", w.out(),
        " x ", w.in(), " elements; places of S are counted in 31 bits");
}

Tensor sparse_low_rank_weight(const SparseLowRank& w, Site site) {
  const CallScope call(site);
  check_sparse_low_rank("sparse_low_rank_weight", w);
  const NoTape no_tape;
  return made_weight(w);
}

Tensor sparse_low_rank_linear(const Tensor& x, const SparseLowRank& w, const Tensor& bias,
                              const Tensor& residual, Site site) {
  const CallScope call(site);
  constexpr const char* kOp = "sparse_low_rank_linear";
  check_operand(kOp, "x", x, x);
  check_operand(kOp, "a", w.a, x);
  check_sparse_low_rank(kOp, w);
  check(x.rank() >= 1, kOp, ": x is a scalar; expected [..., in]");
  const Shape shape = x.shape().with(-1, w.out());
  Tensor weight = made_weight(w);
  check_linear(kOp, "weight", x, x.size(-1), weight, bias);
  check_residual(kOp, x, shape, residual);
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  linear_forward(y, x, weight, bias, residual);
  Tape* const tape = Tape::recording(x, w.a, w.b, w.values, bias, residual);
  if (!tape) return y;
  tape->record(kOp, {&x, &w.a, &w.b, &w.values, &bias, &residual}, {&y},
               [x = Saved(x), a = Saved(w.a), b = Saved(w.b), values = Saved(w.values),
                support = Saved(w.support), rows = w.rows, scale = w.scale](Backward& entry) {
                 const SparseLowRank own{a.get(), b.get(), values.get(), support.get(), rows, scale};
                 const Tensor dy = entry.grad();
                 if (entry.needs(0))
                   linear_input_gradient(entry, 0, dy.shape().with(-1, own.in()), dy, made_weight(own));
                 const Tensor flat_dy = flatten_leading(dy, 1), flat_x = flatten_leading(x.get(), 1);
                 factor_gradients(entry, own, flat_dy, flat_x);
                 value_gradient(entry, own, flat_dy, flat_x);
                 bias_gradient(entry, 4, dy);
                 entry.pass(0, {5});
               });
  return y;
}

}  // namespace tessera::ops
