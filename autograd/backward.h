#pragma once

#include <initializer_list>
#include <memory>
#include <span>

#include "autograd/gradient.h"

namespace tessera {

namespace gradients {
struct Arrival;
}

/// A tensor kept for backward. get() throws if its storage was written in place since, naming the operator.
class Saved {
 public:
  Saved() = default;
  explicit Saved(const Tensor& tensor)
      : tensor_(tensor.detach()), version_(tensor.defined() ? tensor.version() : 0) {}
  const Tensor& get() const {
    if (tensor_.defined() && tensor_.version() != version_) [[unlikely]]
      fail();
    return tensor_;
  }
  bool defined() const { return tensor_.defined(); }

 private:
  [[noreturn]] void fail() const;
  Tensor tensor_;
  uint64_t version_ = 0;
};

/// Where a gradient may be written at once instead of into a temporary: `grad = (accumulate ? grad : 0) +
/// ...`.
struct GradTarget {
  Tensor grad;
  bool accumulate = false;
  bool part =
      false;  // a part of another gradient, that of a slice's base: given out to one input of an entry
};

/// Work that entries of a backward pass leave to its end, so that one launch does it for all of them.
class PassEnd {
 public:
  virtual ~PassEnd() = default;
  virtual void finish() = 0;
};

/// The argument of an entry's backward function. Inputs and outputs are numbered as they were recorded;
/// another number throws. So does a gradient that is undefined, not floating, or of another shape or device
/// than its input.
///
/// A gradient comes to an input in one of four ways: `accumulate` only reads the tensor; `give` donates its
/// memory, which later gradients may be added to in place; `pass` hands on that of an output; `target` and
/// `written` let a kernel write to or add to the gradient in place.
class Backward {
 public:
  /// Whether the gradient of that input is needed.
  bool needs(int input) const { return input_at(input) != nullptr; }
  /// In which that input's gradient is kept, whatever arrives. Only if needs(input).
  DType grad_dtype(int input) const;
  /// Whether a gradient of that output has arrived (one output of several may be unused).
  bool has_grad(int output = 0) const { return output_at(output)->grad.defined(); }
  /// The gradient of that output, to be read; throws if none has arrived (see has_grad).
  Tensor grad(int output = 0);
  /// Adds to the input's gradient; does nothing if it is not needed. Any floating dtype; the sum has the
  /// gradient's own. The tensor may be read by others and is not written.
  void accumulate(int input, const Tensor& gradient);
  /// The same for a tensor that nothing else reads or writes from then on: its memory may become that of the
  /// input's gradient. That of several inputs if it is given to several: each reads it before anything is
  /// added in place.
  void give(int input, Tensor&& gradient) { give({input}, std::move(gradient)); }
  void give(std::initializer_list<int> inputs, Tensor&& gradient);
  /// Adds the gradient of that output to the inputs', its memory with it unless it is retained. The output
  /// has none from then on; what grad() returned may be read until something is added to an input's.
  void pass(int output, std::initializer_list<int> inputs);
  /// Likewise the gradient that another tape left in a result of its own.
  void pass(const Tensor& result, int input);
  /// For kernels that can write or add in place (a GEMM with beta): the leaf's buffer, a result's gradient
  /// whose memory was given to it, a view's part of its base's gradient, and whether it holds something to
  /// add to; an undefined tensor if there is none, then make one. Only if needs(input). Write all of it, then
  /// call `written`. One tensor may be several inputs: memory that holds something to add to is then given
  /// out for each of them, but memory that holds nothing only if no other input of the entry lies in it,
  /// whose gradient could overwrite what the kernel writes.
  GradTarget target(int input);
  /// The tensor that the kernel has written: the target, or one of the caller's, which is given.
  void written(int input, const GradTarget& target);
  /// Whether this entry may call written() for that input first and leave the writing to the end of the pass:
  /// the gradient of a leaf that is overwritten, and that nothing else in this pass reads or adds to. Only if
  /// needs(input).
  bool may_wait(int input) const;
  /// The T, derived from PassEnd, that all entries of the outermost pass in progress share; made at the first
  /// call. T::finish() runs when the pass has run all entries, before backward() returns; not if the pass
  /// throws.
  template <class T>
  T& at_end() const {
    static const char key = 0;
    return static_cast<T&>(at_end(&key, [] { return std::unique_ptr<PassEnd>(std::make_unique<T>()); }));
  }

 private:
  friend class Tape;
  static PassEnd& at_end(const void* key, std::unique_ptr<PassEnd> (*make)());
  const std::shared_ptr<GradState>& input_at(int input) const {
    if (size_t(input) >= inputs_.size()) [[unlikely]]
      fail_number("input", input, inputs_.size());
    return inputs_[size_t(input)];
  }
  const std::shared_ptr<GradState>& output_at(int output) const {
    if (size_t(output) >= outputs_.size()) [[unlikely]]
      fail_number("output", output, outputs_.size());
    return outputs_[size_t(output)];
  }
  [[noreturn]] static void fail_number(const char* what, int number, size_t count);
  /// Throws unless the gradient may arrive for that input.
  void check_gradient(int input, const Tensor& gradient) const;
  void pass(GradState& from, std::initializer_list<int> inputs);
  void distribute(gradients::Arrival arrival, std::initializer_list<int> inputs);
  GradTarget view_target(int input);
  /// Whether the gradient of another input of the entry lies in the same root's.
  bool is_shared(int input) const;
  std::span<const std::shared_ptr<GradState>> inputs_;
  std::span<const std::shared_ptr<GradState>> outputs_;
  bool checked_ = false;  // the finite check looks at gradients after each entry
};

}  // namespace tessera
