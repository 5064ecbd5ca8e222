#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dist/data_parallel.h"
#include "io/checkpoint.h"
#include "runtime/device.h"
#include "runtime/rng.h"
#include "train/optimizer_ref.h"

namespace tessera::train {

class RunFolder;

/// Named values of an evaluation: {"eval_nll", 0.35}, ...
using Values = std::map<std::string, double>;

/// Facts about a job that the trainer needs before the first step.
struct JobInfo {
  bool evaluates = false;  // evaluate() gives values
  bool samples = false;    // sample() does something
  /// Every batch has the same shapes and comes into the same memory, so that a step may be captured.
  bool fixed_shapes = true;
  /// Per step, on all ranks together: batch() and loss() run that often, the mean of the losses counts.
  int micro_batches = 1;
  /// Consecutive ranks that compute each micro-batch together: their losses are shares of its loss, and their
  /// gradients add up to its gradients. The ranks of a step must be a multiple.
  int ranks_per_micro_batch = 1;
  double tokens_per_step = 0;
  double flops_per_step = 0;
  std::vector<std::string> penalties = {};  // the names under which Job::penalties() are logged
};

/// The consequences of an evaluation.
struct Verdict {
  bool save = false;  // the state, now
  bool stop = false;  // the run ends here, as at its last step
};

/// A training job: a model with its optimizer and its data. The bundled models are such jobs, and so is
/// whatever a program wants to train:
///
///   class Fit : public train::Job {
///    public:
///     Fit() : Job(Device::best()), model_(...), optimizer_(nn::parameters(model_)) {
///       train_with(optimizer_);
///       keep("model", model_);
///     }
///     void batch(uint64_t index) override { ... }         // brings batch `index` into x_ and y_
///     Tensor loss() override { return loss_of(model_(x_), y_); }
///     ...
///   };
///   Fit fit;
///   train::train(fit, run, {.steps = 1000}, 0, progress);
///
/// train::train (train/trainer.h) runs it, train::Step (train/step.h) is one step of it.
class Job {
 public:
  explicit Job(Device device) : device_(device) {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Device device() const { return device_; }
  /// Throws if the job gave no optimizer to train_with().
  const OptimizerRef& trained_by() const;

  virtual JobInfo info() const { return {}; }
  /// Called once before the first step of this process, with the records of the run so far. Returns
  /// whether the run has ended already (by a Verdict), though it has steps left.
  virtual bool begin(const RunFolder&) { return false; }
  /// Brings micro-batch `index` (step * micro_batches + k) into the tensors that loss() reads, by work issued
  /// to the compute stream. Never captured. The same index gives the same batch, so that a resumed run meets
  /// the data that it would have met.
  virtual void batch(uint64_t index) = 0;
  /// Called before divide(), and before the first batch, if the job trains on several ranks, on all of them
  /// together: for communicators of its own.
  virtual void connect(const dist::World&) {}
  /// Called before the first batch if the job trains on several ranks: of each step's micro-batches, batch()
  /// will be asked for this share alone.
  virtual void divide(const dist::Share&) {}
  /// Called after a step of several ranks: the next one begins with micro-batch `index`. State that is kept
  /// (the place in the data) is then what it is on any number of ranks.
  virtual void advance(uint64_t index) { (void)index; }
  /// The forward pass, recorded on the step's tape; one element.
  virtual Tensor loss() = 0;
  /// What training adds to the last loss(), recorded on its tape and of its dtype: one for each name in
  /// info(), or a step throws; of one element, undefined where it is 0. They are logged by themselves, and
  /// the loss without them. Handed over: a job that kept them would tie a captured step to tensors that a
  /// later one may not have.
  virtual std::vector<Tensor> penalties() { return {}; }
  /// After each step of the optimizer, captured with it.
  virtual void updated() {}
  /// Values of the state after a step, for its line of the curve where that is logged. May wait for the
  /// device.
  virtual Values state_values() { return {}; }
  /// Values of the model in its current state; runs without a tape and leaves the state as it was, also when
  /// it throws. Where a save is due after the same step, it comes first.
  virtual Values evaluate() { return {}; }
  virtual Verdict judge(int64_t step, const Values&) { return (void)step, Verdict{}; }
  /// The step whose checkpoint is kept in addition to the newest ones.
  virtual std::optional<int64_t> spared() const { return {}; }
  /// Shows what the model makes by itself (a text); runs without a tape.
  virtual void sample(int64_t step, const RunFolder&) { (void)step; }

  /// Settings in which a run cannot differ from the one that it continues, but for "steps"; an object.
  virtual nlohmann::json settings_json() const { return nlohmann::json::object(); }
  /// Everything needed to continue the curve: what was given to keep(), the step and the settings.
  virtual io::Checkpoint checkpoint(int64_t step) const;
  /// Returns the step. All or nothing: on an error nothing has changed. Throws, naming the setting, if the
  /// checkpoint is of other settings. A file from before there was loss scaling leaves the loss scale as it
  /// is.
  int64_t restore(const std::filesystem::path& file);
  /// The generators that were given to draws_from().
  const std::vector<Rng>& random() const { return random_; }
  /// Throws, naming it, if a parameter of the optimizer is no part of what is kept: the run would go on with
  /// another value of it. Parameters of an optimizer outside optim/ are not known.
  void check_keeps_parameters() const;
  /// Throws if one of the `drawn` generators is no part of what is kept.
  void check_keeps(const std::vector<Rng>& drawn) const;

 protected:
  /// The optimizer that updates the model; its state, if it has fields(), is kept as "optimizer".
  template <class O>
  void train_with(O& optimizer) {
    trained_by_.emplace(optimizer);
    if constexpr (HasFields<O>) keep("optimizer", optimizer);
  }
  /// A generator that loss() draws from (dropout), kept under that name, so that a resumed run draws what it
  /// would have drawn; the first step under the trainer throws if loss() drew from another one that exists
  /// after it and is not kept. In the global order each micro-batch gets streams by its index. Several
  /// generators must have different seeds: throws otherwise, since they would draw the same numbers.
  void draws_from(const std::string& name, Rng& rng) {
    check_seed(name, rng);
    keep(name, rng);
    random_.push_back(rng);
  }
  /// Makes `part`, a member with fields() or a leaf of them, part of every checkpoint: the model above all,
  /// without whose parameters the trainer refuses to begin. Throws if something is
  /// kept under that name already ("optimizer" by train_with()), and for "step" and "job", which are the
  /// checkpoint's own.
  template <class Part>
  void keep(const std::string& name, Part& part);

 private:
  struct Leaves {
    std::vector<Tensor> tensors;
    std::vector<Rng> generators;
  };
  /// A part of the state, whatever its type.
  struct Kept {
    std::string name;
    std::function<void(Leaves&)> list;
    std::function<void(io::Checkpoint&)> add, complete;
    std::function<void(io::Checkpoint::Restoring&)> compare, assign;
  };
  static bool may_be_missing(const std::string& name);
  /// The name that checkpoints of earlier versions have for a part of a bundled model; of others their own.
  static std::string former_name(std::string name);
  Leaves kept_leaves() const;
  void check_name(const std::string& name) const;
  void check_seed(const std::string& name, const Rng& rng) const;

  Device device_;
  std::optional<OptimizerRef> trained_by_;
  std::vector<Rng> random_;
  std::vector<Kept> kept_;
};

template <class Part>
void Job::keep(const std::string& name, Part& part) {
  check_name(name);
  kept_.push_back({.name = name,
                   .list =
                       [&part](Leaves& all) {
                         for_each_field(part, [&](const std::string&, const auto& leaf) {
                           using Leaf = std::remove_cvref_t<decltype(leaf)>;
                           if constexpr (std::is_same_v<Leaf, Tensor>) all.tensors.push_back(leaf);
                           if constexpr (std::is_same_v<Leaf, Rng>) all.generators.push_back(leaf);
                         });
                       },
                   .add = [name, &part](io::Checkpoint& to) { to.add(name, part); },
                   .complete =
                       [name, &part](io::Checkpoint& stored) {
                         for_each_field(
                             part,
                             [&](const std::string& field, const auto& leaf) {
                               if (stored.find(field)) return;
                               if (const std::string former = former_name(field); stored.find(former))
                                 stored.rename(former, field);
                               else if (may_be_missing(field))
                                 stored.add(field, leaf);
                             },
                             name);
                       },
                   .compare = [name, &part](auto& restoring) { restoring.compare(name, part); },
                   .assign = [name, &part](auto& restoring) { restoring.assign(name, part); }});
}

}  // namespace tessera::train
