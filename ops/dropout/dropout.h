#pragma once

#include "runtime/rng.h"
#include "tensor/tensor.h"

namespace tessera::ops {

/// Inverted dropout (Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov, JMLR 15, 2014; scaled in
/// training, section 10): y = x m / (1 - p), m = 0 with probability p, else 1. x is floating, of any shape
/// and layout; 0 <= p < 1. As in PyTorch it is a multiplication, so a NaN or an infinity of x stays visible
/// (as NaN) where m = 0, in y and in dx alike.
///
/// The mask is a function of the stream that `rng` reserves and of the element's place: element i in
/// row-major order is dropped if word i % 4 of philox(seed, offset, i / 4) is below p 2^32. So it is the same
/// on every device, for every layout and dtype, and a replayed graph draws a new one each time, as eager
/// calls do. Backward draws the mask again from the stream: dx = mask dy / (1 - p); no tensor is saved.
///
/// p = 0 draws nothing and shares x's elements. Rounding: x times 1 / (1 - p) in f32 (f64 for f64), once to
/// x's dtype.
Tensor dropout(const Tensor& x, double p, const Rng& rng, Site site = Site::here());

}  // namespace tessera::ops
