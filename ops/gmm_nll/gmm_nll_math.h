#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "runtime/config.h"

/// The loss of one element and its gradients, as functions of its K parameters (logit, mu, log_sigma).

namespace tessera::ops {

/// The two sums of exponentials, each as (largest exponent, sum of exp(exponent - largest)). The exponents of
/// `joint` are w_k - max(w) - z_k^2 / 2 - s_k - log(2 pi) / 2: what remains to normalise is the weights' sum.
template <class C>
struct Mixture {
  C top_logit, weight_sum;
  C top_joint, joint_sum;

  TESSERA_HD C loss() const { return std::log(weight_sum) - (top_joint + std::log(joint_sum)); }
};

template <class C>
struct Component {
  C logit, z, inverse_sigma, log_sigma;

  template <class T>
  TESSERA_HD Component(const T* params, C y)
      : logit(C(params[0])), inverse_sigma(std::exp(-C(params[2]))), log_sigma(C(params[2])) {
    // At most the largest number, so that z is 0, not 0 times infinity, at y = mu. A NaN is in `joint` too.
    if (!(inverse_sigma <= std::numeric_limits<C>::max())) inverse_sigma = std::numeric_limits<C>::max();
    z = (y - C(params[1])) * inverse_sigma;
  }
  TESSERA_HD C joint(C top_logit) const {
    return (logit - top_logit) - C(0.5) * z * z - log_sigma - C(0.91893853320467274178);
  }
};

template <class C, class T>
TESSERA_HD Mixture<C> mix(const T* params, int64_t components, C y) {
  const C minus_infinity = -C(INFINITY);
  Mixture<C> mixture{minus_infinity, 0, minus_infinity, 0};
  for (int64_t k = 0; k < components; ++k) {
    const C logit = C(params[3 * k]);
    mixture.top_logit = logit > mixture.top_logit ? logit : mixture.top_logit;
  }
  for (int64_t k = 0; k < components; ++k) {
    const Component<C> component(params + 3 * k, y);
    mixture.weight_sum += std::exp(component.logit - mixture.top_logit);
    const C joint = component.joint(mixture.top_logit);
    if (joint == minus_infinity) continue;
    // One exponential serves both cases: a new largest term, or one more below it.
    const C ratio = std::exp(-std::abs(joint - mixture.top_joint));
    if (joint > mixture.top_joint) {
      mixture.joint_sum = mixture.joint_sum * ratio + C(1);
      mixture.top_joint = joint;
    } else {
      mixture.joint_sum += ratio;
    }
  }
  return mixture;
}

/// Writes the gradients of one element, `g` times, to dparams (which may be params) and returns dy.
template <class C, class T>
TESSERA_HD C mix_backward(T* dparams, const T* params, int64_t components, C y, C g) {
  const Mixture<C> mixture = mix<C>(params, components, y);
  const C per_weight = C(1) / mixture.weight_sum, per_joint = C(1) / mixture.joint_sum;
  C dy = 0;
  for (int64_t k = 0; k < components; ++k) {
    const Component<C> component(params + 3 * k, y);
    const C pi = std::exp(component.logit - mixture.top_logit) * per_weight;
    const C joint = component.joint(mixture.top_logit);
    const C r = std::exp(joint - mixture.top_joint) * per_joint;
    // z or its square may be infinite in a component with r = 0, and 0 times infinity is NaN.
    const C z = r > 0 ? component.z : C(0);
    const C pull = r * z * component.inverse_sigma;
    dparams[3 * k] = T(g * (pi - r));
    dparams[3 * k + 1] = T(-g * pull);
    dparams[3 * k + 2] = T(g * (r * (C(1) - z * z)));
    dy += pull;
  }
  return g * dy;
}

}  // namespace tessera::ops
