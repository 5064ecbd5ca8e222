#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tensor/tensor.h"

/// Gradients of tensors: where they are stored, and how they accumulate. The tape (autograd/tape.h) computes
/// them.
///
/// The gradient of a view is the same view of its base's gradient: the gradient of a slice is written or
/// added to that part of the base's gradient, and parts that receive no gradient are zeroed when the base's
/// gradient is read. So a fused projection of query, key and value (one GEMM) needs no pass to concatenate
/// gradients.

namespace tessera {

/// How a tensor is a view of another one, its base.
class View {
 public:
  /// Elements begin, begin + step, ... before end of dimension `dim`; all of them from 0 on.
  static View slice(int dim, int64_t begin, int64_t end, int64_t step = 1) {
    return View(Kind::slice, dim, 0, begin, end, step, {});
  }
  static View transpose(int a, int b) { return View(Kind::transpose, a, b, 0, 0, 1, {}); }
  static View reshape(const Shape& shape) { return View(Kind::reshape, 0, 0, 0, 0, 1, shape); }

  /// The same view of `base`; undefined if the strides do not allow it (reshape).
  Tensor of(const Tensor& base) const;
  /// The tensor of shape `base` whose view is `tensor`: a view of it if strides allow, else a copy. Not for
  /// slices.
  Tensor inverse(const Tensor& tensor, const Shape& base) const;
  /// This view, of that shape, of `outer`'s view of a base as one view of the base, where there is one: a
  /// range of a range of the same dimension, a reshape of a reshape, a transpose back.
  std::optional<View> within(const View& outer, const Shape& shape) const;
  bool is_slice() const { return kind_ == Kind::slice; }
  /// A slice of consecutive elements begin ... end - 1 of dimension dim().
  bool is_range() const { return is_slice() && step_ == 1; }
  int dim() const { return a_; }
  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }

 private:
  enum class Kind { slice, transpose, reshape };
  View(Kind kind, int a, int b, int64_t begin, int64_t end, int64_t step, const Shape& shape)
      : kind_(kind), a_(a), b_(b), begin_(begin), end_(end), step_(step), shape_(shape) {}
  Kind kind_;
  int a_, b_;
  int64_t begin_, end_, step_;
  Shape shape_;
};

struct GradState;

/// How a gradient is a view of another one.
struct ViewOf {
  std::shared_ptr<GradState> base;
  View view;
  Layout layout;  // of the base
  Device device;
};

/// Parts of a gradient that are not written yet: [begin, end) along one dimension.
struct Gaps {
  Tensor memory;  // the whole gradient, as the slices see it
  int dim;
  std::vector<std::pair<int64_t, int64_t>> ranges;
};

/// The autograd state of one tensor: permanent for a leaf (a parameter, an input), for a result as long as
/// its tape needs it. Operators write it only through Backward.
struct GradState {
  Tensor grad;              // accumulated so far; a leaf's keeps its address after the first gradient
  uint64_t tape = 0;        // the tape that recorded this result; 0: a leaf
  bool stale = true;        // leaf: `grad` is from before zero_grad(): overwrite it
  bool arrived = false;     // leaf: has received a gradient in the current backward pass
  bool retain = false;      // keep a result's gradient after it was used
  bool logged = false;      // leaf: the current backward pass has saved what it was before
  bool given = false;       // result: `grad` is donated memory, which may be added to in place
  bool wants_sums = false;  // result: want_column_sums was called
  Tensor column_sums;       // result: partial column sums of `grad` as it was given (Backward::give_summed)
  uint64_t summed_version = 0;  // the version of `grad` that they are sums of
  std::shared_ptr<const void>
      sharers;  // if that memory was given to several results: every one of them holds this pointer
  const char* replaced_by =
      nullptr;      // leaf: the function that took it out of a model (nn::freeze, nn::to), if one did
  int pending = 0;  // leaf: number of its entries, of backward passes in progress, that have not run
  DType grad_dtype = DType::f32;
  Shape shape;  // of the tensor, and so of its gradient
  Device device = Device::cpu();
  std::unique_ptr<ViewOf> view;  // view: `grad` is undefined then, unless retained
  std::unique_ptr<Gaps> gaps;
  std::vector<std::function<void(const Tensor& grad)>> hooks;  // leaf: run after its last gradient of a pass
  std::shared_ptr<const std::function<void()>> before_grad;    // leaf: run before its first one
};

/// Makes `tensor` a leaf that requires a gradient, of dtype `grad_dtype` (the tensor's own by default).
/// Throws unless floating. One that requires a gradient of that dtype already stays as it is: its gradient,
/// hooks and place in an optimizer are those of all its copies (tied weights).
void require_grad(Tensor& tensor);
void require_grad(Tensor& tensor, DType grad_dtype);
inline bool requires_grad(const Tensor& tensor) {
  return tensor.grad_state() != nullptr;
}
/// The gradient that backward() or a replay of a captured one has left; undefined if there is none since
/// zero_grad(). Throws for a result of the tape without retain_grad().
Tensor grad(const Tensor& leaf);
/// Marks the gradient as stale without touching memory: the next one overwrites it, and until then grad() is
/// undefined. The address stays.
void zero_grad(const Tensor& leaf);
/// Makes `buffer` (same shape, the gradient's dtype) the memory of the leaf's gradient: optimizers keep all
/// gradients in one arena.
void set_grad_buffer(const Tensor& leaf, Tensor buffer);
/// Keeps the gradient of a result of the tape, which grad() returns after backward(). That of a view then
/// has its own memory.
void retain_grad(const Tensor& result);
/// For an operator that sums the gradient of its result by columns, as that of a bias: asks the operator that
/// makes this gradient for the sums of the columns, if it can make them on the way (Backward::give_summed).
void want_column_sums(const Tensor& result);
/// Calls `hook` when the leaf's last gradient of a backward pass has arrived (data parallelism reduces it
/// there), whatever other tapes recorded; not if the pass gave it no gradient or ended in an error.
void on_grad(const Tensor& leaf, std::function<void(const Tensor& grad)> hook);
/// Calls `hook` before the first gradient of a leaf since zero_grad() is written, possibly several times. The
/// hook may prepare the leaf's buffer (memory that leaves share over time) or replace it (set_grad_buffer).
/// One hook per leaf; an empty one removes it.
void before_grad(const Tensor& leaf, std::function<void()> hook);

/// For code that hands gradients on before the pass that makes them is over, called in hooks of that pass
/// (on_grad, before_grad): if the pass in progress on this thread throws, calls `undo`, before leaves get
/// their gradients of before the pass back. Once per `key` and pass: returns whether this is the first call.
/// What `undo` throws is dropped, since the pass has an error already.
bool if_pass_throws(const void* key, std::function<void()> undo);

}  // namespace tessera
