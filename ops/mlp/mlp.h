#pragma once

#include "ops/activation/activation.h"
#include "ops/linear/sliced_backward.h"

namespace tessera::ops {

/// The feed-forward layer of a transformer in one operator:
///   h = x up^T + up_bias,  a = f(h),  y = a down^T + down_bias + residual
/// x [..., D], up [F, D], down [E, F], up_bias [F], down_bias [E] and residual [..., E], each of these three
/// or undefined -> y [..., E]. One floating dtype and device for all.
///
/// Rounding: h, a and y to x's dtype, sums in f32 (f64 for f64); the residual as in linear. Saves x, the
/// weights, h and a.
///   da = dy down, dh = da f'(h) (both rounded to x's dtype), dx = dh up
///   ddown = dy^T a, dup = dh^T x, and the column sums of dy and dh: in f32, see linear
/// Variant "wgmma" (compute capability 9.0, bf16 and f16) applies f and f' in the epilogues of the GEMMs: a
/// and dh are written by the kernels that make h and da. There silu and gelu_tanh come from the special
/// function units: within 2^-12 |x| in bf16, 2^-20 |x| in f16; gelu within 1e-7 |x|. Throws where sizes,
/// dtypes or devices disagree.
Tensor mlp(const Tensor& x, const Tensor& up, const Tensor& down, Activation kind, const Tensor& up_bias = {},
           const Tensor& down_bias = {}, const Tensor& residual = {}, Site site = Site::here());
/// The same with a sliced backward pass. Rows of dy are chosen once; all GEMMs run on these N rows of dy, x
/// and h, and a of them is made from h: no tensor of all rows and F columns is made. So dup_bias is of the
/// chosen rows, times their scales; ddown_bias is of all. `full` sums ddown over all rows, for which a is
/// saved; dup is of the chosen rows, the only ones that arrive there. Saves x and h of the chosen rows, or
/// whole where the choice needs dy.
Tensor mlp(const Tensor& x, const Tensor& up, const Tensor& down, Activation kind, const Tensor& up_bias,
           const Tensor& down_bias, const Tensor& residual, const SlicedBackward& slice,
           Site site = Site::here());

}  // namespace tessera::ops
