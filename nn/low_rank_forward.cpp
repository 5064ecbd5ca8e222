#include <algorithm>

#include "autograd/tape.h"
#include "nn/low_rank_internal.h"
#include "nn/sparse24.h"
#include "ops/gather/gather.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"

namespace tessera::nn {
namespace {

Tensor with_residual(const Tensor& y, const Tensor& residual) {
  return residual.defined() ? ops::add(y, residual) : y;
}

/// hidden [..., parts * rank] by the block diagonal matrix whose blocks are the parts' rows of b [out, rank]
/// -> [..., out]. Parts of one size are one GEMM.
Tensor expand(const Tensor& hidden, const Tensor& b, const std::vector<int64_t>& rows, const Tensor& bias,
              const Tensor& residual) {
  const int64_t parts = int64_t(rows.size()), rank = b.size(1), out = b.size(0);
  if (parts == 1) return ops::linear(hidden, b, bias, residual);
  const Shape shape = hidden.shape().with(-1, out);
  Tensor y;
  if (std::all_of(rows.begin(), rows.end(), [&](int64_t each) { return each == rows[0]; })) {
    const int64_t tokens = hidden.count() / std::max<int64_t>(1, parts * rank);
    const Tensor groups = ops::grouped_linear(
        ops::reshape(hidden, {tokens, parts, rank}), ops::reshape(b, {parts, rows[0], rank}),
        bias.defined() ? ops::reshape(bias, {parts, rows[0]}) : Tensor(), false);
    y = ops::reshape(groups, shape);
  } else {
    std::vector<Tensor> results;
    int64_t row = 0;
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t end = row + rows[size_t(p)];
      results.push_back(ops::linear(ops::slice(hidden, -1, p * rank, (p + 1) * rank),
                                    ops::slice(b, 0, row, end),
                                    bias.defined() ? ops::slice(bias, 0, row, end) : Tensor()));
      row = end;
    }
    y = ops::concat(results, -1);
  }
  return with_residual(y, residual);
}

/// Each part by itself: a part's hidden rows are 2:4, and its b alone multiplies them.
Tensor multiply_sparse24(const Cola& form, const Tensor& x, const Tensor& bias, const Tensor& residual) {
  const Factors& f = form.factors;
  const size_t parts = f.rows.size();
  check(form.sparse24.size() == parts, "cola: 2:4 activations of ", form.sparse24.size(),
        " parts in a layer of ", parts, "; set them with nn::set_sparse24");
  if (parts == 1) return run_sparse24(form.sparse24[0], false, x, f.a, f.b, {}, bias, residual).y;
  const std::vector<Tensor> a = ops::split(f.a, 0, std::vector<int64_t>(parts, f.rank())),
                            b = ops::split(f.b, 0, f.rows),
                            biases =
                                bias.defined() ? ops::split(bias, 0, f.rows) : std::vector<Tensor>(parts);
  std::vector<Tensor> results;
  for (size_t p = 0; p < parts; ++p)
    results.push_back(run_sparse24(form.sparse24[p], false, x, a[p], b[p], {}, biases[p]).y);
  return with_residual(ops::concat(results, -1), residual);
}

}  // namespace

Tensor multiply_factors(const LowRank& form, const Tensor& x, const Tensor& bias, const Tensor& residual) {
  const Factors& f = form.factors;
  return expand(ops::linear(x, f.a), f.b, f.rows, bias, residual);
}

Tensor multiply_factors(const Cola& form, const Tensor& x, const Tensor& bias, const Tensor& residual) {
  const Factors& f = form.factors;
  if (!form.sparse24.empty() && Tape::recording(x, f.a, f.b, bias, residual))
    return multiply_sparse24(form, x, bias, residual);
  return expand(ops::activation(ops::linear(x, f.a), form.activation), f.b, f.rows, bias, residual);
}

Tensor multiply_factors(const SparsePlusLowRank& form, const Tensor& x, const Tensor& bias,
                        const Tensor& residual) {
  return ops::sparse_low_rank_linear(x, form.weight(), bias, residual);
}

Tensor multiply_factors(const ColumnsPlusLowRank& form, const Tensor& x, const Tensor& bias,
                        const Tensor& residual) {
  const Factors& f = form.factors;
  const int64_t in = x.size(-1), parts = int64_t(f.rows.size());
  const Tensor low = expand(ops::scale(ops::linear(x, f.a), form.gamma), f.b, f.rows, bias, residual);
  // Columns of x are rows of its transpose.
  const Tensor flat = ops::reshape(x, {x.count() / std::max<int64_t>(1, in), in});
  const Tensor picked = ops::transpose(ops::gather_rows(ops::transpose(flat, 0, 1), form.columns), 0, 1);
  return expand(ops::reshape(ops::scale(picked, 1 - form.gamma), x.shape().with(-1, parts * form.c.size(1))),
                form.c, f.rows, {}, low);
}

}  // namespace tessera::nn
