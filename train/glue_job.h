#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint.h"
#include "models/bert.h"
#include "optim/adamw.h"
#include "optim/schedule.h"
#include "pretrained/load.h"
#include "tensor/precision.h"
#include "train/glue_data.h"
#include "train/trainer.h"

/// Fine-tuning of BERT and RoBERTa on a task of GLUE: one seed. Several are compared by train/seeds_report.h.

namespace tessera::train {

/// What a run of `tessera train bert` is, but for where it runs and what it logs. Two jobs with equal fields
/// and equal data give bitwise equal curves on one device.
struct GlueJob {
  std::string task = "sst2";
  std::string data;   // folder of the task's files
  std::string model;  // folder with the weights to begin with; "": from random ones
  /// With the head that the task needs; its dtype is that of parameters and activations.
  models::BertConfig bert;
  std::string batches = "packed";  // packed: one text behind the other; padded: each max_length tokens
  int64_t batch = 32;              // texts (or pairs) a step
  int64_t max_length = 128;        // tokens, special ones included; longer texts are cut
  double lr = 2e-5, weight_decay = 0.01, clip_norm = 1.0;
  std::string schedule = "linear";  // constant, linear, cosine, wsd
  int64_t steps = 0, warmup = 0;
  uint64_t seed = 0;                 // of the head's first values, of the order of the data and of dropout
  F32Math f32_math = F32Math::ieee;  // tf32 only with a model in f32

  static constexpr int64_t kLargest = int64_t(1) << 30;

  void fields(auto&& visit) {
    visit("task", task), visit("data", data), visit("model", model), visit("batches", batches);
    visit("batch", batch), visit("max_length", max_length), visit("lr", lr);
    visit("weight_decay", weight_decay), visit("clip_norm", clip_norm), visit("schedule", schedule);
    visit("steps", steps), visit("warmup", warmup), visit("seed", seed), visit("f32_math", f32_math);
  }
  Precision precision() const { return {bert.dtype, f32_math}; }
  void set_precision(Precision precision) {
    bert.dtype = precision.dtype;
    f32_math = precision.math;
  }
  /// Throws, naming the setting.
  void validate() const;
};

/// The configuration of the encoder as its config.json has it, under "config".
nlohmann::json to_json(const GlueJob& job);
/// Throws, naming the key that is missing, unknown or of a wrong type.
GlueJob glue_job_from_json(const nlohmann::json& json);

optim::Schedule make_schedule(const GlueJob& job);
/// Of a config.json's text, with the head that the task needs; `path` is for messages. Throws unless it is of
/// a BERT or RoBERTa.
models::BertConfig bert_config(const std::string& path, const std::string& text, datasets::GlueTask task);

/// Model and optimizer on a device, and the batch under way.
class GlueSession {
 public:
  /// Loads the weights of job.model; the rest is drawn by the seed. Throws if the folder's model is not the
  /// job's.
  GlueSession(const GlueJob& job, Device device);
  const GlueJob& job() const { return job_; }
  Device device() const { return device_; }
  models::Bert& model() { return model_; }
  /// What became of the names of job.model's file; of a model from random weights, nothing.
  const pretrained::LoadReport& loaded() const { return loaded_; }
  optim::AdamW& optimizer() { return optimizer_; }

  /// Brings a batch from the host to the device.
  void load(const datasets::GlueBatch& batch);
  Tensor loss() const {
    const F32MathScope math(job_.f32_math);
    return model_.loss(batch_, targets_);
  }

  /// All of the state that continues the curve, the step included.
  io::Checkpoint checkpoint(int64_t step) const;
  /// Returns the step. All or nothing: on an error nothing has changed. Throws, naming the setting, if the
  /// checkpoint is of another job; only the number of steps may differ.
  int64_t restore(const std::filesystem::path& file);

 private:
  GlueJob job_;
  Device device_;
  Rng rng_;
  pretrained::LoadReport loaded_;
  models::Bert model_;
  optim::AdamW optimizer_;
  models::BertBatch batch_;
  Tensor targets_;
};

/// Classes or scores that the model gives to the texts, in their order, without dropout.
struct GluePredictions {
  std::vector<double> values;
  double loss = 0;  // mean over the texts: cross-entropy in nats, or squared error; NaN without labels
};
GluePredictions predict_glue(GlueSession& session, const datasets::GlueItems& items);

/// The task's metrics on its development parts: "eval_loss", "eval_accuracy", ... and "eval_score", their
/// mean. MNLI's two parts have a metric each, "eval_accuracy_matched" and "eval_accuracy_mismatched".
std::map<std::string, double> evaluate_glue(GlueSession& session, const GlueSet& set);

/// Trains from `first_step` on; see run_training.
TrainResult train_glue(GlueSession& session, const GlueSet& set, const RunFolder& run,
                       const TrainerOptions& options, int64_t first_step, Progress& progress);

/// The files that write_submissions makes in `folder`.
std::vector<std::string> submission_files(const GlueSet& set, const std::filesystem::path& folder);
/// Writes the predictions for the test parts in the form that the benchmark's server takes, all of them or
/// none; returns the files.
std::vector<std::string> write_submissions(GlueSession& session, const GlueSet& set,
                                           const std::filesystem::path& folder);

}  // namespace tessera::train
