#include "sparsity/statistics.h"

#include <algorithm>
#include <cmath>

#include "ops/gemm/gemm.h"
#include "ops/gemm/inner_products.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"

namespace tessera::sparsity {

void InputStatistics::add(const Tensor& x) {
  check(x.defined() && x.rank() >= 2 && is_floating(x.dtype()), "statistics: expected inputs [tokens, in]");
  const Tensor rows = ops::flatten_leading(x.detach(), 1);
  const DType sum_dtype = x.device().is_cpu() ? DType::f64 : DType::f32;
  const Tensor wide = rows.to(sum_dtype);
  const Tensor squares = ops::sum(ops::mul(wide, wide), 0);
  if (!squares_.defined()) {
    squares_ = squares;
    if (sums_ == Sums::products)
      products_ = Tensor::zeros({rows.size(1), rows.size(1)}, sum_dtype, x.device());
  } else {
    check(squares_.size(0) == rows.size(1), "statistics: inputs of width ", rows.size(1), "; expected ",
          squares_.size(0));
    squares_ = ops::add(squares_, squares);
  }
  // On a GPU 16-bit inputs are multiplied as they are: their products are exact in the f32 that sums them.
  if (sums_ == Sums::products) ops::add_gram(products_, x.device().is_cpu() ? wide : rows);
  tokens_ += rows.size(0);
}

const Tensor& InputStatistics::products() const {
  check(products_.defined(), "statistics: X^T X was not collected; ask for Sums::products");
  return products_;
}

int64_t InputStatistics::dead() const {
  const std::vector<double> sums = squares_.to_vector<double>();
  return std::count(sums.begin(), sums.end(), 0.0);
}

void InputStatistics::check_finite(const std::string& layer) const {
  const std::vector<double> sums = squares_.to_vector<double>();
  const auto bad = std::find_if(sums.begin(), sums.end(), [](double sum) { return !std::isfinite(sum); });
  check(bad == sums.end(), "prune: the inputs of ", layer, " are not finite (input ", bad - sums.begin(),
        " of ", sums.size(), "); the model's weights are damaged, or its activations overflow ",
        "(load it with a dtype of a larger range: --dtype bf16 or f32)");
}

}  // namespace tessera::sparsity
