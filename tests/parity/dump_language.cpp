#include <cstdio>

#include "eval/perplexity.h"
#include "tests/parity/language_run.h"

using namespace tessera;

/// Runs a model that transformers wrote and writes what it computes, for transformers to repeat:
///   dump_language FOLDER OUT.safetensors
/// FOLDER has config.json, weights and batch.safetensors; see language_run.h. The weights as loaded are saved
/// again into FOLDER/saved (one file) and FOLDER/sharded (several). Of causal models also what three prompts
/// of different lengths give together (generated.0, ...), and of all tokens of the batches as one text the
/// mean negative log-likelihood (nats) by windows of 7, and sliding: windows of 7, the last 3 predicted.

namespace {

template <class Model>
io::NamedTensors inference(const Model& model, const std::string& folder) {
  const parity::Batches batches(folder);
  const Tensor all = batches.tensors.at("tokens");
  const auto text = all.packed().reshape({all.count()}).template to_vector<int64_t>();
  models::Generator::Texts prompts;
  for (const auto& [row, length] : {std::pair<int64_t, int64_t>{0, 4}, {1, 1}, {2, 6}}) {
    const auto tokens = all.select(0, 0).select(0, row).template to_vector<int64_t>();
    prompts.emplace_back(tokens.begin(), tokens.begin() + length);
  }
  io::NamedTensors results;
  const auto texts =
      models::Generator(model, 3, 14)(prompts, {.most_tokens = 8, .sampling = {.temperature = 0}});
  for (size_t b = 0; b < texts.size(); ++b)
    results.emplace_back("generated." + std::to_string(b), Tensor::from(texts[b], {8}));
  std::vector<double> nats;
  for (const int64_t stride : {0, 3})
    nats.push_back(eval::measure_perplexity(model,
                                            eval::perplexity_windows(text, {.length = 7, .stride = stride}),
                                            Device::cpu(), 8)
                       .nats);
  results.emplace_back("nats", Tensor::from(nats, {2}));
  return results;
}

template <class Model>
void dump(const Model& model, const std::string& folder, const std::string& out) {
  pretrained::save(model, folder + "/saved");
  pretrained::save(model, folder + "/sharded", {.shard_bytes = 20'000});
  io::NamedTensors results;
  if constexpr (!std::is_same_v<Model, models::Bert>) results = inference(model, folder);
  for (auto& result : parity::run(model, folder)) results.push_back(std::move(result));
  io::save_safetensors(out, results);
}

}  // namespace

int main(int count, char** words) try {
  if (count != 3) {
    std::fprintf(stderr, "usage: dump_language FOLDER OUT.safetensors\n");
    return 2;
  }
  const std::string folder = words[1], out = words[2];
  Rng rng(1);
  const Device cpu = Device::cpu();
  const auto model = pretrained::read_config(folder).model;
  if (std::holds_alternative<models::LlamaConfig>(model))
    dump(pretrained::load_llama(folder, rng, cpu), folder, out);
  else if (std::holds_alternative<models::BertConfig>(model))
    dump(pretrained::load_bert(folder, rng, cpu), folder, out);
  else
    dump(pretrained::load_gpt(folder, rng, cpu), folder, out);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
