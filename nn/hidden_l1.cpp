#include "nn/hidden_l1.h"

#include "autograd/checkpoint.h"
#include "ops/pointwise/pointwise.h"

namespace tessera::nn {

HiddenL1::HiddenL1() : checkpoint_depth_(tessera::checkpoint_depth()) {}

bool HiddenL1::wanted() {
  if (!current_ || !Tape::innermost()) return false;
  check(current_->checkpoint_depth_ == tessera::checkpoint_depth(),
        "nn::HiddenL1 does not work inside checkpoint(): what a recomputed network adds is no result of the "
        "tape; begin the scope inside the checkpointed function and return its sum() as an output, or do not "
        "checkpoint the network");
  return true;
}

void HiddenL1::add(const Tensor& mean) {
  Tensor& sum = current_->sum_;
  sum = sum.defined() ? ops::add(sum, mean) : mean;
}

}  // namespace tessera::nn
