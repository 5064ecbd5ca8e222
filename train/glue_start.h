#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/glue_settings.h"

/// What a run of `tessera train bert` is asked for.

namespace tessera::train {

/// How a run begins: the settings that it keeps, and the flags that they follow from.
struct GlueStart {
  GlueSettings settings = {};
  std::string size = "tiny";  // of an encoder that begins from nothing: tiny, mini, small, medium, base
  bool scratch = false, pad = false, packed = false;
  int64_t seeds = 3, vocab_size = 2000, layers = 0, d_model = 0, heads = 0, d_ff = 0;  // 0: by the size
  double epochs = 3, dropout = 0;
  std::optional<Precision> precision = {};

  /// Every flag but those of GlueOptions and --precision.
  SettingList list();
  /// The configuration of an encoder trained from scratch; vocabulary and head do not fit a task yet.
  models::BertConfig scratch_config(const Given& given) const;
};

/// The files that a run writes besides its page.
struct GlueOptions {
  bool predict = false, save_model = false;
  SettingList list();
};

}  // namespace tessera::train
