#include "ops/elementwise.h"
#include "ops/reduce/logsumexp_kernels.h"

namespace tessera::ops {
namespace {

/// y = f(x...) in the dtype C of the sums, in which all operands are taken.
template <class F, class... Inputs>
void run(const Tensor& y, DType dtype, F&& f, const Inputs&... x) {
  const Tensor wide = y.dtype() == dtype ? y : Tensor::empty(y.shape(), dtype, y.device());
  dispatch_among<double, float>(
      dtype, [&]<class C>() { elementwise_cpu<C>(wide, f, x.to(dtype)...); }, [] {});
  if (y.dtype() != dtype) y.copy_from(wide);
}

}  // namespace

void exponentials_cpu(const Tensor& e, const Tensor& x, const Tensor& largest) {
  run(
      e, e.dtype(), [](auto x, auto largest) { return scaled_exponential(x, largest); }, x, largest);
}

void logarithms_cpu(const Tensor& y, const Tensor& largest, const Tensor& sum) {
  run(
      y, sum.dtype(), [](auto largest, auto sum) { return logarithm_of_sum(largest, sum); }, largest, sum);
}

void shares_cpu(const Tensor& shares, const Tensor& dy, const Tensor& sum) {
  run(
      shares, sum.dtype(), [](auto dy, auto sum) { return gradient_per_exponential(dy, sum); }, dy, sum);
}

void share_out_cpu(const Tensor& dx, const Tensor& shares, const Tensor& x, const Tensor& largest) {
  run(
      dx, shares.dtype(),
      [](auto share, auto x, auto largest) { return share * scaled_exponential(x, largest); }, shares, x,
      largest);
}

}  // namespace tessera::ops
