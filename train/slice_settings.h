#pragma once

#include <string>
#include <vector>

#include "pretrained/layers.h"
#include "runtime/rng.h"
#include "train/setting.h"

namespace tessera::train {

/// Which linear layers of a model multiply some of their rows only in backward, and which rows
/// (docs/sparse_backward.md).
struct SliceSettings {
  std::string mode = "none";  // none, or a mode of ops::SelectMode
  std::string rows = {};      // "50", a share such as "10%", or "auto" (train/auto_rows.h)
  double threshold = -1;      // of mode threshold; below 0: not given
  std::string weight_grad = "slice";
  std::string layers = "encoder.layer.*.intermediate.dense,encoder.layer.*.output.dense";

  // Of rows "auto": the most that the choice of rows may add to the variance of the batch gradient, as a
  // share of it; and every how many steps the shares are estimated again.
  double variance = 0.025;
  int64_t estimate_every = 200;

  /// Steps between comparisons of the gradient with the dense one of the same batch, over kProbeDraws
  /// draws of the rows; 0: never. Does not change what is trained.
  int64_t probe_every = 0;
  static constexpr int kProbeDraws = 4;

  /// Adds the settings to the group "Training". Default values are not written to run.json.
  void add_to(SettingList& list);
  bool slices() const { return mode != "none"; }
  bool is_auto() const { return slices() && rows == "auto"; }
  /// The form, drawing from `rng`; with rows "auto" that of all rows. Only if slices(). Throws, naming the
  /// flag, for values that mean nothing or do not go together.
  ops::SlicedBackward slice(const Rng& rng) const;
  /// Throws as slice() does; also, with `given`, for flags that have no effect without --slice.
  void validate() const;
  void check_given(const Given& given) const;
  /// Throws for rows "auto": shares are estimated while a run trains.
  void refuse_auto() const;
  /// Gives the layers their form. Returns them.
  std::vector<pretrained::LayerParts> apply(const pretrained::LinearModules& modules, const Rng& rng) const;
  /// "random 10%, weight_grad slice, of encoder.layer.*"; for a header.
  std::string description() const;
};

}  // namespace tessera::train
