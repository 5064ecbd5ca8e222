#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "optim/kernels.h"
#include "optim/sharding.h"

namespace tessera::optim {

/// A parameter as a rule sees it: tensors that keep their address.
struct RuleParameter {
  std::string name;  // "blocks.3.mlp.up.weight"
  Tensor weight;     // as the model has it: f64, f32, bf16 or f16; a matrix is a matrix, [out, in]
  Tensor master;     // f32 of the weight's shape for bf16 and f16 that have one, else the weight itself
  Tensor gradient;   // f32 (f64 for f64) of the weight's shape, still multiplied by the loss scale
  double lr_scale = 1, weight_decay = 0;  // of its group
};

/// An update rule and its states, from which Optimizer is built. Subclasses create their states in begin()
/// and issue one update of all their parameters in step(). For what an optimizer does for all rules -
/// masters, clipping, skipped steps, groups, counts, checkpoints - a rule uses these functions:
///
///   elementwise rules   apply(formula, {states}): one fused launch (optim/rules.h shows formulas;
///   Elementwise
///                       is the whole rule)
///   all others          take_gradients(arena): the gradients, clipped and without the loss scale, as tensors
///                       view(arena, i) of the parameters' shapes; then operators; then
///                       descend(arena): weight -= lr (direction + weight_decay weight), through the masters
///                       commit(state, value): state = value
/// apply, descend and commit do nothing in a skipped step, so that weights and states keep their bits. That
/// is decided on the device: step() may be captured into a graph and must not read anything back. Memory is
/// made in begin(). Everything must be deterministic.
class Rule {
 public:
  Rule() = default;
  Rule(const Rule&) = delete;
  virtual ~Rule() = default;
  /// Its name in groups, such as "adamw".
  virtual const char* name() const = 0;
  /// The decays whose bias corrections formulas get as Scalars::bias1 and bias2.
  virtual Betas betas() const { return {}; }
  /// Whether parameters of equal shape and dtype must be adjacent in the arenas, at equal distances.
  virtual bool batches() const { return false; }
  /// Whether its states can be sharded over ranks (optim/sharding.h): all of them are arenas, and step() is
  /// only apply(), so that it does not matter where parameters start.
  virtual bool spreads() const { return false; }
  /// Whether its states may be bf16 (OptimizerOptions::states): all of them are arenas, and step() is only
  /// apply() of a formula that takes them.
  virtual bool takes_short_states() const { return false; }
  /// Called once, before the first step.
  virtual void begin() = 0;
  virtual void step() = 0;
  /// A report on the steps so far (counted failures); empty if there is none.
  virtual std::string report() const { return ""; }
  /// Whether the next step does something on the host (every()).
  bool waits_for_host() const;
  /// Whether some steps do.
  bool counts_down() const { return !countdowns_.empty(); }
  /// Bytes of states and scratch.
  size_t bytes() const;

 protected:
  /// In the order of the arenas.
  const std::vector<RuleParameter>& parameters() const { return parameters_; }
  Device device() const { return packing_->device(); }
  DType compute_dtype() const { return packing_->compute_dtype(); }

  // In begin():
  /// Zeros with a place for every element of every parameter, f32 (f64 for f64; bf16 if the optimizer's
  /// states are); saved as "<state>.<parameter>".
  Tensor arena(const char* state);
  /// The same, never in bf16, not saved.
  Tensor scratch_arena();
  /// Memory for within a step: packed, undefined, not saved.
  Tensor scratch(int64_t elements, DType dtype);
  /// Makes a tensor of any shape a state: saved under this name, which must not be another one's.
  void keep(const std::string& name, const Tensor& state);
  /// For work that step() does on the host periodically, such as a factorisation: a countdown of steps, saved
  /// under `name`. It is due after `first` steps, and then `period` steps after each done(); period 0: never.
  /// Skipped steps count. A step in which one is due is not captured (Optimizer::step). Returns its index,
  /// for due() and done().
  size_t every(const std::string& name, int64_t period, int64_t first);
  /// Lets restart_moments() be called.
  void restarts() { restarts_ = true; }
  /// Momentum resets: restart_if_due() restarts moments after every `period` steps; 0: never. The countdown
  /// is saved under `name`. Returns its index.
  size_t restarts_every(const std::string& name, int64_t period);

  // Then:
  /// The i-th parameter's part of an arena, in its shape.
  Tensor view(const Tensor& arena, size_t parameter) const;
  /// In step(). `formula`: a struct as in optim/rules.h, with as many states as arenas are given; its kernels
  /// are instantiated in a .cpp (optim/elementwise_kernels.h) and in a .cu (optim/elementwise.cuh).
  template <class R>
  void apply(const R& formula, std::initializer_list<Tensor> states) const {
    apply(formula, std::vector<Tensor>(states));
  }
  template <class R>
  void apply(const R& formula, const std::vector<Tensor>& states) const {
    static_assert(R::kStates <= int(std::extent_v<decltype(StepArgs::states)>),
                  "a formula has too many states");
    check(int(states.size()) == R::kStates, name(), ": a formula of ", R::kStates, " states got ",
          states.size(), " arenas");
    StepArgs args = args_;
    for (size_t i = 0; i < states.size(); ++i) args.states[i] = states[i].raw();
    for (const StateShard& state_shard : state_shards_) {
      args.chunks = args_.chunks + state_shard.range.first_chunk;
      args.chunk_count = state_shard.range.chunks;
      args.first_state = state_shard.range.first - state_shard.at;
      // Kernels add Place::master, an offset in the arena of all masters.
      args.masters = before(args_.masters, state_shard.first_master - state_shard.master_at);
      if (owns_gradients_)
        args.gradients = before(args_.gradients, state_shard.range.first - state_shard.own_at);
      update(device(), args, formula);
    }
  }
  void take_gradients(const Tensor& arena) const { apply(TakeRule{}, {arena}); }
  void descend(const Tensor& arena) const { apply(DescendRule{}, {arena}); }

  // In a step in which a countdown is due:
  bool due(size_t countdown) const;
  void done(size_t countdown) const;
  /// Whether the step is not skipped (if it is, the countdown stays due). Waits for the device, as the
  /// functions below do.
  bool applies() const;
  double status_of(StatusSlot slot) const;
  /// The two bias corrections of this rule.
  std::pair<double, double> bias_corrections() const;
  /// The states become zeros, and the bias corrections count from here.
  void restart_moments(std::initializer_list<Tensor> states) const;
  /// The same at the end of a step in which this countdown of restarts_every() is due; else nothing.
  void restart_if_due(size_t countdown, std::initializer_list<Tensor> states) const;
  const double* status() const { return args_.status; }  // on the device
  int number() const { return args_.rule; }              // of the rule, for bias corrections
  /// Both packed, of one dtype and size, on the rule's device.
  void commit(const Tensor& state, const Tensor& value) const;

 private:
  friend class Optimizer;
  struct NamedState {
    std::string name;
    Tensor tensor;
  };
  /// The arena's address minus `elements`: kernels add an offset in the whole arena to it.
  void* before(const void* arena, int64_t elements) const {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(arena) -
                                   uintptr_t(elements) * size_of(compute_dtype()));
  }
  Tensor make_arena(DType dtype);
  const Packing* packing_ = nullptr;
  PackedRange range_;
  std::vector<StateShard> state_shards_;  // of range_, those that this rank holds
  bool is_sharded_ = false;               // they are not all
  bool owns_gradients_ = false;           // the arena of gradients has this rank's parts alone
  std::vector<size_t> members_;           // of the packing, in the order of the arenas
  std::vector<RuleParameter> parameters_;
  std::vector<Tensor> memory_;
  std::vector<NamedState> saved_;
  struct Countdown {
    Tensor left;  // i64 [1], on the CPU
    int64_t period;
  };
  /// After each step, or launch of a captured one.
  void tick() const;
  std::vector<Countdown> countdowns_;
  bool restarts_ = false;
  Tensor counts_, restart_counts_, status_;  // the optimizer's
  struct ShardedArena {
    Tensor own;
    std::vector<std::pair<size_t, size_t>> views;  // number in saved_, parameter of the packing
  };
  std::vector<ShardedArena> sharded_arenas_;  // whose states in saved_ are undefined
  StepArgs args_;                             // with the chunks of all rules
};

/// The rule whose formula is R, one of optim/rules.h or one's own.
template <class R>
class Elementwise : public Rule {
 public:
  /// `states`: names of the formula's states.
  Elementwise(const char* name, const R& formula, std::vector<const char*> states, Betas betas = {})
      : name_(name), formula_(formula), states_(std::move(states)), betas_(betas) {}
  const char* name() const override { return name_; }
  Betas betas() const override { return betas_; }
  bool spreads() const override { return true; }
  bool takes_short_states() const override { return TakesShortStates<R>; }
  void begin() override {
    for (const char* const state : states_) arenas_.push_back(arena(state));
  }
  void step() override { apply(formula_, arenas_); }

 private:
  const char* name_;
  R formula_;
  std::vector<const char*> states_;
  Betas betas_;
  std::vector<Tensor> arenas_;
};

}  // namespace tessera::optim
