#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Losses between predictions x and targets of one shape, averaged over all elements: tensors of rank 0.
/// Composed of the operators of ops/pointwise and ops/reduce, so each step is recorded, rounded to x's dtype
/// and differentiable, towards the targets too. For classes see ops/cross_entropy, for mixtures ops/gmm_nll.
///
///   mse_loss         mean of e^2, with e = x - target
///   l1_loss          mean of |e|; the gradient where e is 0 is 0
///   huber_loss       mean of e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2); delta > 0
///   bce_with_logits  mean of -t ln sigmoid(x) - (1 - t) ln(1 - sigmoid(x)), with t = target in [0, 1];
///                    as t softplus(-x) + (1 - t) softplus(x), in which nothing overflows or cancels
Tensor mse_loss(const Tensor& x, const Tensor& target, Site site = Site::here());
Tensor l1_loss(const Tensor& x, const Tensor& target, Site site = Site::here());
Tensor huber_loss(const Tensor& x, const Tensor& target, double delta = 1, Site site = Site::here());
Tensor bce_with_logits(const Tensor& x, const Tensor& target, Site site = Site::here());

}  // namespace tessera::ops
