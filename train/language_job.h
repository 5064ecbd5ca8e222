#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "datasets/loader.h"
#include "eval/perplexity.h"
#include "models/generate.h"
#include "models/language_model.h"
#include "optim/ema.h"
#include "optim/optimizer.h"
#include "train/best_evaluation.h"
#include "train/held_out.h"
#include "train/job.h"
#include "train/language_data.h"
#include "train/language_settings.h"

/// `tessera train gpt` and `tessera train llama`: a model that predicts the next token.

namespace tessera::train {

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

}  // namespace tessera::train
