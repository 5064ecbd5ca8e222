#pragma once

#include <functional>
#include <memory>

#include "autograd/gradient.h"

namespace tessera {

/// Calls `hook` before the first gradient of a leaf since zero_grad() is written, possibly several times. The
/// hook may prepare the leaf's buffer (memory that leaves share over time) or replace it (set_grad_buffer).
/// One hook per leaf, called by passes of any thread; an empty one removes it.
void before_grad(const Tensor& leaf, std::function<void()> hook);

/// For code that hands gradients on before the pass that makes them is over, called in hooks of that pass
/// (on_grad, before_grad): if the pass in progress on this thread throws, calls `undo`, before leaves get
/// their gradients of before the pass back. Once per `key` and pass: returns whether this is the first call.
/// What `undo` throws is dropped, since the pass has an error already.
bool if_pass_throws(const void* key, std::function<void()> undo);

namespace gradients {

/// Calls the leaf's hook, if it has one.
void run_before_grad_hook(const std::shared_ptr<GradState>& leaf);

}  // namespace gradients
}  // namespace tessera
