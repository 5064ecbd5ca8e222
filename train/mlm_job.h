#pragma once

#include <string>
#include <vector>

#include "datasets/loader.h"
#include "models/bert.h"
#include "optim/optimizer.h"
#include "train/job.h"
#include "train/language_data.h"
#include "train/masking.h"
#include "train/mlm_settings.h"

/// `tessera train bert --task mlm`: pretraining of BERT and RoBERTa by masked language modelling.

namespace tessera::train {

/// Model and optimizer on a device, and the fixed tensors of one batch.
class MlmJob : public Job {
 public:
  /// `weights`: folder whose weights the model begins with, "" for drawn ones. `data` must outlive the job;
  /// at most `eval_tokens` of its validation part are evaluated. `restored`: a checkpoint is restored
  /// afterwards, so factors are not computed. Throws unless the training part has as many sequences as a
  /// batch takes.
  MlmJob(const MlmSettings& settings, Device device, const LanguageData& data, int64_t eval_tokens,
         const std::string& weights, bool restored = false);
  const MlmSettings& settings() const { return settings_; }
  const models::Bert& model() const { return model_; }
  /// Tokens of the sequences of an evaluation.
  const std::vector<std::vector<int64_t>>& held_out() const { return held_out_; }

  JobInfo info() const override;
  void batch(uint64_t index) override;
  void divide(const dist::Share& share) override;
  Tensor loss() override;
  /// eval_nll (nats per masked token) and eval_accuracy of what is held out, masked alike in every run.
  Values evaluate() override;
  nlohmann::json settings_json() const override { return to_json(settings_); }

 private:
  datasets::Loader<datasets::TokenWindows> loader_of(const dist::Share& share) const;

  MlmSettings settings_;
  const LanguageData& data_;
  Rng rng_;
  models::Bert model_;
  optim::Optimizer optimizer_;
  Masking masking_;
  datasets::Loader<datasets::TokenWindows> loader_;
  std::vector<std::vector<int64_t>> held_out_;  // texts
  models::BertBatch batch_;
  Tensor targets_;
};

}  // namespace tessera::train
