#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "nn/module.h"
#include "optim/gradient_ring.h"
#include "optim/loss_scale.h"
#include "optim/rule.h"

namespace tessera::optim {

struct BundledOptions;  // optim/bundled.h

/// Settings of some parameters; the first group that fits decides.
struct Group {
  std::string contains;  // fits names that contain this; "": every name
  double lr_scale = 1;   // times the learning rate
  std::optional<double> weight_decay =
      {};                 // instead of the optimizer's; also for parameters that the no-decay rule exempts
  std::string rule = {};  // name of the optimizer's rule that updates them; "": the optimizer's choice
  /// Fits where it is true, too; empty: no further condition.
  std::function<bool(const nn::NamedParameter&)> matches = {};
  bool optional = false;  // may fit no parameter; otherwise making the optimizer throws then
  bool fits(const nn::NamedParameter& parameter) const;
};

/// How a step treats a parameter that received no gradient since zero_grad(), while others did.
enum class MissingGrad : uint8_t {
  zero,  // the gradient counts as zero: moments decay, and weights do
  skip   // weight, moments and the parameter's own step count stay as they are, as in PyTorch
};
/// Throws, naming the choices, for another name than zero and skip.
MissingGrad parse_missing_grad(const std::string& name);

/// Options of every optimizer.
struct OptimizerOptions {
  double lr = 1e-3;
  double weight_decay = 0;   // where the no-decay rule allows it
  double max_grad_norm = 0;  // clips the norm of all gradients; 0: no clipping
  std::vector<Group> groups = {};
  std::optional<LossScale> loss_scale = {};  // for f16; the tape needs loss_scale() then
  /// skip: of elementwise rules alone (Rule::spreads()), on one rank.
  MissingGrad missing = MissingGrad::zero;
  /// f32 (f64 for f64 parameters); or bf16, for bf16 and f32 parameters and rules that take it
  /// (Rule::takes_short_states()): moments take half the memory, and bf16 parameters have no masters. A step
  /// of AdamW then moves 16 instead of 30 bytes per parameter next to the 4 of the norm, and states and
  /// weight take 6 instead of 14. What rounding to nearest would lose, as small updates of a weight, is
  /// rounded stochastically (optim/rounding.h).
  DType states = DType::f32;
  uint64_t rounding_seed = 0;  // of bf16 states
  /// Shards moments and masters over ranks (ZeRO), which dist::DataParallel joins before the first step.
  Sharding sharding = {};
};

/// A rule, and the parameters that it updates: those that no earlier rule of the optimizer took.
struct RuleUse {
  std::shared_ptr<Rule> rule;
  std::function<bool(const nn::NamedParameter&)> takes = {};  // empty: all
  double lr_scale = 1;                                        // times the learning rate, and a group's
};

/// The no-decay rule: weight decay is for weights of two and more dimensions. Left out are tensors of rank 0
/// and 1, parameters named "bias", and those of a norm: a word of the name is "ln" or ends in "norm" or
/// "norms" (norm1, ln_f, q_norm, layernorm, LayerNorm, BatchNorm2d; not normal_map, enormous).
bool decays(const nn::NamedParameter& parameter);

/// The weights of hidden layers, by the names of the bundled models: those that decay, have at least two rows
/// and two columns, and belong neither to an embedding nor to a head, that is to no part whose name begins
/// with the word token, position, type, embed, embedding, head (or the plural), lm, classifier or language.
bool is_hidden_matrix(const nn::NamedParameter& parameter);

/// An optimizer: parameters, the rules that update them (optim/rule.h), and everything that all rules share.
/// AdamW, Sgd and Muon are optimizers of known rules; a program makes one of its own rules
///
///   optim::Optimizer optimizer("mine", nn::parameters(model), {.lr = 0.1}, {{std::make_shared<MyRule>()}});
///
/// or mixes them: {{std::make_shared<MyRule>(), optim::is_hidden_matrix}, {optim::adamw_rule()}}.
/// A step
///   1. takes gradients that did not arrive since zero_grad() as zero (moments still decay, weights still
///   do), or with MissingGrad::skip leaves those parameters alone. A step in which none arrived at all, nor
///   was completed, counts a skip and changes nothing else: a loop that forgot its backward pass does not
///   decay the weights. (Not with MissingGrad::zero in a captured graph, whose replays may have them, and on
///   several ranks, of which each knows its own only.)
///   2. measures the norm of all gradients in f64, in a fixed order, and divides it by the LossScale, if
///      any;
///   3. if the norm is not finite, counts a skip, lowers the loss scale and changes nothing else: weights,
///      moments and the step count keep their bits;
///   4. else multiplies gradients by min(1, max_grad_norm / (norm + 1e-6)) if max_grad_norm > 0, divides
///      them by the loss scale, and lets each rule update its parameters; elementwise rules do so in one
///      launch each.
/// Gradients lie in one arena: backward passes add to them until zero_grad(), so that accumulating over k
/// batches needs only the losses scaled by 1/k. Only gradients that are spread over ranks
/// (Sharding::gradients) are overwritten by each pass: dist::GradientTree adds those of several passes.
///
/// bf16 and f16 parameters have f32 masters, except with bf16 states: the update is computed on the master
/// and rounded once to the parameter. Their gradients are f32 (nn::make_parameter). After writing weights by
/// other means, as io::load does, call sync_masters(): step() would undo that, and throws unless states are
/// sharded.
///
/// Everything a step changes lives on the parameters' device: a step may be captured into a graph, and
/// set_lr() reaches the replays. Reading steps(), skipped() or grad_norm() waits for the device.
class Optimizer {
 public:
  /// `name` is for messages. At most kMostRules rules, each of which at most one optimizer has. Throws if
  /// there is no parameter, if one is undefined, has the tensor, elements or the name of another one, or
  /// has no rule, or its group names one that is missing, and if a group that is not optional fits no
  /// parameter. Gradients of its parameters arrive in its memory from then on: step() of an earlier optimizer
  /// of the same parameters throws.
  Optimizer(const char* name, std::vector<nn::NamedParameter> parameters, const OptimizerOptions& options,
            std::vector<RuleUse> rules);
  Optimizer(Optimizer&&) = default;
  Optimizer& operator=(Optimizer&&) = default;

  /// A step in which waits_for_host() cannot be captured: it throws then. train::Step runs it within an
  /// EagerScope, as programs do that capture steps themselves. Throws if nn::to, or without MissingGrad::skip
  /// nn::freeze, has taken a parameter out of the only model that had it, and nothing else holds it. Throws
  /// while the averages of an Ema are in the weights' place, replays of a captured step do so too.
  void step(Site site = Site::here());
  /// Whether the next step does something on the host, such as the factorisation of gradients in
  /// optim::Galore.
  bool waits_for_host() const;
  /// Reports of the rules on the steps so far, one per line; empty if there are none.
  std::string report() const;
  /// Forgets all gradients; the next backward pass overwrites them.
  void zero_grad() const;
  /// Zeroes the gradients that have not arrived since zero_grad(), which step() would do otherwise:
  /// gradients() is then complete, and the next step() uses it unchanged.
  void complete_gradients() const;
  /// step() calls `f` with gradients(), complete and before they are measured: data parallelism reduces them
  /// there. Captured with the step. There is one function; an empty one removes it.
  void on_gradients(std::function<void(const Tensor& gradients)> f);
  void set_lr(double lr);
  double lr() const;
  /// Steps done, skipped ones not counted.
  int64_t steps() const;
  int64_t skipped() const;
  /// Of the last step, before clipping, without the loss scale; NaN or infinity if that step was skipped.
  double grad_norm() const;
  /// The same on the device: f64, rank 0, the same memory after every step.
  Tensor grad_norm_tensor() const;
  /// For TapeOptions::loss_scale: f32, rank 0, the same memory after every step; undefined unless the options
  /// ask for scaling. Every backward pass before a step must have it; step() throws if none had.
  const Tensor& loss_scale() const;
  /// Other numbers for the loss scale; graphs that were captured before keep theirs. The scale itself becomes
  /// `initial` only if no step was done or skipped yet. Throws without loss scaling.
  void set_loss_scale(const LossScale& options);
  /// Those of loss scaling; the defaults without it.
  const LossScale& loss_scale_options() const { return state_->scale_options; }
  /// How many of skipped() happened at the smallest loss scale: no scale keeps these gradients finite.
  int64_t skipped_at_minimum() const;
  /// The arena of all gradients, [elements with padding], padding zero. Multiplied by the loss scale. With
  /// Sharding::gradients only this rank's part of the sums, after dist::DataParallel::collect().
  const Tensor& gradients() const;
  const std::vector<nn::NamedParameter>& parameters() const;
  /// The name of the rule that updates a parameter, by its index in parameters(); "adamw".
  const char* rule_of(size_t parameter) const;
  /// The arena of the f32 masters, laid out by Packing; empty if no parameter is bf16 or f16.
  const Tensor& masters() const;
  /// The order of the parameters in the arenas, as indices into parameters().
  const std::vector<size_t>& arrangement() const;
  /// The buckets in which gradients are reduced (optim/sharding.h), of Sharding::bucket_mb if states are
  /// sharded, otherwise of this size.
  std::vector<Bucket> buckets(double bucket_mb) const;
  /// Over how many ranks the states are sharded; 1: not at all. With sharded states, fields() needs a
  /// WholeState (optim/whole_state.h), and a step reads only this rank's parts of the buckets of gradients().
  const Sharding& sharding() const { return state_->sharding; }
  /// With Sharding::gradients the memory in which backward passes leave them; else null.
  std::shared_ptr<GradientRing> ring() const;
  MissingGrad missing() const { return state_->missing; }
  /// Of the moments: f32 (f64 for f64 parameters) or bf16.
  DType states() const;
  /// Connects the ranks: steps use their calls to compute the norm and to exchange weights. Throws unless
  /// number and order are those of Sharding.
  void join(const comm::Communicator& ranks) const;
  /// Resets the masters to the current weights.
  void sync_masters() const;
  /// Bytes of the arenas, and of what rules keep in addition.
  size_t bytes() const;

  /// Learning rate, counts, loss scale, moments and masters, by the names of the parameters. Gradients are
  /// not state: save between a step and the next backward pass.
  static constexpr const char *kScaleField = "loss_scale", *kScaleCountsField = "loss_scale_counts";
  void fields(auto&& visit) {
    State& state = *state_;
    visit("lr", state.lr);
    visit("counts", state.counts);
    if (state.scale.defined()) visit(kScaleField, state.scale), visit(kScaleCountsField, state.scale_counts);
    check_whole();
    if (state.restarts.defined()) visit("restarts", state.restarts);
    if (state.parameter_steps.defined()) visit("parameter_steps", state.parameter_steps);
    for (NamedState& part : state.parts) visit(part.name, part.tensor);
  }

 private:
  friend class Ema;
  friend class WholeState;
  struct NamedState {
    std::string name;
    Tensor tensor;  // a part of an arena
  };
  struct Buffers;
  struct ShardedState;
  struct State {
    double lr = 0;
    std::optional<double> uploaded_lr;
    Tensor status;  // f64 [kStatusSlots]
    Tensor counts;  // i64 [kCountSlots]
    LossScale scale_options;
    Tensor scale;         // f32, rank 0; undefined without loss scaling
    Tensor scale_counts;  // i64 [kScaleCountSlots]; likewise
    Tensor restarts;      // i64 [kMostRules], see prepare(); undefined: no rule restarts its moments
    MissingGrad missing = MissingGrad::zero;
    /// With MissingGrad::skip, else undefined: see StepArgs.
    Tensor arrived, parameter_steps, parameter_bias;
    std::vector<uint8_t> arrived_there;  // what `arrived` holds
    uint64_t scale_version = 0;  // of the scale at the last step; each backward pass with it bumps that
    std::vector<NamedState> parts;
    std::shared_ptr<Buffers> buffers;
    StepArgs args;
    PrepareOptions prepare;
    std::vector<std::shared_ptr<Rule>> rules;
    bool complete = false;  // by complete_gradients(), since zero_grad()
    std::function<void(const Tensor&)> on_gradients;
    Sharding sharding;
    std::shared_ptr<ShardedState> sharded;  // null if nothing is spread
    int averages = 0;                       // Emas whose averages are in the weights' place
    /// Storage versions of each parameter with a master, and of all masters, when they last agreed.
    std::vector<uint64_t> weight_versions;
    uint64_t masters_version = 0;
    void check_weights();
    void check_masters();
    void note_versions();
    void upload_lr();
    void upload_arrived(const std::vector<uint8_t>& table);
    bool waits_for_host() const;
    void tick() const;
  };
  void assign(std::vector<nn::NamedParameter> parameters, const OptimizerOptions& options,
              const std::vector<RuleUse>& rules);
  void shard_states(const Sharding& sharding, const std::vector<RuleUse>& rules);
  void measure(const StepArgs& args, const PrepareOptions& prepare) const;
  void check_whole() const;
  bool has_gradient(size_t parameter) const;
  void check_replaced(size_t parameter) const;
  std::vector<uint8_t> arrivals() const;
  void check_missing(const OptimizerOptions& options, const std::vector<RuleUse>& rules) const;
  void check_states(const OptimizerOptions& options, const std::vector<nn::NamedParameter>& parameters,
                    const std::vector<RuleUse>& rules) const;
  void make_gradients();
  void make_rules(const std::vector<RuleUse>& rules);

  std::shared_ptr<State> state_;  // graphs that captured a step share it
};

}  // namespace tessera::optim
