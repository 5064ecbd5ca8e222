#include <algorithm>

#include "nn/low_rank_internal.h"
#include "ops/gather/gather.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"

namespace tessera::nn {
namespace {

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
  return residual.defined() ? ops::add(y, residual) : y;
}

}  // namespace

Tensor multiply_factors(const LowRank& form, const Tensor& x, const Tensor& bias, const Tensor& residual) {
  const Factors& f = form.factors;
  return expand(ops::linear(x, f.a), f.b, f.rows, bias, residual);
}

Tensor multiply_factors(const Cola& form, const Tensor& x, const Tensor& bias, const Tensor& residual) {
  const Factors& f = form.factors;
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
