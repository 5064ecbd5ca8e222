#pragma once

#include <cstdint>
#include <optional>

#include "tensor/dtype.h"

namespace tessera::optim {

/// Dynamic loss scaling (Micikevicius et al., "Mixed precision training", arXiv:1710.03740, section 3.2).
///
/// f16 holds nothing below 6e-8 and has its full precision only from 6.1e-5 on. The gradient of a mean over N
/// tokens is of the size 1 / N, so most of it would be rounded to 0. Therefore backward begins with the
/// gradient `scale` instead of 1, and the optimizer divides by it. A step whose gradients overflow is skipped
/// and lowers the scale; `interval` steps in a row without overflow raise it.
///
///   optim::AdamW optimizer(nn::parameters(model), {.lr = 1e-3, .loss_scale = optim::LossScale{}});
///   ...
///   Tape tape({.loss_scale = optimizer.loss_scale()});
///   tape.backward(loss);  // the gradients of the parameters are multiplied by the scale
///   optimizer.step();     // divides them: learning rate, clipping and grad_norm() mean what they always do
///
/// The scale and its counters live on the device and are part of the optimizer's state. All numbers but the
/// interval must be powers of two: scaling then rounds nothing.
struct LossScale {
  double initial = 0x1p16;
  double growth = 2, backoff = 0.5;  // factors of a rise and of a fall
  int64_t interval = 2000;           // steps in a row without overflow before a rise
  double minimum = 1;
  /// The gradient of one token's logit is below 1 / N and f16 ends at 2^16: 2^32 is for means over 2^16
  /// tokens.
  double maximum = 0x1p32;
};

/// The default for a model whose activations have this dtype: scaling for f16, none for the others, whose
/// exponents have the range of f32.
inline std::optional<LossScale> default_loss_scale(DType activations) {
  if (activations != DType::f16) return {};
  return LossScale{};
}

}  // namespace tessera::optim
