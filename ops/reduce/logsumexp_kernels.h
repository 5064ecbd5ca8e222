#pragma once

#include <cmath>

#include "runtime/config.h"
#include "tensor/tensor.h"

/// The elementwise passes of logsumexp around its maximum and its sum. `largest` is the maximum of an output
/// in x's dtype, `sum` that of its exponentials in sum_dtype; both broadcast to x.

namespace tessera::ops {

/// e^(x - largest), of which one is 1: no sum overflows. An infinite maximum is not subtracted, which would
/// make NaN of the elements that have it.
template <class C>
TESSERA_HD C scaled_exponential(C x, C largest) {
  return std::exp(x - (std::isinf(largest) ? C(0) : largest));
}
template <class C>
TESSERA_HD C logarithm_of_sum(C largest, C sum) {
  return (std::isinf(largest) ? C(0) : largest) + std::log(sum);
}
/// Nothing reaches elements that are all -inf.
template <class C>
TESSERA_HD C gradient_per_exponential(C dy, C sum) {
  return sum == 0 ? C(0) : dy / sum;
}

/// e = the exponentials of x, in sum_dtype.
void exponentials_cpu(const Tensor& e, const Tensor& x, const Tensor& largest);
/// Their sums. What is reduced is one pass on a GPU (is_one_pass).
void sum_exponentials_cuda(const Tensor& sum, const Tensor& x, const Tensor& largest);
/// y = the logarithm of the sum of all, in x's dtype.
void logarithms_cpu(const Tensor& y, const Tensor& largest, const Tensor& sum);
void logarithms_cuda(const Tensor& y, const Tensor& largest, const Tensor& sum);
/// shares = dy / sum, in sum_dtype.
void shares_cpu(const Tensor& shares, const Tensor& dy, const Tensor& sum);
void shares_cuda(const Tensor& shares, const Tensor& dy, const Tensor& sum);
/// dx = shares e^(x - largest).
void share_out_cpu(const Tensor& dx, const Tensor& shares, const Tensor& x, const Tensor& largest);
void share_out_cuda(const Tensor& dx, const Tensor& shares, const Tensor& x, const Tensor& largest);

}  // namespace tessera::ops
