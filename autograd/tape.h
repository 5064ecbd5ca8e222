#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "autograd/backward.h"
#include "runtime/call_site.h"
#include "runtime/f32_math.h"
#include "runtime/override.h"

/// Reverse-mode differentiation with a tape (Griewank, Walther: Evaluating Derivatives, 2nd ed., chapter 3).
///
/// Operators append to the thread's innermost Tape while it lives; `backward` is that list, last entry first.
/// Execution order is a topological order, so there is no search and no recursion. An entry is popped before
/// it runs, so its saved tensors are freed in reverse order. Without a tape, or
/// within NoTape, nothing is recorded.
///
/// A tape belongs to the thread that made it: only there it records and runs backward, and only there it may
/// be destroyed. Destroying it on another thread ends the process with a message, because its own thread
/// would go on recording to a tape that is gone. Results stay results of their tape after it: they take part
/// in no later one, and copies and in-place writers refuse them, until detach().
///
/// Each entry keeps the user's line and the part of the model that it was recorded for (CallScope), and runs
/// backward for them: errors name them.

namespace tessera {

struct TapeOptions {
  /// Looks for NaN and infinity in every result and every gradient and throws at the first, naming operator,
  /// module path, shape, element and call site. Copies everything to the host: slow, for debugging.
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

  /// The tape that must record an operator with these inputs: null if there is none, or if no input requires
  /// a gradient.
  template <class... Tensors>
  static Tape* recording(const Tensors&... inputs) {
    Tape* const tape = innermost();
    return tape && (requires_grad(inputs) || ...) ? tape : nullptr;
  }
  /// The thread's innermost tape, or null.
  static Tape* innermost() { return TapeOfThread::innermost; }
  static Tape* recording_any(std::span<const Tensor> inputs);
  /// Those it was made with; check_finite also if an outer tape has it.
  const TapeOptions& options() const { return options_; }
  /// The gradient that backward(loss) will begin with for a loss of that dtype, of rank 0: for operators that
  /// make gradients in the forward pass. Undefined if it is 1. Throws if the loss scale is on another device.
  Tensor initial_gradient(DType dtype, Device device) const;

  /// Appends an entry. `name` is a literal; `backward(Backward&)` runs once, later, and owns what it
  /// captured. Undefined inputs are allowed and need no gradient. The outputs become results of this tape;
  /// throws if one of them is an input, too.
  template <class F>
  void record(const char* name, std::initializer_list<const Tensor*> inputs,
              std::initializer_list<Tensor*> outputs, F&& backward, Site site = Site::here()) {
    record(name, std::span(inputs.begin(), inputs.size()), std::span(outputs.begin(), outputs.size()),
           std::forward<F>(backward), site);
  }
  template <class F>
  void record(const char* name, std::span<const Tensor* const> inputs, std::span<Tensor* const> outputs,
              F&& backward, Site site = Site::here()) {
    const CallScope call(site);
    append(name, inputs, outputs, std::make_unique<FunctionOf<std::decay_t<F>>>(std::forward<F>(backward)));
  }
  /// Appends an entry whose outputs are views of x, in order: their gradients are those views of x's.
  void record_views(const char* name, const Tensor& x, std::span<Tensor> outputs,
                    std::span<const View> views);

  /// One backward pass from a result of one element (its gradient is 1, or the loss scale), or from several
  /// with given gradients, which are not scaled. Spends the tape: a second pass throws. Throws if a loss is
  /// not a result of this tape.
  ///
  /// A pass that throws leaves the gradients of all leaves as they were before it. For that, a pass that adds
  /// to a leaf's gradient first copies it, and drops the copy at its end; a pass that overwrites copies
  /// nothing, nor does one that is being captured. A pass inside another one (checkpointing) is part of it.
  void backward(const Tensor& loss, Site site = Site::here());
  void backward(std::span<const Tensor> results, std::span<const Tensor> grads, Site site = Site::here());

  size_t size() const { return entries_.size(); }
  /// A leaf that the tape will send a gradient to, and the entry that used it first.
  struct UsedLeaf {
    std::shared_ptr<GradState> state;
    const char* op;
    CallSite call;
  };
  /// Those of the entries so far, each once, in the order in which they were used first.
  std::vector<UsedLeaf> used_leaves() const;
  /// Called after each entry of the backward pass with the operator's name and its index. For analysis.
  void on_entry(std::function<void(const char* name, size_t index)> hook) { entry_hook_ = std::move(hook); }

 private:
  friend class NoTape;
  friend class LeafCollector;
  bool leave(Tape*& innermost);
  struct Function {
    virtual ~Function() = default;
    virtual void run(Backward& b) = 0;
  };
  template <class F>
  struct FunctionOf final : Function {
    template <class Given>
    explicit FunctionOf(Given&& given) : backward(std::forward<Given>(given)) {}
    void run(Backward& b) override { backward(b); }
    F backward;
  };
  struct Entry {
    const char* name;
    CallSite call;
    uint32_t inputs, outputs;  // their number in states_
    F32Math math;              // of the forward pass, and therefore of backward
    std::unique_ptr<Function> function;
  };
  void append(const char* name, std::span<const Tensor* const> inputs, std::span<Tensor* const> outputs,
              std::unique_ptr<Function> function);
  void run(std::span<const Tensor> results, std::span<const Tensor> grads);
  void run_entries();
  void run_entry(Entry& entry, bool check_gradients);
  void pop(Entry& entry, bool run_hooks);
  void count_pending(int by);

  Tape* outer_;
  Tape** const home_ = &TapeOfThread::innermost;  // of the thread that made it
  TapeOptions options_;
  uint64_t id_;
  bool spent_ = false;
  bool counted_ = false;        // the entries that are left are counted in GradState::pending
  bool collects_only_ = false;  // for LeafCollector: keeps no entries
  struct Leaf {
    Tensor tensor;
    Saved value;
  };
  std::vector<Leaf> leaves_;  // LeafCollector: those that were used, as they were then
  std::vector<Entry> entries_;
  std::vector<std::shared_ptr<GradState>> states_;  // inputs and outputs of the entries, in order
  std::function<void(const char*, size_t)> entry_hook_;
};

/// No recording on this thread while it lives (evaluation inside a training step). Tapes from before it may
/// end within it.
class NoTape {
 public:
  NoTape();

 private:
  friend class Tape;
  static inline constinit thread_local NoTape* current_ = nullptr;
  Override<Tape*> tape_{TapeOfThread::innermost, nullptr};
  Override<NoTape*> scope_{current_, this};
};

}  // namespace tessera
