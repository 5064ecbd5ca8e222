#pragma once

#include <functional>
#include <vector>

#include "autograd/tape.h"

namespace tessera {

/// Activation checkpointing (Chen, Xu, Zhang, Guestrin: "Training Deep Nets with Sublinear Memory Cost",
/// arXiv:1604.06174): keeps the inputs of `f` instead of everything inside it, and runs `f` once more in
/// backward, with the same random numbers. `f` must compute the same each time from its inputs and from
/// leaves (parameters), which may not be written between the two runs: backward throws then, as it does for
/// a tensor that an operator saved. Results of the tape that `f` captures instead of taking as inputs are
/// refused, and so is a leaf that it returns as it is. State that it reads and changes goes through
/// state_of_first_run(). Without a tape it is just f(inputs).
using CheckpointFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>;
std::vector<Tensor> checkpoint(CheckpointFunction f, const std::vector<Tensor>& inputs,
                               Site site = Site::here());

/// Whether this thread is in the second run of a checkpointed function, in backward.
bool recomputing();
/// For layers whose forward pass reads state that they later overwrite, such as counts of their last call.
/// Returns: in the first run of a checkpointed function a copy of `state`, which is logged; in the
/// recomputation the logged copy; elsewhere `state`. Layers must not overwrite it while recomputing() is
/// true. Copied on the device: the host does not wait.
Tensor state_of_first_run(const Tensor& state);
/// How many runs of checkpointed functions, first or second, this thread is in.
int checkpoint_depth();

/// The form with one input and one output.
Tensor checkpoint(std::function<Tensor(const Tensor&)> f, const Tensor& input, Site site = Site::here());

}  // namespace tessera
