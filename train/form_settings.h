#pragma once

#include <map>
#include <string>
#include <vector>

#include "nn/low_rank.h"
#include "optim/bundled.h"
#include "plan/plan.h"
#include "pretrained/layers.h"
#include "train/setting.h"

namespace tessera::train {

/// Inputs for initialising factors besides the settings.
struct FactorStart {
  /// The model starts from given weights, those of --model.
  bool has_weights = false;
  /// A checkpoint is restored afterwards, so no decomposition is made.
  bool restored = false;
  /// Gradients of the weights by the names of our layers, for FormSettings::needs_gradient(). If there are
  /// none (jobs that are only timed), the columns are random.
  std::map<std::string, Tensor> gradients = {};
};

/// Which linear layers of a model's blocks are made of factors, and how (docs/low_rank.md).
struct FormSettings {
  std::string form = "dense";  // a name of nn::FactorKind
  int64_t rank = 0;
  int64_t attention_rank = 0, mlp_rank = 0;  // in place of `rank`; 0: that
  std::string layers = "all";                // of the blocks: all, attention, mlp
  std::string init = {};                     // a name of nn::FactorInit; "": by the form and the weights
  std::string activation = "silu";           // of cola
  double alpha = 32, density = 0.03;         // of sltrain
  double column_share = 0.05, gamma = 0.5;   // of lost
  std::string columns = "residual";          // of lost: a name of nn::ColumnChoice
  int64_t residual_rank = 0;                 // of lost

  /// Adds the settings to the group "Model". Default values are not written to run.json.
  void add_to(SettingList& list);
  bool factorizes() const { return form != "dense"; }
  /// Whether the layers of attention, or of the MLPs, have the form.
  bool factorizes(bool attention) const {
    return factorizes() && layers != (attention ? "mlp" : "attention");
  }
  int64_t rank_of(bool attention) const {
    const int64_t own = attention ? attention_rank : mlp_rank;
    return own ? own : rank;
  }
  /// Whether lost's columns are chosen by a gradient.
  bool needs_gradient() const { return form == "lost" && columns == "gradient"; }
  /// The options of the attention layers, or of those of the MLPs; of kind dense where these stay dense.
  /// `has_weights`: the model begins with given weights. Throws, naming the flag, for values that mean
  /// nothing.
  nn::FactorOptions options(bool of_attention, bool has_weights) const;
  /// The quantities that plans count.
  plan::Forms forms(bool has_weights) const {
    return {options(true, has_weights), options(false, has_weights)};
  }
  /// Throws as options() does; also, with `given`, for flags that have no effect in this form.
  void validate(bool has_weights) const;
  void check_given(const Given& given) const;
  /// Gives the linear layers of the blocks their factors, those of each module on their own. Returns the
  /// names of the layers.
  std::vector<std::string> apply(const pretrained::LinearModules& modules, const Rng& rng,
                                 const FactorStart& start) const;
  /// "low_rank of rank 128, in attention and MLPs"; for a header.
  std::string description() const;
};

/// Throws if the optimizer needs factors of another form.
void check_optimizer_form(const std::string& optimizer, const FormSettings& factors);

/// The matrices and factors of a model's linear layers, each module on its own, for optimizers that know
/// them.
optim::ModelStructure structure_of(const pretrained::LinearModules& modules);

}  // namespace tessera::train
