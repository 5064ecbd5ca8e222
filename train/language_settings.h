#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "plan/plan.h"
#include "tensor/precision.h"
#include "train/form_settings.h"
#include "train/sparse24_settings.h"
#include "train/training_settings.h"
#include "train/weights24_settings.h"

/// What a run of `tessera train gpt` and `tessera train llama` is made by.

namespace tessera::train {

using plan::LanguageConfig;

/// The settings that define a run, except device and logging. Two jobs with equal settings and steps give
/// bitwise equal curves on one device.
struct LanguageSettings : TrainingSettings {
  static constexpr const char* kJob = "language job";

  LanguageConfig model;
  std::string start;        // Hugging Face model directory whose weights it begins with; "": drawn
  std::string data;         // folder of the shards; "": the run's own, made of text
  std::string fingerprint;  // of the tokenizer
  int64_t length = 256;     // tokens per sequence
  int64_t stride = 0;       // from the beginning of a sequence to that of the next; 0: the length
  int64_t batch = 16;       // sequences per micro-batch
  bool documents = false;   // sequences end where documents do; see datasets::TokenWindowsOptions
  double beta2 = 0.95;
  /// Of embeddings and residual branches. A LLaMA is made by it; a GPT by its config.json, which has it too:
  /// here it says what was asked, for reports. 0 where `start`, or an earlier version, defined the model.
  double dropout = 0;
  double ema = 0;  // decay of the averages of the weights (optim::Ema); 0: none
  Sparse24Settings sparse24;
  Weights24Settings weights24;
  double activation_l1 =
      0;  // times the mean hidden activation of each feed-forward network is added to the loss
  bool keep_zeros = false;  // weights of the blocks' matrices that are 0 in `start` stay 0
  FormSettings factors;     // of the blocks' linear layers

  LanguageSettings() { weight_decay = 0.1, min_lr_ratio = 0.1; }
  /// Every setting, with its flag; those of the model are its config.json, one JSON object.
  SettingList list();
  /// Adds the sizes of a batch alone, which benchmarks and plans have too.
  void add_sizes(SettingList& list);
  void add_averages(SettingList& list);
  bool is_llama() const { return std::holds_alternative<models::LlamaConfig>(model); }
  const char* family() const { return is_llama() ? "llama" : "gpt"; }
  DType dtype() const;
  Precision precision() const { return {dtype(), f32_math}; }
  void set_precision(Precision precision);
  /// The model of a config.json. Throws if it is no GPT and no LLaMA.
  void set_model(const nlohmann::json& config);
  int64_t tokens_per_step() const { return length * batch * accumulate; }
  plan::Forms forms() const {
    plan::Forms forms = factors.forms(!start.empty());
    if (sparsifies_networks()) forms.hidden = sparse24.hidden_bytes(dtype());
    if (sparsifies_factors()) forms.between = sparse24.hidden_bytes(dtype());
    forms.attention24 = weights24.in_attention(), forms.mlp24 = weights24.in_mlp();
    forms.mvue24 = weights24.draws();
    return forms;
  }
  /// Memory of a step of one rank that trains alone, on one micro-batch: with the states of the optimizer,
  /// and the averages of --ema.
  plan::Memory planned(Device device) const;
  /// What --sparse24 makes 2:4: the activations between the factors of cola layers; and the hidden ones of
  /// feed-forward networks, unless they are made of cola layers, or have no zeros while others have.
  bool sparsifies_factors() const { return sparse24.on() && factors.form == "cola"; }
  bool sparsifies_networks() const {
    if (!sparsifies_factors()) return sparse24.on();
    return !factors.factorizes(false) && has_zeros();
  }
  /// The GEMMs that are 2:4, as features and the width that these are multiplied to; for headers.
  std::vector<std::pair<int64_t, int64_t>> sparse24_sizes() const;
  /// Throws if --sparse24-require asks for sparse tensor cores that a GEMM would not use on this device.
  void check_required(Device device) const;
  /// The names of the terms added to the loss: "activation_l1", "masked_decay".
  std::vector<std::string> penalties() const;
  /// Throws, naming the setting.
  void validate() const;
  /// Throws for what does not train on several ranks.
  void check_on_ranks(int ranks) const;
  /// Throws if averages of the weights (`ema`) cannot be made with states that are spread in this ZeRO stage.
  void check_averages(int64_t zero) const;

 private:
  /// Whether the hidden activations of the feed-forward networks have zeros.
  bool has_zeros() const;
  /// Throws, saying that `flag` needs it, unless they have zeros.
  void check_activations(const std::string& flag) const;
  void check_sparse24() const;
  void check_weights24() const;
};

/// Settings of evaluation and samples.
struct LanguageWatch {
  int64_t eval_tokens = 1 << 18;   // of the validation part, at most
  int64_t eval_stride = 0;         // of sliding_windows, up to the length of sequences; 0: half of that
  int64_t sample_every = 0;        // steps; 0: at the end
  int64_t sample_tokens = 128;     // new ones; 0: no samples
  std::string sample_prompt = {};  // "": the token that ends documents
  int64_t ngram = 5;               // order of the n-gram baseline; 0: none
  int64_t patience = 0;            // evaluations without a new lowest loss until the run ends; 0: no matter
  std::string exported = "last";   // whose weights model/ has: those of the last step, or of the "best" one

  SettingList list();
};

/// The stride of evaluations. Throws if it is more than the length of sequences.
int64_t evaluation_stride(const LanguageSettings& settings, const LanguageWatch& watch);

}  // namespace tessera::train
