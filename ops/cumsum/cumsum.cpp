#include "ops/cumsum/cumsum.h"

#include "autograd/tape.h"
#include "ops/cumsum/cumsum_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

Lines::Lines(const Layout& x, const Layout& y, int dim) {
  Layout first = y;  // of y the first element along `dim`
  first.shape = y.shape.with(dim, 1);
  plan = plan_dim(x, dim, first);
  y_stride = y.strides[size_t(y.shape.resolve(dim))];
}

namespace {

Tensor summed(const Tensor& x, DType dtype, int dim, Running way) {
  Tensor y = Tensor::empty(x.shape(), dtype, x.device());
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    cumsum_cpu(y, x, dim, way);
  } else if constexpr (kCuda) {
    cumsum_cuda(y, x, dim, way);
  }
  return y;
}

}  // namespace

Tensor cumsum(const Tensor& x, int dim, Site site) {
  const CallScope call(site);
  check(x.defined(), "cumsum: x is undefined");
  check(dim >= -x.rank() && dim < x.rank(), "cumsum: dimension ", dim, " is outside ", describe(x));
  const DType dtype = is_floating(x.dtype()) ? x.dtype() : DType::i64;
  Tensor y = summed(x.detach(), dtype, dim, Running::forward);
  if (Tape* const tape = Tape::recording(x))
    tape->record("cumsum", {&x}, {&y}, [dim](Backward& b) {
      const Tensor dy = b.grad();
      b.give(0, summed(dy, dy.dtype(), dim, Running::backward));
    });
  return y;
}

}  // namespace tessera::ops
