#include <cstdio>
#include <string>

#include "models/generate.h"
#include "optim/adamw.h"
#include "pretrained/load.h"

using namespace tessera;

/// Runs a model that transformers wrote and writes what it computes, for transformers to repeat:
///   dump_language FOLDER OUT.safetensors
/// FOLDER has config.json, weights and batch.safetensors: tokens and targets [steps, B, T]; of BERT lengths
/// [B], types [steps, B, T] and targets [steps, B] or [steps, B, T]. OUT holds
///   logits            of step 0; of BERT those of the tokens that are there, one sequence after the other
///   gradient.<name>   of step 0, by the names of transformers
///   loss [steps]      of AdamW
///   generated         greedy, after the first row's first four tokens, of causal models
/// The weights as loaded are saved again into FOLDER/saved (one file) and FOLDER/sharded (several).

namespace {

constexpr double kLearningRate = 1e-3, kDecay = 0.1;

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

models::BertBatch bert_batch(const Batches& batches, int64_t step) {
  const auto types = batches.tensors.contains("types") ? batches.of("types", step) : Tensor();
  return models::BertBatch::from_padded(batches.of("tokens", step), types,
                                        batches.tensors.at("lengths").to_vector<int64_t>());
}
Tensor logits_of(const models::Bert& model, const Batches& batches, int64_t step) {
  return model(bert_batch(batches, step));
}
Tensor loss_of(const models::Bert& model, const Batches& batches, int64_t step) {
  const models::BertBatch batch = bert_batch(batches, step);
  Tensor targets = batches.of("targets", step);
  if (targets.rank() == 2) {  // a target a token
    targets = models::BertBatch::from_padded(targets, {}, batch.sequences.lengths).tokens;
  }
  return model.loss(batch, targets);
}

template <class Model>
void run(Model& model, const std::string& folder, const std::string& out) {
  pretrained::save(model, folder + "/saved");
  pretrained::save(model, folder + "/sharded", {.shard_bytes = 20'000});
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
  io::save_safetensors(out, results);
}

}  // namespace

int main(int count, char** words) try {
  if (count != 3) {
    std::fprintf(stderr, "usage: dump_language FOLDER OUT.safetensors\n");
    return 2;
  }
  const std::string folder = words[1];
  Rng rng(1);
  const Device cpu = Device::cpu();
  const std::string type = pretrained::read_config(folder).type;
  if (type == "llama") {
    auto model = pretrained::load_llama(folder, rng, cpu);
    run(model, folder, words[2]);
  } else if (type == "bert" || type == "roberta") {
    auto model = pretrained::load_bert(folder, rng, cpu);
    run(model, folder, words[2]);
  } else {
    auto model = pretrained::load_gpt(folder, rng, cpu);
    run(model, folder, words[2]);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
