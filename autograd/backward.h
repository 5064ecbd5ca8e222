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

/// Memory that a kernel may write a gradient to directly, instead of to a temporary: grad = (accumulate ?
/// grad : 0) + ...
struct GradTarget {
  Tensor grad;
  bool accumulate = false;
  bool part =
      false;  // a part of another gradient, that of a slice's base: given out to one input of an entry
};

/// Work that entries defer to the end of the backward pass, so that one launch does it for all of them.
class PassEnd {
 public:
  virtual ~PassEnd() = default;
  virtual void finish() = 0;
};

/// The argument of an entry's backward function. Inputs and outputs are numbered as they were recorded;
/// another number throws. So does a gradient that is undefined, not floating, or of another shape or device
/// than its input.
///
/// An input gets its gradient in one of four ways. `accumulate`: the tensor is only read. `give`: donates its
/// memory, so later gradients may be added in place. `pass`: moves an output's gradient on to inputs.
/// `target` and `written`: a kernel writes or adds to the gradient's memory itself.
class Backward {
 public:
  /// Whether the gradient of that input is needed.
  bool needs(int input) const { return input_at(input) != nullptr; }
  /// The dtype that the gradient of that input is stored in. Only if needs(input).
  DType grad_dtype(int input) const;
  /// Whether that output has received a gradient (some of several outputs may be unused).
  bool has_grad(int output = 0) const { return output_at(output)->grad.defined(); }
  /// The gradient of that output, read-only; throws if there is none (see has_grad).
  Tensor grad(int output = 0);
  /// Adds to the input's gradient; does nothing if that is not needed. Any floating dtype; the sum is stored
  /// in grad_dtype(input). The tensor may be shared and is not modified.
  void accumulate(int input, const Tensor& gradient);
  /// The same for a tensor that is not used by anything else from then on: the gradient may take over its
  /// memory. Given to several inputs, it is shared by their gradients until one of them is added to, which
  /// copies.
  void give(int input, Tensor&& gradient) { give({input}, std::move(gradient)); }
  void give(std::initializer_list<int> inputs, Tensor&& gradient);
  /// Whether that input's operator wants the column sums of its gradient (want_column_sums), and this entry's
  /// gradient will be the first.
  bool wants_column_sums(int input) const;
  /// give() for a gradient [..., C] with partial sums of its columns as they are stored: [parts, at least C],
  /// f32 (f64 for f64), whose first C columns summed over the parts are those sums. They travel with the
  /// gradient until something is added to it.
  void give_summed(int input, Tensor&& gradient, const Tensor& column_sums);
  /// The partial column sums of that output's gradient; undefined unless that is exactly what give_summed
  /// got.
  Tensor column_sums(int output = 0) const;
  /// Whether one gradient given to both inputs would be copied, since they are leaves, whose gradients lie in
  /// memory of their own: a kernel may as well write it twice. Only if both are needed.
  bool would_copy(int first, int second) const;
  /// Adds the gradient of that output to the inputs', donating its memory unless it is retained. The output
  /// then has none; a tensor from grad() may be read until an input's gradient is added to.
  void pass(int output, std::initializer_list<int> inputs);
  /// Likewise the gradient that another tape left for `result`, one of its results.
  void pass(const Tensor& result, int input);
  /// For kernels that write or add in place (a GEMM with beta): the memory of the input's gradient
  /// and whether to add to it, or an undefined tensor if there is none; then allocate one. It is a
  /// leaf's buffer, donated memory, or a view's part of the base's gradient. Only if needs(input).
  /// Write all of it, then call `written`. If one tensor is several inputs, memory to add to is
  /// returned for each of them, but memory to overwrite only if no other input of the entry aliases
  /// it.
  GradTarget target(int input);
  /// `target`: what target() returned, or memory of the caller's, which is donated.
  void written(int input, const GradTarget& target);
  /// Whether this entry may call written() first and defer the write to the end of the pass (PassEnd): for a
  /// leaf's gradient that is overwritten and that nothing else in this pass reads or adds to. Only if
  /// needs(input).
  bool may_wait(int input) const;
  /// The object of type T, derived from PassEnd, that all entries of the outermost backward pass share;
  /// created by the first call. T::finish() runs after all entries, before backward() returns; not if the
  /// pass throws.
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
  /// Whether the gradient of another input of the entry lies in the same root gradient.
  bool is_shared(int input) const;
  std::span<const std::shared_ptr<GradState>> inputs_;
  std::span<const std::shared_ptr<GradState>> outputs_;
  bool checked_ = false;  // the finite check looks at gradients after each entry
};

}  // namespace tessera
