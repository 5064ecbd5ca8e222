#include "ops/grouped_linear/grouped_linear.h"

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/grouped_linear/grouped_linear_kernels.h"
#include "ops/linear/linear_kernels.h"

namespace tessera::ops {
Tensor by_group(const Tensor& x, bool shared) {
  return shared ? flatten_leading(x, 1) : flatten_leading(x, 2).transpose(0, 1);
}

Tensor grouped_input_gradient(const Shape& shape, const Tensor& dy, const Tensor& weight, bool shared) {
  Tensor dx = Tensor::empty(shape, weight.dtype(), weight.device());
  if (shared && !sum_is_one_gemm(by_group(dx, true), dy, weight))
    dx = Tensor::empty(shape, sum_dtype(weight.dtype()), weight.device());
  multiply_sum(by_group(dx, shared), dy, weight);
  return dx;
}

Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, bool shared, Site site) {
  const CallScope call(site);
  constexpr const char* kName = "grouped_linear";
  check_operand(kName, "x", x, x);
  check_operand(kName, "weight", weight, x);
  check(weight.rank() == 3, kName, ": weight ", weight.shape(),
        " has not three dimensions; expected [K, out, in]");
  const int64_t groups = weight.size(0), out = weight.size(1), in = weight.size(2);
  check(x.rank() >= (shared ? 1 : 2) && x.size(-1) == in && (shared || x.size(-2) == groups), kName, ": x ",
        x.shape(), " does not match weight ", weight.shape(), "; expected ",
        shared ? "[..., in]" : "[..., K, in] (not shared)", " of weight [K, out, in]");
  if (bias.defined()) {
    check_operand(kName, "bias", bias, x);
    check(bias.shape() == Shape({groups, out}), kName, ": bias ", bias.shape(), " does not go with weight ",
          weight.shape(), "; expected ", Shape{groups, out});
  }
  const Shape rows = x.shape().without(-1);
  const Shape y_shape =
      shared ? rows.inserted(rows.rank(), groups).inserted(rows.rank() + 1, out) : x.shape().with(-1, out);
  Tensor y = Tensor::empty(y_shape, x.dtype(), x.device());
  const PassVariant pass(kName, x);
  multiply(by_group(y, false), by_group(x, shared), weight.detach().transpose(1, 2),
           {.bias = bias.defined() ? bias.detach().reshape({groups, 1, out}) : Tensor()});
  if (Tape* tape = Tape::recording(x, weight, bias)) {
    const Saved kept_x = requires_grad(weight) ? Saved(x) : Saved();
    tape->record(kName, {&x, &weight, &bias}, {&y},
                 [x = kept_x, kept = Saved(weight), shape = x.shape(), shared](Backward& b) {
                   const Tensor& weight = kept.get();
                   const PassVariant pass(kName, weight);
                   const Tensor dy = by_group(b.grad(), false);  // [K, rows, out]
                   if (b.needs(0)) b.give(0, grouped_input_gradient(shape, dy, weight, shared));
                   if (b.needs(1))
                     multiply_gradient(b, 1, weight, GradientDType::f32, dy.transpose(1, 2),
                                       by_group(x.get(), shared));
                   bias_gradient(b, 2, b.grad(), true);
                 });
  }
  return y;
}

}  // namespace tessera::ops
