#include "ops/matmul/matmul.h"

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"

namespace tessera::ops {
namespace {

Tensor oriented(const Tensor& x, bool transposed) {
  return transposed ? x.detach().transpose(-1, -2) : x.detach();
}

/// One matrix for a whole batch is likely a parameter: its gradient comes in f32.
GradientDType dtype_for(const Tensor& x, const Tensor& dy) {
  return x.rank() == 2 && dy.rank() > 2 ? GradientDType::f32 : GradientDType::same;
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b, Site site) {
  const CallScope call(site);
  check_operand("matmul", "a", a, a);
  check_operand("matmul", "b", b, a);
  check(a.rank() >= 2 && b.rank() >= 2, "matmul: a ", a.shape(), " and b ", b.shape(),
        " need at least two dimensions each; expected [..., M, K] and [..., K, N]");
  const Tensor left = oriented(a, transpose_a), right = oriented(b, transpose_b);
  check(left.size(-1) == right.size(-2), "matmul: a ", a.shape(), transpose_a ? " transposed" : "",
        " does not match b ", b.shape(), transpose_b ? " transposed" : "", ": sums over ", left.size(-1),
        " and ", right.size(-2), " elements");
  const Shape lead_a(a.shape().sizes().first(size_t(a.rank() - 2)));
  const Shape lead_b(b.shape().sizes().first(size_t(b.rank() - 2)));
  const Shape lead = broadcast(lead_a, lead_b, "matmul");
  Tensor y =
      Tensor::empty(lead.inserted(lead.rank(), left.size(-2)).inserted(lead.rank() + 1, right.size(-1)),
                    a.dtype(), a.device());
  const PassVariant pass("matmul", a);
  multiply(y, left, right);
  if (Tape* tape = Tape::recording(a, b)) {
    tape->record("matmul", {&a, &b}, {&y},
                 [a = Saved(a), b = Saved(b), transpose_a, transpose_b](Backward& entry) {
                   const Tensor dy = entry.grad().detach(), dy_t = dy.transpose(-1, -2);
                   const PassVariant pass("matmul", dy);
                   const Tensor left = oriented(a.get(), transpose_a), right = oriented(b.get(), transpose_b);
                   if (entry.needs(0)) {
                     const GradientDType dtype = dtype_for(a.get(), dy);
                     if (transpose_a) {
                       multiply_gradient(entry, 0, a.get(), dtype, right, dy_t);
                     } else {
                       multiply_gradient(entry, 0, a.get(), dtype, dy, right.transpose(-1, -2));
                     }
                   }
                   if (entry.needs(1)) {
                     const GradientDType dtype = dtype_for(b.get(), dy);
                     if (transpose_b) {
                       multiply_gradient(entry, 1, b.get(), dtype, dy_t, left);
                     } else {
                       multiply_gradient(entry, 1, b.get(), dtype, left.transpose(-1, -2), dy);
                     }
                   }
                 });
  }
  return y;
}

}  // namespace tessera::ops
