#include "ops/losses/losses.h"

#include "ops/pointwise/operators.h"
#include "ops/reduce/reduce.h"
#include "runtime/call_site.h"

namespace tessera::ops {
namespace {

/// Operands that would broadcast are refused: as predictions and targets they are a mistake.
void check_pair(const char* name, const Tensor& x, const Tensor& target) {
  check(x.defined() && target.defined(), name, ": ", x.defined() ? "the target" : "x", " is undefined");
  check(x.shape() == target.shape(), name, ": x is ", describe(x), " and the target ", describe(target),
        "; expected one shape");
}

}  // namespace

Tensor mse_loss(const Tensor& x, const Tensor& target, Site site) {
  const CallScope call(site);
  check_pair("mse_loss", x, target);
  return mean(square(x - target));
}

Tensor l1_loss(const Tensor& x, const Tensor& target, Site site) {
  const CallScope call(site);
  check_pair("l1_loss", x, target);
  return mean(abs(x - target));
}

Tensor huber_loss(const Tensor& x, const Tensor& target, double delta, Site site) {
  const CallScope call(site);
  check_pair("huber_loss", x, target);
  check(delta > 0, "huber_loss: delta is ", delta, "; expected more than 0");
  // |e| is its part up to delta, whose square counts, and the rest, which counts delta times.
  const Tensor error = abs(x - target), inner = clamp(error, 0, delta);
  return mean(0.5 * square(inner) + delta * (error - inner));
}

Tensor bce_with_logits(const Tensor& x, const Tensor& target, Site site) {
  const CallScope call(site);
  check_pair("bce_with_logits", x, target);
  return mean(target * softplus(-x) + (1 - target) * softplus(x));
}

}  // namespace tessera::ops
