#pragma once

#include <functional>
#include <vector>

#include "autograd/tape.h"

namespace tessera {

/// Activation checkpointing (Chen, Xu, Zhang, Guestrin: "Training Deep Nets with Sublinear Memory Cost",
/// arXiv:1604.06174): keeps the inputs of `f` instead of everything inside it, and runs `f` once more in
/// backward, with the same random numbers. `f` must compute the same each time from its inputs and from
/// leaves (parameters); results of the tape that it captures instead of taking as inputs are refused. Without
/// a tape it is just f(inputs).
using CheckpointFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>;
std::vector<Tensor> checkpoint(CheckpointFunction f, const std::vector<Tensor>& inputs,
                               Site site = Site::here());

/// Whether this thread is in the second run of a checkpointed function, in backward.
bool recomputing();

/// The form with one input and one output.
Tensor checkpoint(std::function<Tensor(const Tensor&)> f, const Tensor& input, Site site = Site::here());

}  // namespace tessera
