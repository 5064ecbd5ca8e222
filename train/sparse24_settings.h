#pragma once

#include <optional>
#include <string>

#include "nn/sparse24.h"
#include "plan/plan.h"
#include "train/setting.h"

namespace tessera::train {

/// 2:4 sparse activations of a model's feed-forward networks, or between the factors of its cola layers,
/// while it trains, and when (docs/sparse_training.md).
struct Sparse24Settings {
  std::string method = "none";  // none, or one of ops::Method24
  std::string token_method = "naive";
  /// Of the four GEMMs: dense, sparse or split; "": split, or sparse where dense_share is 0.
  std::string y = {}, dx = {}, dup = {}, ddown = {};
  double dense_share = 0.05;
  bool dense_gradient = false;  // MlpSparse24::masks_gradient is false
  bool require = false;
  std::string permute = "none";
  int64_t dense_first = 0, dense_last = 0;                // steps
  int64_t dynamic_steps = 10, calibration_samples = 100;  // of soft_dynamic

  /// Adds the settings to the group "Training". Default values are not written to run.json.
  void add_to(SettingList& list);
  bool on() const { return method != "none"; }
  /// Whether step `step` (from 0) of `steps` is sparse.
  bool active_at(int64_t step, int64_t steps) const {
    return step >= dense_first && step < steps - dense_last;
  }
  /// The form, drawing from `rng`. Only if on(). Throws, naming the flag, for values that do not go together.
  nn::Sparse24 form(ops::Activation activation, uint64_t seed, const Rng& rng) const;
  /// Throws as form() does, and for flags that have no effect without --sparse24.
  void validate() const;
  /// `weights24`: --weights-24 is given, to which --dense-first and --dense-last apply as well.
  void check_given(const Given& given, bool weights24) const;
  /// Whether a step depends on state that an earlier one left, or draws random numbers: then several ranks do
  /// not give the bits of one.
  bool has_state() const;
  /// What tessera plan needs to know; the most of sparse and dense steps. Empty if not on().
  std::optional<plan::HiddenBytes> hidden_bytes(DType dtype) const;
  /// "naive, y split, dx split, ..., 5% of the columns dense"; for a header.
  std::string description() const;
  /// The variants of ops::multiply24 that its GEMMs over features and over tokens take there: "sums over
  /// features by decompressed, over tokens by decompressed".
  static std::string variants(int64_t tokens, int64_t hidden, int64_t width, DType dtype, Device device);
  /// With --sparse24-require throws, naming the GEMM, if one of those that are not dense would not use sparse
  /// tensor cores there.
  void check_required(int64_t tokens, int64_t hidden, int64_t width, DType dtype, Device device) const;

  /// Gives the form to every cola layer of the model, and, with `networks`, to every feed-forward network.
  /// Throws if one of these has a gate, or an activation without zeros.
  template <class Model>
  void apply(Model& model, bool networks, uint64_t seed, const Rng& rng) const {
    nn::for_each<nn::Linear>(model, [&](const std::string&, nn::Linear& layer) {
      if (const auto* const cola = std::get_if<nn::Cola>(&layer.form))
        nn::set_sparse24(layer, form(cola->activation, seed, rng));
    });
    if (!networks) return;
    nn::for_each<nn::Mlp>(model, [&](const std::string&, nn::Mlp& mlp) {
      nn::set_sparse24(mlp, form(mlp.activation, seed, rng));
    });
  }
  /// Switches the networks and layers of the model that have the form.
  template <class Model>
  static void set_active(Model& model, bool active) {
    nn::for_each<nn::Linear>(model, [&](const std::string&, nn::Linear& layer) {
      for (nn::Sparse24& own : nn::sparse24_of(layer)) own.active = active;
    });
    nn::for_each<nn::Mlp>(model, [&](const std::string&, nn::Mlp& mlp) {
      if (nn::Sparse24* const own = nn::sparse24_of(mlp)) own->active = active;
    });
  }
};

}  // namespace tessera::train
