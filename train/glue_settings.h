#pragma once

#include <string>

#include "datasets/glue.h"
#include "models/bert.h"
#include "plan/plan.h"
#include "tensor/precision.h"
#include "train/drop_settings.h"
#include "train/form_settings.h"
#include "train/slice_settings.h"
#include "train/training_settings.h"

/// What a run of `tessera train bert` on a task of GLUE is made by.

namespace tessera::train {

/// The settings that define a run of `tessera train bert`, except device and logging. Two jobs with equal
/// fields and equal data give bitwise equal curves on one device.
struct GlueSettings : TrainingSettings {
  static constexpr const char* kJob = "bert job";

  std::string task = "sst2";
  std::string data;   // folder of the task's files
  std::string model;  // folder with the weights to begin with; "": from random ones
  /// With the head that the task needs; its dtype is that of parameters and activations.
  models::BertConfig bert;
  std::string batches = "packed";  // packed: texts without padding; padded: each takes max_length tokens
  int64_t batch = 32;              // texts (or pairs) per micro-batch
  int64_t max_length = 128;        // tokens, special ones included; longer texts are cut
  SliceSettings slice;
  FormSettings factors;  // of the blocks' linear layers
  DropSettings drop;
  std::string trained = "all";  // parameters to train; biases: those, and the head; head: the head alone

  GlueSettings() { lr = 2e-5, schedule = "linear", steps = 0, warmup = 0; }
  /// Every setting, with its flag; those of the encoder are its config.json, one JSON object.
  SettingList list();
  Precision precision() const { return {bert.dtype, f32_math}; }
  void set_precision(Precision precision) {
    bert.dtype = precision.dtype;
    f32_math = precision.math;
  }
  int64_t texts_per_step() const { return batch * accumulate; }
  /// Of one rank that trains alone, on one micro-batch whose texts have max_length tokens each.
  plan::BertStep planned_step(Device device) const;
  /// Memory of that step, with the states of the optimizer.
  plan::Memory planned(Device device) const;
  /// Throws, naming them, if settings exclude each other; reads nothing.
  void check_together() const;
  /// Throws, naming the setting.
  void validate() const;
};

/// Of a config.json's text, with the head that the task needs; `path` is for messages. Throws unless it is of
/// a BERT or RoBERTa.
models::BertConfig bert_config(const std::string& path, const std::string& text, datasets::GlueTask task);

/// Throws, naming both orders, if id2label of a config.json names the task's classes (in any case) in another
/// order than the task numbers them: a classifier of that file would give each class another's number.
void check_label_order(const std::string& path, const std::string& text, datasets::GlueTask task);

}  // namespace tessera::train
