#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// K linear layers of one size in one operator (the heads of a mixture model).
///   shared      x [..., in],    every group sees all of x
///   not shared  x [..., K, in], group k sees row k
/// y[..., k, :] = x weight[k]^T + bias[k]: weight [K, out, in], bias [K, out] or undefined -> y [..., K,
/// out]. One floating dtype and device for all.
///
/// Rounding: sums in f32 (f64 for f64), rounded once to y's dtype. Saves the weight, and x if the weight
/// wants a gradient.
///   dx[..., k, :] = dy[..., k, :] weight[k]; shared: summed over k, in f32, rounded once
///   dweight[k] = dy_k^T x_k and dbias[k] = column sums of dy_k: in f32, see linear
/// Throws where sizes, dtypes or devices disagree.
Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, bool shared = true,
                      Site site = Site::here());

}  // namespace tessera::ops
