#pragma once

#include <string>
#include <utility>
#include <vector>

#include "optim/bundled.h"
#include "optim/schedule.h"
#include "train/setting.h"

namespace tessera::train {

/// What the settings of every bundled job share: how it learns.
struct TrainingSettings {
  double lr = 1e-3, weight_decay = 0.01, clip_norm = 1.0;
  double final_lr = 0;  // where the schedule falls to, as a share of lr; declared by those that set it
  std::string optimizer = "adamw";  // optim::optimizer_names()
  double momentum = 0.95;           // of sgd and muon
  std::string schedule = "cosine";  // constant, linear, cosine, wsd
  int64_t steps = 1000, warmup = 100;
  uint64_t seed = 0;
  F32Math f32_math = F32Math::ieee;  // tf32 only with a model in f32
  /// Of jobs that several ranks can train: micro-batches per step on all of them, and the order in which
  /// their gradients are added, "world" or "global" (StepOptions::global_order).
  int64_t accumulate = 1;
  std::string order = "world";

  /// Of any size: sums and products of sizes then stay far below 2^63.
  static constexpr int64_t kLargest = int64_t(1) << 30;

  /// Adds `order` and `accumulate`, which it returns; for the lists of the jobs that have them.
  Setting& add_ranks(SettingList& list);
  /// Settles them for a run on so many ranks: what is not given follows from these. Throws, naming the
  /// setting, if the ranks cannot share the micro-batches out.
  void set_ranks(int ranks, const Given& given, bool resumed);
  /// Adds all others. The seed stands in the group "Data".
  void add_to(SettingList& list);
  optim::Schedule make_schedule() const;
  /// For a model whose activations have the dtype, with the loss scale that this takes.
  optim::Optimizer make_optimizer(std::vector<nn::NamedParameter> parameters, DType activations,
                                  double beta2 = 0.999, std::vector<optim::Group> groups = {}) const;

  /// A size with its name for messages, "batch (--batch-size)".
  using Size = std::pair<const char*, int64_t>;
  /// Throws, beginning with `family` and naming the setting, for sizes that are not from 1 to kLargest and
  /// for values that no training can have with a model in `dtype`.
  void check_training(const char* family, DType dtype, const std::vector<Size>& sizes) const;
};

}  // namespace tessera::train
