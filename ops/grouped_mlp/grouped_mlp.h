#pragma once

#include "ops/activation/activation.h"

namespace tessera::ops {

/// K feed-forward layers over one input in one operator, the heads of a mixture model:
///   h_k = x up[k]^T,  a_k = f(h_k),  y[..., k, :] = a_k down[k]^T
/// x [..., D], up [K, F, D], down [K, E, F] -> y [..., K, E]. One floating dtype and device for all; no
/// biases (compose grouped_linear for them).
///
/// Saves x, up and down, and h [..., K, F] in variant "separate" (and on the CPU). Variant "wgmma" makes h
/// again.
///   da_k = dy_k down[k],  dh_k = da_k f'(h_k),  dx = sum over k of dh_k up[k]
///   dup[k] = dh_k^T x,  ddown[k] = dy_k^T a_k: in f32, see linear
/// Rounding: sums in f32 (f64 for f64); y, dh and dx once to x's dtype. Variant "separate" (and the CPU) also
/// round h, a and da to it, since each is a tensor there. Variant "wgmma" keeps these in registers.
/// Throws where sizes, dtypes or devices disagree.
Tensor grouped_mlp(const Tensor& x, const Tensor& up, const Tensor& down, Activation kind,
                   Site site = Site::here());

}  // namespace tessera::ops
