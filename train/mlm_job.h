#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "datasets/loader.h"
#include "models/bert.h"
#include "optim/optimizer.h"
#include "tensor/precision.h"
#include "train/form_settings.h"
#include "train/job.h"
#include "train/language_data.h"
#include "train/training_settings.h"

/// `tessera train bert --task mlm`: pretraining of BERT and RoBERTa by masked language modelling.

namespace tessera::train {

/// The settings that define a run, except device and logging. Two jobs with equal settings and steps give
/// bitwise equal curves on one device.
struct MlmSettings : TrainingSettings {
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
};

nlohmann::json to_json(const MlmSettings& settings);
/// Throws, naming the key that is missing, unknown or of a wrong type.
MlmSettings mlm_settings_from_json(const nlohmann::json& json);

/// Sequences [CLS] text [SEP] of which some tokens are to be predicted (Devlin et al., arXiv:1810.04805,
/// section 3.1).
struct MaskedBatch {
  std::vector<int64_t> tokens;   // of all sequences, one after the other
  std::vector<int64_t> lengths;  // of each
  std::vector<int64_t> rows;     // where a token is to be predicted, ascending
  std::vector<int64_t> targets;  // the tokens that stood there
};

/// The batch as the model's input, and the targets at `masked`.
models::BertBatch masked_bert_batch(const MaskedBatch& batch, const models::BertConfig& config, Device device,
                                    Tensor& targets);

/// Masks tokens for a model with this tokenizer.
class Masking {
 public:
  /// Throws, naming the tokenizer, unless it has [CLS], [SEP] and [MASK]. `order`: MlmSettings::data_order.
  Masking(const io::Tokenizer& tokenizer, double share, int64_t order = datasets::kDataOrder);
  /// Of each text round(share * length), but at least one token, is chosen at random; 80 % of them become
  /// [MASK], 10 % another ordinary token at random, 10 % stay. So batches of equal lengths have equal shapes.
  /// What becomes of a text is a pure function of it, the seed, the index, and its row, counted from `first`
  /// on.
  MaskedBatch batch(const std::vector<std::vector<int64_t>>& texts, uint64_t seed, uint64_t index,
                    uint64_t first = 0) const;
  int64_t chosen(int64_t length) const;

 private:
  int64_t cls_, sep_, mask_;
  std::vector<int64_t> ordinary_;  // tokens that are not special
  double share_;
  int64_t order_;
};

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
