#pragma once

#include <cmath>
#include <type_traits>

#include "optim/loss_scale.h"
#include "runtime/config.h"

/// The arithmetic of one element, shared by the CPU and the CUDA kernel, and of one step's scalars. C is
/// float, or double for f64 parameters. `w` is the weight (the master where there is one), `g` its gradient
/// after clipping, `s` its states.

namespace tessera::optim {

/// sqrt(x). On a GPU an f32 one is sqrt.approx: within 2^-22, for normal and subnormal numbers.
template <class C>
TESSERA_HD C root(C x) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<C, float>) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
#endif
  return std::sqrt(x);
}

/// a / b for b = 0, or 2^-126 <= b <= 2^126. On a GPU an f32 one is a * rcp.approx(b): within 2^-22.
template <class C>
TESSERA_HD C quotient(C a, C b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<C, float>) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    return a * inverse;
  }
#endif
  return a / b;
}

/// Formulas with a kSlowState may keep their states in bf16 (OptimizerOptions::states): which of them one
/// step changes by less than the distance of two bf16 numbers, so that rounding to nearest would lose the
/// change; -1: none. That state is rounded stochastically, the others to nearest.
template <class R>
concept TakesShortStates = requires {
  R::kSlowState;
};

/// The arguments of a rule besides the element.
template <class C>
struct Scalars {
  C rate;          // the learning rate of this parameter; of an average: the share of the new value
  C weight_decay;  // of this parameter
  C bias1, bias2;  // 1 - beta1^t, sqrt(1 - beta2^t)
};

/// Loshchilov, Hutter: "Decoupled weight decay regularization", arXiv:1711.05101, algorithm 2, with the decay
/// scaled by the learning rate as in PyTorch: w is multiplied by 1 - rate * weight_decay.
struct AdamWRule {
  static constexpr int kStates = 2;  // first and second moment
  static constexpr int kSlowState = 1;
  static constexpr bool kGradient = true, kWritesWeight = true;
  double beta1, beta2, eps;

  template <class C>
  TESSERA_HD void operator()(C& w, C g, C* s, const Scalars<C>& k) const {
    s[0] = C(beta1) * s[0] + C(1 - beta1) * g;
    s[1] = C(beta2) * s[1] + C(1 - beta2) * g * g;
    w -= k.rate * k.weight_decay * w;
    w -= quotient(k.rate / k.bias1 * s[0], root(s[1]) * (1 / k.bias2) + C(eps));
  }
};

/// w -= rate * (g + weight_decay * w).
struct SgdRule {
  static constexpr int kStates = 0, kSlowState = -1;
  static constexpr bool kGradient = true, kWritesWeight = true;

  template <class C>
  TESSERA_HD void operator()(C& w, C g, C*, const Scalars<C>& k) const {
    w -= k.rate * (g + k.weight_decay * w);
  }
};

/// v = momentum * v + (g + weight_decay * w); w -= rate * v, or with Nesterov's look-ahead in PyTorch's form
/// (Sutskever et al., ICML 2013) w -= rate * (g + weight_decay * w + momentum * v).
struct MomentumRule {
  static constexpr int kStates = 1, kSlowState = -1;
  static constexpr bool kGradient = true, kWritesWeight = true;
  double momentum;
  bool nesterov;

  template <class C>
  TESSERA_HD void operator()(C& w, C g, C* s, const Scalars<C>& k) const {
    g += k.weight_decay * w;
    s[0] = C(momentum) * s[0] + g;
    w -= k.rate * (nesterov ? g + C(momentum) * s[0] : s[0]);
  }
};

/// The first half of a rule that computes a direction from gradients: s[0] = the gradient, clipped and
/// without the loss scale. The weight stays.
struct TakeRule {
  static constexpr int kStates = 1;
  static constexpr bool kGradient = true, kWritesWeight = false;

  template <class C>
  TESSERA_HD void operator()(C&, C g, C* s, const Scalars<C>&) const {
    s[0] = g;
  }
};

/// The second half: w -= rate * (s[0] + weight_decay * w).
struct DescendRule {
  static constexpr int kStates = 1;
  static constexpr bool kGradient = false, kWritesWeight = true;

  template <class C>
  TESSERA_HD void operator()(C& w, C, C* s, const Scalars<C>& k) const {
    w -= k.rate * (s[0] + k.weight_decay * w);
  }
};

/// Momentum as an average: s[0] = momentum s[0] + (1 - momentum) g, and the direction s[1], which is s[0] or
/// with Nesterov's look-ahead (1 - momentum) g + momentum s[0]. The weight stays.
struct DirectionRule {
  static constexpr int kStates = 2;
  static constexpr bool kGradient = true, kWritesWeight = false;
  double momentum;
  bool nesterov;

  template <class C>
  TESSERA_HD void operator()(C&, C g, C* s, const Scalars<C>&) const {
    const C fresh = C(1 - momentum) * g;
    s[0] = C(momentum) * s[0] + fresh;
    s[1] = nesterov ? fresh + C(momentum) * s[0] : s[0];
  }
};

/// The exponential moving average of the weight: s += rate * (w - s).
struct AverageRule {
  static constexpr int kStates = 1;
  static constexpr bool kGradient = false, kWritesWeight = false;

  template <class C>
  TESSERA_HD void operator()(C& w, C, C* s, const Scalars<C>& k) const {
    s[0] += k.rate * (w - s[0]);
  }
};

/// Rules of one optimizer, at most.
inline constexpr int kMostRules = 4;

/// Slots of the f64 tensor on the device that a step reads and writes.
enum StatusSlot : int {
  kRate,   // base learning rate; uploaded by the host
  kNorm,   // of all gradients, before clipping, without the loss scale
  kClip,   // what gradients are multiplied by: the factor of clipping over the loss scale
  kApply,  // 1, or 0 if this step is skipped
  kBias1,  // of the first rule of an optimizer; the next one's follow, two per rule
  kBias2,
  kStatusSlots = kBias1 + 2 * kMostRules
};

/// The first half of a rule that computes a step from the two moments of AdamWRule: these alone. The weight
/// stays.
struct MomentsRule {
  static constexpr int kStates = 2;
  static constexpr bool kGradient = true, kWritesWeight = false;
  double beta1, beta2;

  template <class C>
  TESSERA_HD void operator()(C&, C g, C* s, const Scalars<C>&) const {
    s[0] = C(beta1) * s[0] + C(1 - beta1) * g;
    s[1] = C(beta2) * s[1] + C(1 - beta2) * g * g;
  }
};

/// Slots of the i64 tensor on the device.
enum CountSlot : int { kSteps, kSkipped, kCountSlots };

/// Slots of the i64 tensor on the device that belongs to the loss scale.
enum ScaleCountSlot : int {
  kGoodSteps,         // in a row without overflow, since the scale's last change
  kSkippedAtMinimum,  // of the skipped steps those at the smallest scale, which could not fall any further
  kScaleCountSlots
};

/// The loss scale on the device. Null: gradients are not scaled.
struct ScaleState {
  float* scale = nullptr;
  int64_t* counts = nullptr;  // ScaleCountSlot
};

/// The decays of two moments that begin at zero, for which a rule corrects; 0: no such moment.
struct Betas {
  double beta1 = 0, beta2 = 0;
};

struct PrepareOptions {
  double max_grad_norm = 0;  // 0: no clipping
  bool nothing = false;      // no gradient arrived: the step is skipped, and tells nothing of the loss scale
  Betas betas[kMostRules] = {};
  LossScale loss_scale = {};  // used if there is a scale
};

/// Changes the scale after a step whose gradients were finite or not.
TESSERA_HD void adapt(const ScaleState& state, bool finite, const LossScale& options) {
  const double scale = *state.scale;
  if (!finite) {
    state.counts[kGoodSteps] = 0;
    if (scale <= options.minimum) state.counts[kSkippedAtMinimum] += 1;
    const double lower = scale * options.backoff;
    *state.scale = float(lower > options.minimum ? lower : options.minimum);
  } else if ((state.counts[kGoodSteps] += 1) >= options.interval) {
    state.counts[kGoodSteps] = 0;
    const double higher = scale * options.growth;
    *state.scale = float(higher < options.maximum ? higher : options.maximum);
  }
}

/// Decides about a step from the sum of squares of all gradients, which are multiplied by the loss scale if
/// there is one: counts it, or skips it if the norm is not finite; the factor of clipping as PyTorch's,
/// max_grad_norm / (norm + 1e-6) up to 1; the bias corrections; the next loss scale. `restarts`: the step
/// after which the moments of each rule began at zero again, or null.
TESSERA_HD void prepare(double* status, int64_t* counts, const ScaleState& scaling, double sum_of_squares,
                        const PrepareOptions& options, const int64_t* restarts = nullptr) {
  const double inverse = scaling.scale ? 1 / double(*scaling.scale) : 1.0;
  const double norm = std::sqrt(sum_of_squares) * inverse;
  const bool finite = norm - norm == 0, applies = finite && !options.nothing;
  const double clip = options.max_grad_norm > 0 ? options.max_grad_norm / (norm + 1e-6) : 1.0;
  counts[applies ? kSteps : kSkipped] += 1;
  status[kNorm] = norm;
  status[kClip] = (clip < 1 ? clip : 1.0) * inverse;
  status[kApply] = applies ? 1 : 0;
  for (int rule = 0; rule < kMostRules; ++rule) {  // a number known to the compiler: no indexed copy
    const double t = double(counts[kSteps] - (restarts ? restarts[rule] : 0));
    status[kBias1 + 2 * rule] = 1 - std::pow(options.betas[rule].beta1, t);
    status[kBias2 + 2 * rule] = std::sqrt(1 - std::pow(options.betas[rule].beta2, t));
  }
  if (scaling.scale && !options.nothing) adapt(scaling, finite, options.loss_scale);
}

/// After prepare(), for one parameter of an optimizer that skips missing gradients: counts its own steps,
/// from which its bias corrections follow. `arrived`: 0, or 1 + the number of its rule.
TESSERA_HD void prepare_parameter(const double* status, uint8_t arrived, int64_t& steps, double* bias,
                                  const PrepareOptions& options) {
  if (arrived == 0 || status[kApply] == 0) return;
  const double t = double(steps += 1);
  bias[0] = 1 - std::pow(options.betas[arrived - 1].beta1, t);
  bias[1] = std::sqrt(1 - std::pow(options.betas[arrived - 1].beta2, t));
}

/// The share of the new value in the n-th update of an average (n from 1): 1 - min(decay, (1 + n)/(10 + n))
/// while warming up, else 1 - decay.
TESSERA_HD void prepare_average(double* status, int64_t* counts, double decay, bool warmup) {
  const double n = double(counts[kSteps] += 1);
  const double early = (1 + n) / (10 + n);
  status[kRate] = 1 - (warmup && early < decay ? early : decay);
  status[kClip] = 1;
  status[kApply] = 1;
}

}  // namespace tessera::optim
