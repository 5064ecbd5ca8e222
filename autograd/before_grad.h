#pragma once

#include <functional>
#include <memory>

#include "autograd/gradient.h"

namespace tessera {

/// Calls `hook` before the first gradient of a leaf since zero_grad() is written, perhaps several times: the
/// leaf's buffer may be memory that other leaves use in turn, which the hook prepares; it may also replace
/// the buffer (set_grad_buffer). One hook per leaf, of any thread's passes; an empty one ends that.
void before_grad(const Tensor& leaf, std::function<void()> hook);

namespace gradients {

/// Calls the leaf's hook, if it has one.
void open(const std::shared_ptr<GradState>& leaf);

}  // namespace gradients
}  // namespace tessera
