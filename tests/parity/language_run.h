#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "models/generate.h"
#include "optim/adamw.h"
#include "pretrained/load.h"

/// What a model computes on the batches of a folder, to be compared with what transformers computed on them.
/// batch.safetensors has tokens and targets [steps, B, T]; of BERT lengths [B], types [steps, B, T] and
/// targets [steps, B] or [steps, B, T].

namespace tessera::parity {

constexpr double kLearningRate = 1e-3, kDecay = 0.1;  // those of language_parity.py

struct Batches {
  explicit Batches(const std::string& folder)
      : tensors(io::load_safetensors(folder + "/batch.safetensors")) {}
  Tensor of(const std::string& name, int64_t step) const { return tensors.at(name).select(0, step); }
  int64_t steps() const { return tensors.at("tokens").size(0); }
  std::map<std::string, Tensor> tensors;
};

template <class Model>
Tensor logits_of(const Model& model, const Batches& batches, int64_t step) {
  return model(batches.of("tokens", step));
}
template <class Model>
Tensor loss_of(const Model& model, const Batches& batches, int64_t step) {
  return model.loss(batches.of("tokens", step), batches.of("targets", step));
}

inline models::BertBatch bert_batch(const Batches& batches, int64_t step) {
  const auto types = batches.tensors.contains("types") ? batches.of("types", step) : Tensor();
  return models::BertBatch::from_padded(batches.of("tokens", step), types,
                                        batches.tensors.at("lengths").to_vector<int64_t>());
}
inline Tensor logits_of(const models::Bert& model, const Batches& batches, int64_t step) {
  return model(bert_batch(batches, step));
}
inline Tensor loss_of(const models::Bert& model, const Batches& batches, int64_t step) {
  models::BertBatch batch = bert_batch(batches, step);
  Tensor targets = batches.of("targets", step);
  const std::vector<int64_t>& lengths = batch.sequences.lengths;
  if (targets.rank() == 2) {  // a target a token
    targets = models::BertBatch::from_padded(targets, {}, lengths).tokens;
    // Sequences of one length are given as pretraining gives them: the head reads the rows with a target
    // alone.
    if (std::count(lengths.begin(), lengths.end(), lengths.front()) == int64_t(lengths.size())) {
      std::vector<int64_t> rows, kept;
      const auto all = targets.to_vector<int64_t>();
      for (size_t i = 0; i < all.size(); ++i)
        if (all[i] != -100) rows.push_back(int64_t(i)), kept.push_back(all[i]);
      batch.masked = Tensor::from(rows, {int64_t(rows.size())}, targets.device());
      targets = Tensor::from(kept, {int64_t(kept.size())}, targets.device());
    }
  }
  return model.loss(batch, targets);
}

/// logits of step 0 (of BERT those of the tokens that are there, one sequence after the other),
/// gradient.<name> of step 0 by the names of transformers, loss [steps] of AdamW, and of causal models the
/// twelve tokens generated greedily after the first row's first four.
template <class Model>
io::NamedTensors run(const Model& model, const std::string& folder) {
  const Batches batches(folder);
  io::NamedTensors results;
  {
    const NoTape none;
    results.emplace_back("logits", logits_of(model, batches, 0));
  }
  if constexpr (!std::is_same_v<Model, models::Bert>) {
    const auto row = batches.of("tokens", 0).template to_vector<int64_t>();
    const auto text =
        models::generate(model, std::span(row).first(4), {.most_tokens = 12, .sampling = {.temperature = 0}});
    results.emplace_back("generated", Tensor::from(text, {int64_t(text.size())}));
  }
  const auto parameters = nn::parameters(model);
  optim::AdamW optimizer(parameters, {.lr = kLearningRate, .weight_decay = kDecay});
  std::vector<double> losses;
  for (int64_t step = 0; step < batches.steps(); ++step) {
    optimizer.zero_grad();
    Tape tape;
    const Tensor loss = loss_of(model, batches, step);
    losses.push_back(loss.item());
    tape.backward(loss);
    if (step == 0) {
      io::NamedTensors ours;
      for (const auto& [name, tensor] : parameters)
        if (grad(tensor).defined()) ours.emplace_back(name, grad(tensor));
      for (const auto& [name, gradient] :
           pretrained::export_tensors(ours, pretrained::name_table(model.config)))
        results.emplace_back("gradient." + name, gradient.clone());
    }
    optimizer.step();
  }
  results.emplace_back("loss", Tensor::from(losses, {int64_t(losses.size())}));
  return results;
}

}  // namespace tessera::parity
