#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// The gated activation of Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, equation 5:
///   y = silu(gate) up,  silu(g) = g s,  s = 1 / (1 + exp(-g))
///   dgate = dy up s (1 + g (1 - s))        dup = dy silu(g)
/// of two tensors of one shape and dtype, or of the halves of x [..., 2F], gate first: y [..., F]. In the
/// packed form one GEMM computes both halves, and dx is written as one tensor.
///
/// Floating, any layout. Rounding: computed in f32 (f64 for f64), y and the gradients rounded once; silu(g)
/// is never rounded by itself. Kept for backward: the inputs. Throws for shapes, dtypes or devices that do
/// not agree, and for an odd last dimension of x.
Tensor swiglu(const Tensor& gate, const Tensor& up, Site site = Site::here());
Tensor swiglu(const Tensor& packed, Site site = Site::here());

}  // namespace tessera::ops
