#pragma once

#include <string>

#include "models/bert.h"
#include "plan/plan.h"
#include "tensor/precision.h"
#include "train/form_settings.h"
#include "train/training_settings.h"

/// What a run of `tessera train bert --task mlm` is made by.

namespace tessera::train {

/// The settings that define a run, except device and logging. Two jobs with equal settings and steps give
/// bitwise equal curves on one device.
struct MlmSettings : TrainingSettings {
  static constexpr const char* kJob = "mlm job";

  std::string task = "mlm";
  std::string data;         // folder of the shards; "": the run's own, made of text
  std::string model;        // folder with the weights to begin with; "": from random ones
  std::string fingerprint;  // of the tokenizer
  /// With the masked language head; its dtype is that of parameters and activations.
  models::BertConfig bert;
  int64_t batch = 32;        // sequences per micro-batch
  int64_t max_length = 128;  // tokens of each, [CLS] and [SEP] included
  double mask = 0.15;        // share of a sequence's other tokens that is predicted
  FormSettings factors;      // of the blocks' linear layers

  /// Every setting; the flags but for --mask are those of `train bert`.
  SettingList list();
  Precision precision() const { return {bert.dtype, f32_math}; }
  void set_precision(Precision precision) {
    bert.dtype = precision.dtype;
    f32_math = precision.math;
  }
  /// Throws, naming the setting.
  void validate() const;
  int64_t text_length() const { return max_length - 2; }
  int64_t texts_per_step() const { return batch * accumulate; }
  /// As those of GlueSettings.
  plan::BertStep planned_step(Device device) const;
  plan::Memory planned(Device device) const;
};

}  // namespace tessera::train
