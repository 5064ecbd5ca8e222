#include "ops/sparse24/sparse24_linear.h"

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "ops/sparse24/sparse24_kernels.h"

namespace tessera::ops {

Tensor sparse24_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual,
                       const Selection24& selection, Site site) {
  const CallScope call(site);
  constexpr const char* kOp = "sparse24_linear";
  const Shape shape = check_linear_call(kOp, x, weight, bias, residual);
  const Sparse24 kept = compress24(flatten_leading(x, 1), Along24::features, selection);
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  const auto rows = [](const Tensor& given) { return given.defined() ? flatten_leading(given, 1) : given; };
  multiply24(rows(y), kept, weight.detach().transpose(0, 1), {.bias = bias, .residual = rows(residual)});
  Tape* const tape = Tape::recording(x, weight, bias, residual);
  if (!tape) return y;
  tape->record(kOp, {&x, &weight, &bias, &residual}, {&y},
               [kept, weight = Saved(weight), x_shape = x.shape()](Backward& b) {
                 const Tensor dy = flatten_leading(b.grad(), 1);
                 if (b.needs(0)) {
                   const Tensor dx = masked24(linear_input_gradient(dy, weight.get()), kept);
                   b.give(0, dx.reshape(x_shape));
                 }
                 linear_parameter_gradients(b, 1, 2, weight.get(), b.needs(1) ? decompress24(kept) : Tensor(),
                                            dy);
                 b.pass(0, {3});
               });
  return y;
}

}  // namespace tessera::ops
