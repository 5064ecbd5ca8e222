#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "datasets/loader.h"
#include "eval/perplexity.h"
#include "io/checkpoint.h"
#include "models/generate.h"
#include "models/language_model.h"
#include "optim/ema.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "plan/plan.h"
#include "tensor/precision.h"
#include "train/form_settings.h"
#include "train/language_data.h"
#include "train/sparse24_settings.h"
#include "train/trainer.h"
#include "train/training_settings.h"
#include "train/weights24_settings.h"

/// `tessera train gpt` and `tessera train llama`: a model that predicts the next token.

namespace tessera::train {

using plan::LanguageConfig;

/// The settings that define a run, except device and logging. Two jobs with equal settings and steps give
/// bitwise equal curves on one device.
struct LanguageSettings : TrainingSettings {
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

nlohmann::json to_json(const LanguageSettings& settings);
/// Throws, naming the key that is missing, unknown or of a wrong type.
LanguageSettings language_settings_from_json(const nlohmann::json& json);

/// Sizes known by a name, small to large: "demo", which learns the licence texts of a Debian on two cores
/// within five minutes; GPT-2's small, medium, large and xl (Radford et al., 2019, table 2); of LLaMA 60m,
/// 130m, 350m, 1b and 7b (Zhao et al., arXiv:2403.03507, table 5). The vocabulary stays as it was.
std::vector<std::string> size_names(bool llama);
/// Throws if the name is unknown.
void apply_size(LanguageConfig& config, const std::string& name);

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

/// The evaluation with the lowest eval_nll of a run, the first of several.
struct BestEvaluation {
  int64_t step = 0;  // 0: there was none
  double nll = 0;
  int64_t evaluations = 0, since = 0;  // all, and those after it
  /// The next one. A loss that is not finite is never the best.
  void add(int64_t at, double loss);
};
/// According to the curve up to the step `last`: a resumed run needs no other record.
BestEvaluation best_evaluation(const RunFolder& run, int64_t last = LanguageSettings::kLargest);

/// The tokens that a sample begins with: the prompt's, or the one that ends documents, after which a new one
/// begins. Throws if they are more than a training sequence has.
std::vector<int64_t> sample_prompt(const LanguageData& data, const LanguageWatch& watch);

/// Model, optimizer, and the fixed tensors of one micro-batch on a device.
class LanguageJob : public Job {
 public:
  /// `weights`: folder whose weights the model begins with, "" for drawn ones. `start`: of factors, whose
  /// weights are those of that folder.
  LanguageJob(const LanguageSettings& settings, Device device, const std::string& weights = "",
              FactorStart start = {});
  const LanguageSettings& settings() const { return settings_; }
  optim::Optimizer& optimizer() { return optimizer_; }

  /// Sets the training data, which must outlive the job, the held-out data, which may be empty, and the
  /// baseline's loss on it. Without this there are no batches; load() brings one from elsewhere. Throws
  /// unless the training part has as many windows as a batch takes.
  void set_data(const LanguageData& data, const LanguageWatch& watch, HeldOut held_out,
                const NgramBaseline& baseline);

  JobInfo info() const override;
  bool begin(const RunFolder& run) override;
  void batch(uint64_t index) override;
  void divide(const dist::Share& share) override;
  void advance(uint64_t index) override;
  Tensor loss() override;
  std::vector<Tensor> penalties() override;
  /// With `ema` it averages.
  void updated() override;
  /// With weights24: flip_rate, the share of its elements whose mask changed when masks were last made.
  Values state_values() override;
  /// eval_nll (nats per token), eval_perplexity, eval_bits_per_byte, and of the baseline ngram_nll,
  /// ngram_bits_per_byte and eval_gap = eval_nll - ngram_nll. With sparse24 also activation_zeros and
  /// dropped_energy, means over what is sparse, and "zeros.blocks.3.mlp", "dropped.blocks.3.mlp" of each
  /// network, "zeros.blocks.3.attention.qkv.0" of each part of a cola layer.
  Values evaluate() override;
  /// Early stopping, and the best evaluation's checkpoint if its weights are to be exported.
  Verdict judge(int64_t step, const Values& values) override;
  std::optional<int64_t> spared() const override;
  void sample(int64_t step, const RunFolder& run) override;
  nlohmann::json settings_json() const override { return to_json(settings_); }

  /// Copies a batch from the host into the tensors that loss() reads.
  void load(const datasets::TokenBatch& batch);
  /// The position in the data; part of checkpoints.
  datasets::LoaderState& position() { return position_; }
  /// The loss of the windows' predictions, settings().batch windows at a time, without a tape and without
  /// dropout. This and the next two functions use the averages of the weights if there are any (`ema`).
  eval::Perplexity measure(std::span<const eval::PerplexityWindow> windows);
  /// New tokens after the prompt, without dropout.
  std::vector<int64_t> generate(std::span<const int64_t> prompt, const models::GenerateOptions& options);
  /// The gradients of the linear layers' weights on the first micro-batch, by the names of our layers. For a
  /// job whose layers are dense and whose gradients are not spread over ranks, before its first step; it
  /// cannot train afterwards.
  std::map<std::string, Tensor> weight_gradients();
  /// Writes config.json and model.safetensors.
  void save(const std::string& folder);

 private:
  static models::LanguageModel make(const LanguageSettings& settings, const Rng& rng, Device device,
                                    const std::string& weights, FactorStart start);
  /// f(), the model in evaluation mode: without dropout, and with the averages of the weights if there are
  /// any.
  template <class F>
  auto as_used(F&& f);
  datasets::LoaderOptions loader_options(const Rng& order, const datasets::LoaderShare& share) const;
  bool keeps_best() const { return watch_.exported == "best"; }
  void find_zeros(bool of_start);
  void add_sparsity(Values& values);
  void set_sparsity(int64_t step);
  Tensor decay_of_pruned() const;
  bool has_ended() const { return watch_.patience > 0 && best_.since >= watch_.patience; }

  LanguageSettings settings_;
  Rng rng_;
  models::LanguageModel model_;
  Rng sparse24_rng_;
  optim::Optimizer optimizer_;
  std::optional<optim::Ema> ema_;
  /// A matrix with zeros that stay: `bits` are those of its other weights (ops/bits/bits.h).
  struct Sparse {
    Tensor weight, bits;
    void fields(auto&& visit) { visit("bits", bits); }
  };
  std::vector<Sparse> sparse_;
  Tensor inputs_, targets_;  // [B, T]
  Tensor l1_, decay_;        // penalties of the last loss(), until penalties() takes them
  int64_t refreshed_ = -1;   // the step that masks were last made for
  nn::Sequences sequences_;  // with `documents`
  datasets::LoaderState position_;

  const LanguageData* data_ = nullptr;
  std::optional<datasets::Loader<datasets::TokenWindows>> loader_;
  LanguageWatch watch_;
  HeldOut held_out_;
  NgramBaseline baseline_;
  std::vector<eval::PerplexityWindow> windows_;  // of held_out_
  double tokens_per_byte_ = 0;
  std::vector<int64_t> prompt_;  // of samples
  BestEvaluation best_;
};

/// The periods, in steps, of what the optimizer of this job does besides its usual step: GaLore's
/// decompositions, LORO's exact steps and balancing.
std::vector<int64_t TrainingSettings::*> periods_of(const LanguageSettings& settings);

/// The number of steps of this job that fit into this many seconds, estimated from a few steps on random
/// tokens, and from one of each of periods_of(), counted by its share of the steps.
int64_t steps_within(const LanguageSettings& settings, Device device, double seconds);

/// Writes a Hugging Face model directory with the trained model and its tokenizer (the folder `tokenizer`).
/// An export that an earlier end of the same run left is replaced once the new one is complete.
void export_language(LanguageJob& job, const LanguageData& data, const std::string& tokenizer,
                     const std::string& folder);

/// The page of a run: losses next to the baseline, samples, throughput, settings.
void write_language_report(const RunFolder& run, const LanguageJob& job, const TrainResult& result);

}  // namespace tessera::train
