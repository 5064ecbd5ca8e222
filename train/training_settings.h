#pragma once

#include <string>
#include <utility>
#include <vector>

#include "datasets/shuffle.h"
#include "optim/bundled.h"
#include "optim/schedule.h"
#include "train/setting.h"

namespace tessera::plan {
struct ArenaSizes;
struct HiddenMatrix;
struct Memory;
}  // namespace tessera::plan

namespace tessera::train {

/// The training settings that all bundled jobs share.
struct TrainingSettings {
  double lr = 1e-3, weight_decay = 0.01, max_grad_norm = 1.0;
  double min_lr_ratio = 0;          // the schedule's minimum over lr; declared by those that set it
  std::string optimizer = "adamw";  // optim::optimizer_names()
  double momentum = 0.95;           // of sgd and muon
  int64_t momentum_reset = 0;       // steps; of adamw, galore and loro
  int64_t galore_rank = 128, galore_every = 200;
  double galore_scale = 0.25;
  std::string galore_projection = "std",
              galore_svd = "exact";  // names of optim::GaloreProjection and GaloreSvd
  int64_t loro_every = 500, refactor_every = 0;
  double loro_lr_scale = -1;
  std::string loro_moments = "reset";        // or "reset_all", "keep": after an exact step
  std::string loro_singular = "error";       // a name of optim::SingularFactor
  std::string missing_grad = "zero";         // or "skip": optim::MissingGrad; declared by those that set it
  std::string optimizer_states = "f32";      // or "bf16": optim::OptimizerOptions::states
  std::string schedule = "cosine";           // a name of optim::ScheduleKind
  int64_t restarts = 0, restart_warmup = 0;  // of the cosine's restarts
  int64_t steps = 1000, warmup = 100;
  uint64_t seed = 0;
  F32Math f32_math = F32Math::ieee;  // tf32 only with a model in f32
  /// datasets::kDataOrder of the build that began the run; declared by jobs that shuffle.
  int64_t data_order = datasets::kDataOrder;
  /// Of jobs that several ranks can train: micro-batches per step on all of them, and the order in which
  /// their gradients are added, "world" or "global" (StepOptions::global_order).
  int64_t accumulate = 1;
  std::string order = "world";
  /// The ranks that the optimizer's states are sharded over. Depends on where the run executes, not on the
  /// job.
  optim::Sharding sharding = {};

  /// Limit of every size: sums and products of sizes then stay far below 2^63.
  static constexpr int64_t kLargest = int64_t(1) << 30;

  /// Adds `data_order`; runs without it are of version 1.
  void add_data_order(SettingList& list) { list.add_hidden("data_order", data_order).absent_means(1); }
  /// Adds `order` and `accumulate`, which it returns; for the lists of the jobs that have them.
  Setting& add_ranks(SettingList& list);
  /// Completes them for a run on this many ranks, which determine the settings that are not given. Throws,
  /// naming the setting, if the ranks cannot share the micro-batches out or cannot train so.
  void set_ranks(int ranks, const Given& given, bool resumed);
  /// Throws if a ZeRO stage cannot shard the sums of these micro-batches over the ranks; after set_ranks.
  void check_zero(int64_t zero, int ranks) const;
  /// "  step      8 micro-batches, sums in the global order", a line of a run's header; "" with one.
  std::string step_line() const;
  /// With the states and the scratch of this optimizer in place of AdamW's states, for a model of that dtype
  /// (Optimizer::bytes() without the gradients, but for padding). Throws if galore's rank is too large for a
  /// matrix.
  plan::Memory with_states(plan::Memory of_adamw, const std::vector<plan::HiddenMatrix>& hidden, DType dtype,
                           Device device) const;
  /// "  memory    52.2 MiB planned a step", a line of a run's header: of each of `ranks`, `each` of which
  /// share a micro-batch. `one`: of one rank that trains alone, on one micro-batch, with_states(). On GPUs
  /// with the memory that sums by copies take.
  std::string memory_line(const plan::Memory& one, const plan::ArenaSizes& sizes, Device device, int ranks,
                          int64_t each = 1) const;
  /// Throws, naming the flag, for flags of another optimizer than the one that is used.
  void check_optimizer_flags(const Given& given) const;
  /// Adds the optimizer and what its states depend on, which plans have too.
  void add_states(SettingList& list);
  /// Adds all others, and these. The seed stands in the group "Data".
  void add_to(SettingList& list);
  optim::Schedule make_schedule() const;
  /// Makes the optimizer of a model whose activations have that dtype, with a loss scale if the dtype needs
  /// one.
  optim::Optimizer make_optimizer(std::vector<nn::NamedParameter> parameters, DType activations,
                                  double beta2 = 0.999, std::vector<optim::Group> groups = {},
                                  optim::ModelStructure structure = {}) const;

  /// A size with its name for messages, "batch (--batch-size)".
  using Size = std::pair<const char*, int64_t>;
  /// Throws, beginning with `family` and naming the setting, for settings that do not go together, or not
  /// with a model in `dtype`. Each value by itself is for check_values().
  void check_training(const char* family, DType dtype) const;
};

/// Takes --steps from `asked` if it is given: of a job's settings a resumed run may change it alone. Throws
/// if others do not fit it.
template <class Settings>
void take_steps(Settings& settings, const TrainingSettings& asked, const Given& given) {
  if (!given.contains("--steps")) return;
  settings.steps = asked.steps;
  settings.validate();
}

}  // namespace tessera::train
