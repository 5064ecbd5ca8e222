#include "ops/softmax/softmax.h"

#include "autograd/tape.h"
#include "ops/softmax/softmax_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

Tensor apply(const Tensor& x, int dim, bool log, Site site) {
  const CallScope call(site);
  const char* const name = log ? "log_softmax" : "softmax";
  check(x.defined(), name, ": x is undefined");
  check(x.rank() > 0, name, ": x is ", describe(x), ", of rank 0; reshape it to [1] first");
  check(-x.rank() <= dim && dim < x.rank(), name, ": x is ", describe(x), " and has no dimension ", dim,
        "; expected ", -x.rank(), " to ", x.rank() - 1);
  const int along = x.shape().resolve(dim);
  Tensor y = Tensor::empty_like(x);
  if (x.device().is_cpu()) {
    softmax_forward_cpu(y, x, along, log);
  } else if constexpr (kCuda) {
    softmax_forward_cuda(y, x, along, log);
  }
  if (Tape* tape = Tape::recording(x)) {
    tape->record(name, {&x}, {&y}, [y = Saved(y), along, log](Backward& b) {
      Tensor dx = Tensor::empty_like(y.get());
      if (dx.device().is_cpu()) {
        softmax_backward_cpu(dx, b.grad(), y.get(), along, log);
      } else if constexpr (kCuda) {
        softmax_backward_cuda(dx, b.grad(), y.get(), along, log);
      }
      b.give(0, std::move(dx));
    });
  }
  return y;
}

}  // namespace

Tensor softmax(const Tensor& x, int dim, Site site) {
  return apply(x, dim, false, site);
}

Tensor log_softmax(const Tensor& x, int dim, Site site) {
  return apply(x, dim, true, site);
}

}  // namespace tessera::ops
