#include "ops/gmm_nll/gmm_nll.h"

#include "autograd/tape.h"
#include "ops/gmm_nll/gmm_nll_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_arguments(const Tensor& params, const Tensor& y) {
  check(params.defined() && y.defined(), "gmm_nll: ", params.defined() ? "y" : "params", " is undefined");
  check(params.rank() >= 2 && params.size(-1) == 3 && params.size(-2) >= 1, "gmm_nll: params is ",
        describe(params), "; expected [..., K, 3] with K >= 1 and (logit, mu, log_sigma) innermost");
  check(params.shape().without(-1).without(-1) == y.shape(), "gmm_nll: y is ", describe(y),
        ", but params is ", describe(params), "; expected y of shape ",
        params.shape().without(-1).without(-1));
  const bool mixed = y.dtype() == DType::f32 && is_floating(params.dtype()) && size_of(params.dtype()) == 2;
  check((params.dtype() == y.dtype() || mixed) && params.device() == y.device(), "gmm_nll: y is ",
        describe(y), ", but params is ", describe(params),
        "; expected y of the same dtype, or f32 next to bf16 or f16, on ", "one device");
}

Tensor packed_like(const Tensor& like) {
  return Tensor::empty_packed(like.shape(), like.dtype(), like.device());
}

}  // namespace

Tensor gmm_nll(const Tensor& params, const Tensor& y, Reduction reduction, Site site) {
  const CallScope call(site);
  check_arguments(params, y);
  const Tensor theta = params.packed(), target = y.packed();
  Tensor loss = Tensor::empty_packed(reduction == Reduction::none ? y.shape() : Shape{},
                                     sum_dtype(params.dtype()), y.device());
  Tape* const tape = Tape::recording(params, y);
  Tensor dparams, dy;  // for a dloss of `scale` (undefined: 1); undefined unless forward makes them
  const Tensor scale = tape ? tape->initial_gradient(loss.dtype(), loss.device()) : Tensor();
  if (y.device().is_cpu()) {
    gmm_nll_forward_cpu(loss, theta, target, reduction);
  } else if constexpr (kCuda) {
    if (tape && reduction != Reduction::none) {
      if (requires_grad(params)) dparams = packed_like(theta);
      if (requires_grad(y)) dy = packed_like(target);
    }
    gmm_nll_forward_cuda(loss, dparams, dy, scale, theta, target, reduction);
  }
  if (tape)
    tape->record("gmm_nll", {&params, &y}, {&loss},
                 [params = Saved(params), y = Saved(y), dparams, dy, scale, reduction](Backward& b) mutable {
                   const Tensor theta = params.get().packed(), target = y.get().packed(),
                                dloss = b.grad().packed();
                   const bool made = dparams.defined() || dy.defined();
                   if (b.needs(0) && !made) dparams = packed_like(theta);
                   if (b.needs(1) && !made) dy = packed_like(target);
                   if (target.device().is_cpu()) {
                     gmm_nll_backward_cpu(dparams, dy, dloss, theta, target, reduction);
                   } else if constexpr (kCuda) {
                     gmm_nll_backward_cuda(dparams, dy, dloss, theta, target, reduction, made, scale);
                   }
                   b.give(0, std::move(dparams));
                   b.give(1, std::move(dy));
                 });
  return loss;
}

}  // namespace tessera::ops
