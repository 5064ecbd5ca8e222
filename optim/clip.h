#pragma once

#include "nn/module.h"

namespace tessera::optim {

/// Multiplies the gradients of the parameters by min(1, max_grad_norm / (norm + 1e-6)), where norm is the L2
/// norm of all of them together, and returns that norm before clipping: f64, rank 0, on the parameters'
/// device. For programs that update weights themselves, or clip some parameters by themselves: an optimizer
/// clips all of its own with OptimizerOptions::max_grad_norm, to the same bits. The host does not wait for
/// the device unless it reads the norm.
///
/// Parameters without a gradient count as zero. Gradients of a tape with a loss scale are measured with it.
/// If the norm is infinite or NaN, some gradients are NaN afterwards, and an optimizer skips the step. Takes
/// memory of the gradients' size meanwhile. Throws unless max_grad_norm > 0, and as an optimizer does for the
/// parameters.
///
/// ```cpp
/// const Tensor norm = optim::clip_grad_norm(nn::parameters(model), 1.0);
/// ```
Tensor clip_grad_norm(const std::vector<nn::NamedParameter>& parameters, double max_grad_norm);

}  // namespace tessera::optim
