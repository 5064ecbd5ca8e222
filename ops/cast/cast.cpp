#include "ops/cast/cast.h"

#include "autograd/tape.h"

namespace tessera::ops {
namespace {

bool has_gradient(DType dtype) {
  return is_floating(dtype) && dtype != DType::f8e4m3;
}

Tensor converted(const Tensor& x, DType to) {
  if (x.dtype() == to) return x.detach();
  Tensor y = Tensor::empty(x.shape(), to, x.device());
  y.copy_from(x);
  return y;
}

}  // namespace

Tensor cast(const Tensor& x, DType to, Site site) {
  const CallScope call(site);
  check(x.defined(), "cast: x is undefined");
  Tensor y = converted(x, to);
  if (Tape* tape = has_gradient(to) ? Tape::recording(x) : nullptr)
    tape->record("cast", {&x}, {&y}, [from = x.dtype()](Backward& b) {
      if (b.grad().dtype() == from) return b.pass(0, {0});
      b.give(0, converted(b.grad(), from));
    });
  return y;
}

}  // namespace tessera::ops
