#pragma once

#include <array>
#include <functional>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/f32_math.h"
#include "tensor/tensor.h"

/// Reverse-mode differentiation with a tape (Griewank, Walther: Evaluating Derivatives, 2nd ed., chapter 3).
///
/// Operators append to the thread's innermost Tape while it lives; `backward` is that list, last entry first.
/// Execution order is a topological order, so there is no search and no recursion. An entry is popped before
/// it runs, so what it saved is freed in reverse. Without a tape nothing is recorded: there is no other
/// switch.

namespace tessera {

class Tape;

/// The one memory for the gradients of parts that together are a whole (what ops::split returns): the
/// operator that writes a part's gradient in place makes it, and the whole's gradient is then there without a
/// copy.
struct WholeGrad {
  Shape shape;
  DType dtype;
  Device device;
  Tensor grad;                              // undefined until a part is asked for
  std::array<int64_t, kMaxRank> strides{};  // of the whole: its gradient has the dimensions in their order

  /// The place of elements begin ... end - 1 of dimension `dim`.
  Tensor part(int dim, int64_t begin, int64_t end);
};

/// What autograd knows of one tensor: of a leaf (a parameter, an input) for ever, of a result while its tape
/// needs it.
struct GradState {
  Tensor grad;           // what has arrived so far; a leaf's keeps its address from the first gradient on
  uint64_t tape = 0;     // the tape that recorded this result; 0: a leaf
  bool stale = true;     // a leaf's `grad` holds nothing of this step: the next gradient overwrites
  bool arrived = false;  // a leaf's: a gradient has come in the backward pass in progress
  bool retain = false;   // keep a result's gradient after it was used
  int pending = 0;       // a leaf's entries that have not run backward yet
  DType grad_dtype = DType::f32;
  std::shared_ptr<WholeGrad> whole;   // of a result that is elements begin ... end - 1 of dimension dim of it
  std::shared_ptr<GradState> source;  // likewise, of a slice: the gradient that it may be added to at once
  int dim = 0;
  int64_t begin = 0, end = 0;
  bool placed = false;                                         // its place in the whole was given out
  std::vector<std::function<void(const Tensor& grad)>> hooks;  // run when a leaf's last gradient has arrived
  bool logged = false;  // a leaf's: the backward pass in progress can restore what it was before
};

/// Makes `tensor` a leaf whose gradient is wanted, of `grad_dtype` (the tensor's own by default). Throws
/// unless floating.
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
/// Makes `buffer` (same shape, the gradient's dtype) the place of the leaf's gradient: optimizers keep all in
/// one arena.
void set_grad_buffer(const Tensor& leaf, Tensor buffer);
/// Keeps the gradient of a result of the tape, which grad() returns after backward().
void retain_grad(const Tensor& result);
/// Calls `hook` whenever the leaf's last gradient of a backward pass has arrived (data parallel reduces
/// there); not if none has arrived in that pass, nor if it ended in an error.
void on_grad(const Tensor& leaf, std::function<void(const Tensor& grad)> hook);

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
  bool part = false;  // the slice of the gradient of the whole; handed out once until it is written
};

/// Work that entries of a backward pass leave to its end, so that one launch does it for all of them.
class PassEnd {
 public:
  virtual ~PassEnd() = default;
  virtual void finish() = 0;
};

/// What an entry's backward function sees. Inputs and outputs are numbered as they were recorded.
class Backward {
 public:
  /// Whether the gradient of that input is needed.
  bool needs(int input) const { return inputs_[size_t(input)] != nullptr; }
  /// In which that input's gradient is kept, whatever arrives. Only if needs(input).
  DType grad_dtype(int input) const;
  /// Whether a gradient of that output has arrived (one output of several may be unused).
  bool has_grad(int output = 0) const { return outputs_[size_t(output)]->grad.defined(); }
  /// The gradient of that output; throws if none has arrived (see has_grad).
  Tensor grad(int output = 0);
  /// The same, and releases it: when the caller drops it too, an input's gradient that lies in the same
  /// memory (both operands of an addition get one tensor) can be added to in place.
  Tensor take_grad(int output = 0);
  /// Adds to the input's gradient; nothing if it is not needed. Any floating dtype; the sum has the
  /// gradient's own.
  void accumulate(int input, const Tensor& gradient);
  /// Adds `gradient` to the part of the input's gradient that `view(grad)` names, as the backward of a slice
  /// does: the rest is left as it is, or zero if nothing has arrived yet. `shape` is the input's.
  template <class View>
  void accumulate_view(int input, const Shape& shape, View&& view, const Tensor& gradient) {
    if (needs(input)) add_into(view(whole_gradient(input, shape, gradient.device())), gradient);
  }
  /// For kernels that can write or add in place (a product with beta): the leaf's buffer, a result's gradient
  /// that has no other reader, a part's slice of the gradient of the whole, or a slice's part of a gradient
  /// that has come to what was sliced, and whether it holds something to add to; an undefined tensor if there
  /// is none, then make one. Only if needs(input). Write all of it, then call `written`. One tensor may be
  /// several inputs: their targets are then the same memory, except that a part is given out once.
  GradTarget target(int input);
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
  Tensor whole_gradient(int input, const Shape& shape, Device device);
  static void add_into(const Tensor& part, const Tensor& gradient);
  std::span<const std::shared_ptr<GradState>> inputs_;
  std::span<const std::shared_ptr<GradState>> outputs_;
  std::vector<const Storage*> adopted_;  // by leaves, from this entry: handed out once
  bool checked_ = false;                 // the finite check looks at gradients after each entry
};

struct TapeOptions {
  /// Looks for NaN and infinity in every result and every gradient and throws at the first, naming operator,
  /// module path, shape, element and call site. Copies everything to the host: for hunting.
  bool check_finite = false;
  /// Loss scaling for f16 (optim/loss_scale.h): backward(loss) begins with this number, f32 of rank 0 on the
  /// loss's device, instead of 1, and losses whose forward pass makes gradients make them for it. It is read
  /// on the device, so a captured pass follows its changes. The gradients of leaves are multiplied by it:
  /// give the tape the scale of the optimizer that divides them. Undefined: no scaling. While it is above 1,
  /// check_finite does not look at gradients: the optimizer answers an overflow with a smaller scale.
  Tensor loss_scale = {};
};

class Tape {
 public:
  explicit Tape(TapeOptions options = {});
  ~Tape();
  Tape(const Tape&) = delete;

  /// The tape that must record an operator with these inputs: null if no tape lives or none of them needs a
  /// gradient.
  template <class... Tensors>
  static Tape* recording(const Tensors&... inputs) {
    Tape* const tape = current_;
    return tape && (requires_grad(inputs) || ...) ? tape : nullptr;
  }
  /// The thread's innermost tape, or null.
  static Tape* innermost() { return current_; }
  static Tape* recording_any(std::span<const Tensor> inputs);
  /// TapeOptions::loss_scale.
  const Tensor& loss_scale() const { return options_.loss_scale; }
  /// The gradient that backward(loss) will begin with for a loss of that dtype, of rank 0: for operators that
  /// make gradients in the forward pass. Undefined if it is 1. Throws if the loss scale is on another device.
  Tensor initial_gradient(DType dtype, Device device) const;

  /// Appends an entry. `name` is a literal; `backward(Backward&)` runs once, later, and owns what it
  /// captured. Undefined inputs are allowed and need nothing. The outputs become results of this tape.
  template <class F>
  void record(const char* name, Site site, std::initializer_list<const Tensor*> inputs,
              std::initializer_list<Tensor*> outputs, F&& backward) {
    record(name, site, std::span(inputs.begin(), inputs.size()), std::span(outputs.begin(), outputs.size()),
           std::forward<F>(backward));
  }
  template <class F>
  void record(const char* name, Site site, std::span<const Tensor* const> inputs,
              std::span<Tensor* const> outputs, F&& backward) {
    using Function = std::decay_t<F>;
    if (!begin_entry(name, site, inputs, outputs)) return;
    void* const place = reserve(sizeof(Function), alignof(Function));
    ::new (place) Function(std::forward<F>(backward));
    end_entry(
        place, [](void* f, Backward& b) { (*static_cast<Function*>(f))(b); },
        [](void* f) { static_cast<Function*>(f)->~Function(); });
  }

  /// One backward pass from a result of one element (its gradient is 1, or the loss scale), or from several
  /// with given gradients, which are not scaled. Spends the tape: a second pass throws. Throws if a loss is
  /// not a result of this tape.
  ///
  /// A pass that throws leaves the gradients of all leaves as they were before it. For that, a pass that adds
  /// to a leaf's gradient first copies it, and drops the copy at its end; a pass that overwrites copies
  /// nothing, nor does one that is being captured. A pass inside another one (checkpointing) is part of it.
  void backward(const Tensor& loss);
  void backward(std::span<const Tensor> results, std::span<const Tensor> grads);

  size_t size() const { return entries_.size(); }
  /// Called after each entry of the backward pass: operator name and its index. For analysis.
  void on_entry(std::function<void(const char* name, size_t index)> hook) { entry_hook_ = std::move(hook); }

 private:
  friend class NoTape;
  friend class LeafCollector;
  struct Entry {
    const char* name;
    Site site;
    uint32_t inputs, outputs;   // how many, in states_
    size_t chunk, used_before;  // where its function lies, to give the place back
    void* function;
    void (*run)(void*, Backward&);
    void (*destroy)(void*);
    std::string path;  // of the module; only in the finite check
    F32Math math;      // of the forward pass, and therefore of backward
  };
  bool begin_entry(const char* name, Site site, std::span<const Tensor* const> inputs,
                   std::span<Tensor* const> outputs);
  void* reserve(size_t bytes, size_t align);
  void end_entry(void* function, void (*run)(void*, Backward&), void (*destroy)(void*));
  void run();
  void run_entries();
  void pop(Entry& entry, bool run_hooks);
  void check_result(const char* name, Site site, std::span<Tensor* const> outputs) const;

  static thread_local Tape* current_;
  Tape* outer_;
  TapeOptions options_;
  uint64_t id_;
  bool spent_ = false;
  bool collects_only_ = false;  // LeafCollector
  std::vector<Entry> entries_;
  std::vector<std::shared_ptr<GradState>> states_;  // inputs and outputs of the entries, in order
  struct Chunk {
    std::unique_ptr<std::byte[]> bytes;
    size_t size = 0, used = 0;
  };
  std::vector<Chunk> chunks_;  // the entries' functions, last in first out
  std::function<void(const char*, size_t)> entry_hook_;
};

/// No recording on this thread while it lives (evaluation inside a training step).
class NoTape {
 public:
  NoTape() : tape_(std::exchange(Tape::current_, nullptr)) {}
  ~NoTape() { Tape::current_ = tape_; }
  NoTape(const NoTape&) = delete;

 private:
  Tape* tape_;
};

/// Names the part of a model that runs: messages of the finite check say "block.3.attention". Costs two
/// pointer writes.
class ModuleScope {
 public:
  explicit ModuleScope(const char* name, int64_t index = -1);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  /// The path of the scopes that live on this thread: "block.3.attention", "" outside any.
  static std::string path();

 private:
  const char* name_;
  int64_t index_;
  ModuleScope* outer_;
};

}  // namespace tessera
