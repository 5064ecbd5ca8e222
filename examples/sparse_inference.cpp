#include <cstdio>
#include <filesystem>

#include "tessera.h"

using namespace tessera;

/// Compresses a pruned language model, runs it with a gate on every linear layer, and compares its text with
/// that of the dense model.
int main() {
  namespace fs = std::filesystem;
  const std::string folder = (fs::temp_directory_path() / "tessera_sparse_inference").string();
  fs::remove_all(folder);
  Rng rng(1);
  const models::LlamaConfig config{.vocabulary = 64,
                                   .positions = 64,
                                   .d_model = 64,
                                   .d_ff = 160,
                                   .heads = 4,
                                   .kv_heads = 2,
                                   .layers = 2,
                                   .init_deviation = 0.3,
                                   .dtype = DType::f32};
  models::Llama model(config, rng, Device::cpu());
  // Zeros in the weights, as pruning leaves them: here every second column.
  for (const pretrained::LinearModule& module : pretrained::linear_modules(model).all)
    if (module.ours.starts_with("blocks."))
      module.layer->weight.detach().slice(1, 0, module.layer->in, 2).fill(0);
  pretrained::save(model, folder + "/pruned");
  const pretrained::SparseConversion done =
      pretrained::convert_sparse(folder + "/pruned", folder + "/sparse", ops::SparseFormat::tiled_cbc);
  std::printf("%.0f bytes, %.0f dense\n", double(done.bytes), double(done.dense_bytes));

  models::Llama sparse = pretrained::load_sparse_llama(folder + "/sparse", rng, Device::cpu());
  pretrained::make_sparse(sparse, {.threshold = 0.0});  // leaves out inputs that are zero
  const std::vector<int64_t> prompt = {1, 2, 3};
  const models::GenerateOptions options{.most_tokens = 16, .sampling = {.temperature = 0}};
  const bool same = models::generate(model, prompt, options) == models::generate(sparse, prompt, options);

  pretrained::make_sparse(sparse, {.threshold = 0.5});
  for (const auto& [name, count] : pretrained::count_gates(sparse, {prompt}))
    std::printf("%s: %.0f %% of the inputs left out\n", name.c_str(), 100 * count.sparsity());
  fs::remove_all(folder);
  return same ? 0 : 1;
}
