#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Arithmetic element by element; all operands floating, of any layout.
///
///   add(a, b)  a + b      da = dy      db = dy
///   sub(a, b)  a - b      da = dy      db = -dy
///   mul(a, b)  a b        da = dy b    db = dy a
///   div(a, b)  a / b      da = dy / b  db = -dy ((a / b) / b)
///
/// a and b have one dtype and one device and broadcast against each other (NumPy's rule: aligned at the end,
/// sizes agree or one is 1); anything else throws. The gradient of an operand that was broadcast is the sum
/// over the dimensions along which it was repeated (sum_to in ops/reduce: a fixed order).
///
///   scale(x, factor)  factor x            dx = factor dy
///   exp(x)            e^x                 dx = dy y
///   log(x)            natural logarithm   dx = dy / x
///   tanh(x)                               dx = dy (1 - y^2)
///   sigmoid(x)        1 / (1 + e^-x)      dx = dy y (1 - y)
///   sqrt(x)                               dx = dy / (2 y)
/// Outside their domains: NaN, and infinities at poles, as IEEE 754 has it.
///
/// Rounding: computed in f32 (f64 for f64; the factor too) and rounded once to the operands' dtype. Backward
/// keeps what its formula names, and of that only what a wanted gradient needs; y is kept as it was rounded.
/// Gradients that are summed for broadcasting are not rounded before the sum and are f32 (f64 for f64).
Tensor add(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor sub(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor mul(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor div(const Tensor& a, const Tensor& b, Site site = Site::here());

Tensor scale(const Tensor& x, double factor, Site site = Site::here());
Tensor exp(const Tensor& x, Site site = Site::here());
Tensor log(const Tensor& x, Site site = Site::here());
Tensor tanh(const Tensor& x, Site site = Site::here());
Tensor sigmoid(const Tensor& x, Site site = Site::here());
Tensor sqrt(const Tensor& x, Site site = Site::here());

}  // namespace tessera::ops
