#include "nn/hidden_l1.h"

#include <utility>

#include "autograd/tape.h"
#include "ops/pointwise/pointwise.h"

namespace tessera::nn {

constinit thread_local HiddenL1* HiddenL1::current_ = nullptr;

HiddenL1::HiddenL1() : outer_(std::exchange(current_, this)) {}

HiddenL1::~HiddenL1() {
  current_ = outer_;
}

bool HiddenL1::wanted() {
  return current_ && Tape::innermost();
}

void HiddenL1::add(const Tensor& mean) {
  Tensor& sum = current_->sum_;
  sum = sum.defined() ? ops::add(sum, mean) : mean;
}

}  // namespace tessera::nn
