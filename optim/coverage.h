#pragma once

#include <initializer_list>
#include <vector>

#include "autograd/tape.h"
#include "optim/optimizer.h"

namespace tessera::optim {

/// Throws if a leaf that the tape will send a gradient to belongs to none of the optimizers, which is so for
/// a part that a model uses but does not list in fields(): it is neither trained nor saved, and nothing else
/// says so. The message lists these leaves: shape, the operator and the line that used each first, and the
/// layer.
///
/// ```cpp
/// Rng rng(1);
/// nn::Linear model(2, 1, rng);
/// optim::AdamW optimizer(nn::parameters(model));
/// const Tensor x = Tensor::ones({4, 2});
/// Tape tape;
/// const Tensor loss = ops::sum(model(x));
/// optim::check_covers(tape, {&optimizer});
/// tape.backward(loss);
/// ```
///
/// For the first step of a new program, between forward and backward: it reads the tape once and costs
/// nothing where it is not called. `others` are leaves whose gradients the program uses itself, such as the
/// inputs of adversarial training. Throws if the tape has recorded nothing, or has run backward already.
void check_covers(const Tape& tape, std::initializer_list<const Optimizer*> optimizers,
                  const std::vector<Tensor>& others = {}, Site site = Site::here());

}  // namespace tessera::optim
