/// From a dense language model to one that runs with compressed weights and gates: a split of the total
/// sparsity is chosen, the model is pruned, calibrated and converted, and what came out is loaded and
/// generates.

#include "sparsity/sparsify.h"

#include <cstdio>
#include <filesystem>

#include "models/generate.h"
#include "sparsity/chain.h"
#include "tessera.h"

using namespace tessera;

int main() {
  namespace fs = std::filesystem;
  const std::string folder = (fs::temp_directory_path() / "tessera_sparsify").string();
  fs::remove_all(folder);
  Rng rng(1);
  models::Llama model({.vocabulary = 64,
                       .positions = 64,
                       .d_model = 64,
                       .d_ff = 160,
                       .heads = 4,
                       .kv_heads = 2,
                       .layers = 2,
                       .dtype = DType::f32},
                      rng, Device::cpu());
  std::vector<int64_t> text;  // counts in steps of 3, which a model of this size learns at once
  for (int64_t i = 0; i < 2000; ++i) text.push_back(3 * i % 64);
  const std::span<const int64_t> tokens(text);
  const Tensor inputs = Tensor::from(tokens.first(512), {8, 64}, Device::cpu()),
               targets = Tensor::from(tokens.subspan(1, 512), {8, 64}, Device::cpu());
  optim::AdamW optimizer(nn::parameters(model), {.lr = 1e-2});
  for (int step = 0; step < 60; ++step) {
    Tape tape;
    tape.backward(model.loss(inputs, targets));
    optimizer.step();
    optimizer.zero_grad();
  }
  pretrained::save(model, folder + "/dense");

  sparsity::SparsifyOptions options{.total = 0.5};
  options.how.model = folder + "/dense";
  options.how.calibration = tokens.first(1000), options.how.evaluation = tokens.subspan(1000);
  options.how.samples = {.count = 8, .length = 64};
  options.how.window = 64, options.how.prompt = 8;
  options.how.gates.greedy = false;
  options.how.device = Device::cpu();
  const sparsity::Sparsified done = sparsity::sparsify(options, folder + "/sparse");
  std::printf(
      "%.2f of the weights, %.2f of the inputs: perplexity %.3f, dense %.3f; %.0f bytes, dense %.0f\n",
      done.split.weights, done.split.activations, done.perplexity, done.dense_perplexity,
      double(done.sparse.bytes), double(done.dense.bytes));

  const pretrained::LoadedLanguageModel loaded =
      sparsity::load(folder + "/sparse", rng, Device::cpu(),
                     {.activation_sparsity = done.split.activations, .greedy = done.greedy});
  const std::vector<int64_t> prompt = {0, 3, 6, 9};
  const std::vector<int64_t> made =
      models::generate(loaded.model, prompt, {.most_tokens = 8, .sampling = {.temperature = 0}});
  for (const int64_t token : made) std::printf("%lld ", static_cast<long long>(token));
  std::printf("\n");
  fs::remove_all(folder);
  // 64 without training; the first token of a text stays unknown.
  return done.dense_perplexity < 2 && done.perplexity < 2 && made.size() == 8 && !loaded.sparse.empty() ? 0
                                                                                                        : 1;
}
