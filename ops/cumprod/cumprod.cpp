#include "ops/cumprod/cumprod.h"

#include "autograd/tape.h"
#include "ops/cumprod/cumprod_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

Tensor cumprod(const Tensor& x, int dim, Site site) {
  const CallScope call(site);
  check(x.defined(), "cumprod: x is undefined");
  check(dim >= -x.rank() && dim < x.rank(), "cumprod: dimension ", dim, " is outside ", describe(x));
  const bool floating = is_floating(x.dtype()) && x.dtype() != DType::f8e4m3;
  check(floating || x.dtype() == DType::i64 || x.dtype() == DType::i32, "cumprod: dtype ", x.dtype(),
        " is not supported; expected f64, f32, bf16, f16, i64 or i32");
  const int d = x.shape().resolve(dim);
  Tensor y = Tensor::empty(x.shape(), floating ? x.dtype() : DType::i64, x.device());
  if (y.count() > 0) {
    if (x.device().is_cpu()) {
      cumprod_cpu(y, x.detach(), d);
    } else if constexpr (kCuda) {
      cumprod_cuda(y, x.detach(), d);
    }
  }
  if (Tape* const tape = Tape::recording(x))
    tape->record("cumprod", {&x}, {&y}, [x = Saved(x), y = Saved(y), d](Backward& b) {
      const Tensor from = x.get().packed(), to = y.get().packed(), dy = b.grad().packed();
      Tensor dx = Tensor::empty_packed(from.shape(), from.dtype(), from.device());
      if (dx.count() > 0) {
        if (dx.device().is_cpu()) {
          cumprod_backward_cpu(dx, dy, from, to, d);
        } else if constexpr (kCuda) {
          cumprod_backward_cuda(dx, dy, from, to, d);
        }
      }
      b.give(0, std::move(dx));
    });
  return y;
}

}  // namespace tessera::ops
