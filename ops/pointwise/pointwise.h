#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Arithmetic element by element, of operands of any layout; floating ones, and of some functions whole
/// numbers (below). Expressions such as `2 * a + b` call these functions (ops/pointwise/operators.h).
///
///   add(a, b)      a + b              da = dy      db = dy
///   sub(a, b)      a - b              da = dy      db = -dy
///   mul(a, b)      a b                da = dy b    db = dy a
///   div(a, b)      a / b              da = dy / b  db = -dy ((a / b) / b)
///   maximum(a, b)  the larger one     da = dy where a > b, dy / 2 where a = b, else 0; db likewise
///   minimum(a, b)  the smaller one    the same with a < b
///
/// a and b have one dtype and one device and broadcast against each other (NumPy's rule: aligned at the end,
/// sizes agree or one is 1); anything else throws. The gradient of an operand that was broadcast is the sum
/// over the dimensions along which it was repeated (sum_to in ops/reduce: a fixed order). maximum and minimum
/// are NaN if either operand is; both then receive dy.
///
///   scale(x, factor)         factor x                dx = factor dy
///   shift(x, offset)         x + offset              dx = dy
///   reciprocal(x, dividend)  dividend / x            dx = -dy (dividend / x) / x
///   neg(x)                   -x                      dx = -dy
///   abs(x)                   |x|                     dx = dy sign(x), 0 where x is 0
///   square(x)                x^2                     dx = 2 dy x
///   pow(x, exponent)         x^exponent              dx = dy exponent x^(exponent - 1), 0 if exponent is 0
///   exp(x)                   e^x                     dx = dy y
///   log(x)                   natural logarithm       dx = dy / x
///   sqrt(x)                                          dx = dy / (2 y)
///   rsqrt(x)                 1 / sqrt(x)             dx = -dy / (2 x sqrt(x))
///   sin(x), cos(x)           of radians              dx = dy cos x, dx = -dy sin x
///   tanh(x)                                          dx = dy (1 - y^2)
///   sigmoid(x)               1 / (1 + e^-x)          dx = dy y (1 - y)
///   softplus(x)              ln(1 + e^x)             dx = dy sigmoid(x)
///   clamp(x, low, high)      x, within [low, high]   dx = dy where low < x < high, else 0
/// Outside their domains: NaN, and infinities at poles, as IEEE 754 has it. A NaN stays NaN (but NaN^0 is 1);
/// abs and clamp send it no gradient.
///
/// Rounding: computed in f32 (f64 for f64; numbers given as double too) and rounded once to the operands'
/// dtype. Backward keeps what its formula names, and of that only what a wanted gradient needs; y is kept as
/// it was rounded. Gradients that are summed for broadcasting are not rounded before the sum and are f32 (f64
/// for f64).
///
/// Whole numbers, i64 or i32, have add, sub, mul, maximum, minimum, scale, shift, neg, abs, square and clamp,
/// without gradients: they are exact, and wrap around at the ends of their dtype. Factors, offsets and bounds
/// must be numbers of that dtype: `counts * 2` is, `counts / 2` throws, as div does, and as everything of u8
/// does (ops::cast makes i32 of it). Of bools maximum is or, and minimum is and.
///
///   floor_div(a, b)  a / b, rounded down (towards -inf)     -7 by 2 is -4
///   remainder(a, b)  a - b floor_div(a, b), of b's sign     -7 by 2 is 1, 7 by -2 is -1
/// are of whole numbers alone, as // and % in Python. A b of 0 is an error on the CPU; a GPU cannot report it
/// without making the host wait, so there the result is -1, all bits set.
Tensor add(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor sub(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor mul(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor div(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor maximum(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor minimum(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor floor_div(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor floor_div(const Tensor& x, double number, Site site = Site::here());
Tensor remainder(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor remainder(const Tensor& x, double number, Site site = Site::here());

Tensor scale(const Tensor& x, double factor, Site site = Site::here());
Tensor shift(const Tensor& x, double offset, Site site = Site::here());
Tensor reciprocal(const Tensor& x, double dividend = 1, Site site = Site::here());
Tensor neg(const Tensor& x, Site site = Site::here());
Tensor abs(const Tensor& x, Site site = Site::here());
Tensor square(const Tensor& x, Site site = Site::here());
Tensor pow(const Tensor& x, double exponent, Site site = Site::here());
Tensor exp(const Tensor& x, Site site = Site::here());
Tensor log(const Tensor& x, Site site = Site::here());
Tensor sqrt(const Tensor& x, Site site = Site::here());
Tensor rsqrt(const Tensor& x, Site site = Site::here());
Tensor sin(const Tensor& x, Site site = Site::here());
Tensor cos(const Tensor& x, Site site = Site::here());
Tensor tanh(const Tensor& x, Site site = Site::here());
Tensor sigmoid(const Tensor& x, Site site = Site::here());
Tensor softplus(const Tensor& x, Site site = Site::here());
Tensor clamp(const Tensor& x, double low, double high, Site site = Site::here());

/// Comparisons of floating, i64, i32 or bool operands, which broadcast as above: bool tensors, without a
/// gradient. Any comparison with NaN is false; not is equal(mask, 0). A number is rounded to x's dtype first,
/// and throws where x is whole and the number is none of its dtype. ops::sum counts the result, ops::max is
/// any and ops::min all; to average it, cast it: ops::mean(ops::cast(ops::equal(a, b), DType::f32)).
Tensor less(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor less(const Tensor& x, double number, Site site = Site::here());
Tensor less_equal(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor less_equal(const Tensor& x, double number, Site site = Site::here());
Tensor greater(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor greater(const Tensor& x, double number, Site site = Site::here());
Tensor greater_equal(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor greater_equal(const Tensor& x, double number, Site site = Site::here());
Tensor equal(const Tensor& a, const Tensor& b, Site site = Site::here());
Tensor equal(const Tensor& x, double number, Site site = Site::here());

/// a where the bool mask is true, else b; the three broadcast. a and b may have any dtype but f8. da = dy
/// where the mask is true, else 0, and db the other way round, summed as above. What is not chosen does not
/// matter, NaN included. Keeps the mask.
Tensor where(const Tensor& mask, const Tensor& a, const Tensor& b, Site site = Site::here());

}  // namespace tessera::ops
