#include "ops/dropout/dropout.h"

#include "autograd/tape.h"
#include "ops/dropout/dropout_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

Tensor masked(const Tensor& x, const DropoutMask& mask) {
  Tensor y = Tensor::empty_like(x);
  if (x.device().is_cpu()) {
    dropout_cpu(y, x, mask);
  } else if constexpr (kCuda) {
    dropout_cuda(y, x, mask);
  }
  return y;
}

Tensor dropout(const Tensor& x, double p, const Rng& rng, Site site) {
  const CallScope call(site);
  check(x.defined(), "dropout: x is undefined");
  check(p >= 0 && p < 1, "dropout: p = ", p, " of ", describe(x), "; expected 0 <= p < 1");
  if (p == 0) {
    Tensor y = x.detach();
    if (Tape* tape = Tape::recording(x))
      tape->record("dropout", {&x}, {&y}, [](Backward& b) { b.pass(0, {0}); });
    return y;
  }
  const DropoutMask mask = DropoutMask::of(p, rng.reserve(x.device()));
  Tensor y = masked(x, mask);
  if (Tape* tape = Tape::recording(x))
    tape->record("dropout", {&x}, {&y}, [mask](Backward& b) { b.give(0, masked(b.grad(), mask)); });
  return y;
}

}  // namespace tessera::ops
