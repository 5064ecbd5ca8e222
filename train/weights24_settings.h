#pragma once

#include <string>

#include "nn/weights24.h"
#include "train/setting.h"

namespace tessera::train {

/// Which linear layers of a model's blocks train with 2:4 weights, and how (docs/sparse_training.md). When is
/// Sparse24Settings::active_at.
struct Weights24Settings {
  std::string layers = "none";     // none, attn, mlp or attn,mlp
  int64_t every = 40;              // steps between two masks
  double decay = 6e-5;             // of pruned weights, added to their gradients
  std::string gradient = "dense";  // of the weights: of all of dy, or mvue

  /// Adds the settings to the group "Training". Default values are not written to run.json.
  void add_to(SettingList& list);
  bool on() const { return layers != "none"; }
  bool in_attention() const { return layers == "attn" || layers == "attn,mlp"; }
  bool in_mlp() const { return layers == "mlp" || layers == "attn,mlp"; }
  /// Whether masks are made before step `step` (from 0), the first sparse one being `first`.
  bool refreshes_at(int64_t step, int64_t first) const { return step == first || step % every == 0; }
  /// Whether random numbers are drawn, of which each rank has its own.
  bool draws() const { return on() && gradient == "mvue"; }
  /// Throws for flags that have no effect without --weights-24.
  void check_given(const Given& given) const;
  /// "2:4 in attn,mlp: masks every 40 steps, decay 6e-05"; for a header.
  std::string description() const;
  /// The variants of ops::multiply24 that the GEMMs of a layer in -> out take there: "forward by
  /// decompressed, input gradient by decompressed", and with mvue that of the weight's gradient.
  std::string variants(int64_t tokens, int64_t in, int64_t out, DType dtype, Device device) const;

  /// Gives the layers of the blocks the form; mvue draws from `rng`.
  template <class Model>
  void apply(Model& model, const Rng& rng) const {
    if (!on()) return;
    std::optional<Rng> mvue;
    if (draws()) mvue = rng;
    nn::for_each<nn::Linear>(model, [&](const std::string& name, nn::Linear& layer) {
      if (takes(name)) nn::set_weights24(layer, mvue);
    });
  }

 private:
  bool takes(const std::string& name) const;
};

}  // namespace tessera::train
