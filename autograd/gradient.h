#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/call_site.h"
#include "tensor/tensor.h"

/// Gradients of tensors: where they are stored, and how they accumulate. The tape (autograd/tape.h) computes
/// them.
///
/// One rule for views: the gradient of a view is the same view of its base's gradient. The gradient of
/// a slice is written or added to that part of the base's gradient; parts that receive none are zeroed when
/// the base's gradient is read. So a projection that computes query, key and value
/// in one GEMM needs no extra pass.

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

  /// This view of `base`; undefined where the strides allow none (reshape).
  Tensor of(const Tensor& base) const;
  /// The tensor of base's shape whose view is `tensor`: a view of it, or a copy where strides allow none. Not
  /// of a slice.
  Tensor inverse(const Tensor& tensor, const Shape& base) const;
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
/// its tape needs it. Operators access it only through Backward.
struct GradState {
  Tensor grad;           // what has arrived so far; a leaf's keeps its address from the first gradient on
  uint64_t tape = 0;     // the tape that recorded this result; 0: a leaf
  bool stale = true;     // a leaf's `grad` is of an earlier step: the next gradient overwrites
  bool arrived = false;  // a leaf's: a gradient has come in the backward pass in progress
  bool retain = false;   // keep a result's gradient after it was used
  bool logged = false;   // a leaf's: the backward pass in progress can restore what it was before
  bool given = false;    // a result's `grad` is memory that was given to it: it may be added to in place
  std::shared_ptr<const void>
      sharers;      // of that memory, if it was given to several results: they all hold this
  int pending = 0;  // a leaf's entries of the backward passes in progress that have not run yet
  DType grad_dtype = DType::f32;
  Shape shape;  // of the tensor, and so of every gradient that arrives
  Device device = Device::cpu();
  std::unique_ptr<ViewOf> view;  // of a view's: `grad` is undefined, unless it is retained
  std::unique_ptr<Gaps> gaps;
  std::vector<std::function<void(const Tensor& grad)>> hooks;  // run when a leaf's last gradient has arrived
};

/// Makes `tensor` a leaf that requires a gradient, of dtype `grad_dtype` (the tensor's own by default).
/// Throws unless floating.
void require_grad(Tensor& tensor);
void require_grad(Tensor& tensor, DType grad_dtype);
inline bool requires_grad(const Tensor& tensor) {
  return tensor.grad_state() != nullptr;
}
/// The gradient that backward() left, or the replays of a captured one: undefined if none has arrived since
/// zero_grad().
Tensor grad(const Tensor& leaf);
/// Forgets the gradient without touching memory: the next one overwrites. Its address stays.
void zero_grad(const Tensor& leaf);
/// Makes `buffer` (same shape, the gradient's dtype) the memory of the leaf's gradient: optimizers keep all
/// gradients in one arena.
void set_grad_buffer(const Tensor& leaf, Tensor buffer);
/// Keeps the gradient of a result of the tape, which grad() returns after backward(). That of a view then
/// has its own memory.
void retain_grad(const Tensor& result);
/// Calls `hook` when the leaf's last gradient of a backward pass has arrived (data parallelism reduces it
/// there), whatever other tapes recorded; not if the pass gave it no gradient or ended in an error.
void on_grad(const Tensor& leaf, std::function<void(const Tensor& grad)> hook);

}  // namespace tessera
