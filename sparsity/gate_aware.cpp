#include "sparsity/gate_aware.h"

#include "ops/gemm/gemm.h"
#include "ops/gemm/inner_products.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"

namespace tessera::sparsity {

void GatedStatistics::add(const Tensor& gated, const Tensor& dense) {
  check(gated.shape() == dense.shape(), "statistics: gated inputs ", describe(gated), " and dense ones ",
        describe(dense), "; expected the same tokens");
  inputs_.add(gated);
  const DType dtype = inputs_.products().dtype();
  const Tensor rows = ops::flatten_leading(gated.detach(), 1).to(dtype);
  // In the sums' dtype: where the gate keeps an input and nothing before it was pruned, d is small.
  const Tensor d = ops::sub(ops::flatten_leading(dense.detach(), 1).to(dtype), rows);
  if (!cross_.defined()) {
    const Shape square{rows.size(1), rows.size(1)};
    cross_ = Tensor::zeros(square, dtype, gated.device());
    lost_ = Tensor::zeros(square, dtype, gated.device());
  }
  ops::add_inner_products(cross_, d, rows);
  ops::add_gram(lost_, d);
}

Tensor correct_for_gates(const Tensor& weight, const GatedStatistics& statistics,
                         const HessianFactor& factor) {
  const Tensor& u = factor.wide;
  const Tensor wide = weight.to(u.dtype());
  const Tensor step = ops::matmul(ops::matmul(wide, statistics.cross()), u.transpose(0, 1));
  return ops::add(wide, ops::matmul(step, u)).to(DType::f32);
}

double gated_output_error(const Tensor& dense, const Tensor& pruned, const GatedStatistics& statistics) {
  const Tensor& products = statistics.inputs().products();
  const Tensor w = dense.to(products.dtype()), change = ops::sub(pruned.to(products.dtype()), w);
  /// a^T [in, in] sums b: the sum over tokens of (a x) . (b y), with `sums` = x^T y.
  const auto sum_of = [](const Tensor& a, const Tensor& sums, const Tensor& b) {
    return ops::sum(ops::mul(ops::matmul(a, sums), b)).item();
  };
  // V x~ - W x = (V - W) x~ - W d, so that nothing large cancels.
  const double lost = sum_of(w, statistics.lost(), w), cross = sum_of(w, statistics.cross(), w);
  const double whole = sum_of(w, products, w) + 2 * cross + lost;
  const double error = sum_of(change, products, change) - 2 * sum_of(w, statistics.cross(), change) + lost;
  return whole > 0 ? error / whole : 0;
}

}  // namespace tessera::sparsity
