#pragma once

#include <functional>
#include <memory>

#include "autograd/gradient.h"

namespace tessera {

/// Calls `hook` before the first gradient of a leaf since zero_grad() is written, perhaps several times: the
/// leaf's buffer may be memory that other leaves use in turn, which the hook prepares; it may also replace
/// the buffer (set_grad_buffer). One hook per leaf, of any thread's passes; an empty one ends that.
void before_grad(const Tensor& leaf, std::function<void()> hook);

/// For code that hands gradients on before the pass that makes them is over, called in hooks of that pass
/// (on_grad, before_grad): if the pass in progress on this thread throws, calls `undo`, before leaves get
/// their gradients of before the pass back. Once per `key` and pass: returns whether this is the first call.
/// What `undo` throws is dropped, since the pass has an error already.
bool if_pass_throws(const void* key, std::function<void()> undo);

namespace gradients {

/// Calls the leaf's hook, if it has one.
void open(const std::shared_ptr<GradState>& leaf);

}  // namespace gradients
}  // namespace tessera
