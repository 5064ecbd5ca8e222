#pragma once

#include <vector>

#include "autograd/tape.h"

namespace tessera::ops {

/// The CPU, and the first GPU if there is one: special values are the same everywhere.
inline std::vector<Device> devices() {
  std::vector<Device> list{Device::cpu()};
  if (Device::cuda_count() > 0) list.push_back(Device::cuda(0));
  return list;
}

/// The gradient of `leaf`, which `f` uses, for the gradient dy of its result.
template <class F>
Tensor gradient_of(Tensor leaf, const Tensor& dy, F&& f) {
  require_grad(leaf);
  Tape tape;
  const std::vector<Tensor> results{f(leaf)}, grads{dy};
  tape.backward(results, grads);
  return grad(leaf);
}

/// The same matrix with its columns next to each other in memory.
inline Tensor transposed_copy(const Tensor& x) {
  const Tensor turned = Tensor::empty(Shape{x.size(1), x.size(0)}, x.dtype(), x.device()).transpose(0, 1);
  turned.copy_from(x);
  return turned;
}

}  // namespace tessera::ops
