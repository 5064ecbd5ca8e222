#include "pretrained/language_model.h"

namespace tessera::pretrained {
namespace {

bool is_llama(const Config& config) {
  return std::holds_alternative<models::LlamaConfig>(config.model);
}

/// Throws for what no model in the folder can do.
void check_options(const std::string& folder, const std::optional<SparseOptions>& sparse) {
  if (!sparse) return;
  const bool has_gates = sparse->gates || sparse->threshold;
  check(sparse->mode != SparseMode::off || !has_gates, "load: gates for ", folder,
        " in the mode off, in which all layers are dense; leave one of the two out");
  check(!sparse->prefill || has_gates, "load: sparse.prefill ", sparse->prefill.value_or(1), " for ", folder,
        " without gates; give activation_sparsity, sparse.gates or sparse.threshold too");
}

}  // namespace

models::LanguageModel load_dense_language(const std::string& folder, const Rng& rng, Device device,
                                          const LoadOptions& options) {
  if (is_llama(read_config(folder, options.config))) return load_llama(folder, rng, device, options);
  return load_gpt(folder, rng, device, options);
}

std::optional<int64_t> LoadedLanguageModel::first_token() const {
  const std::optional<int64_t> first = config.first_token;
  return first && 0 <= *first && *first < model.vocabulary() ? first : std::nullopt;
}

LoadedLanguageModel load_language(const std::string& folder, const Rng& rng, Device device,
                                  const LoadOptions& options, const std::optional<SparseOptions>& sparse) {
  check_options(folder, sparse);
  Config config = read_config(folder, options.config);
  const bool runs_sparse = sparse && sparse->mode != SparseMode::off;
  check(!runs_sparse || !config.cola, "model: the weights in ", folder,
        " are factors (cola), which have no compressed form; leave the flags of sparse inference out");
  check(!std::holds_alternative<models::BertConfig>(config.model), "model: ", folder, " holds a ",
        config.type,
        ", which does not predict the next token; expected gpt2, opt, llama, mistral, qwen2, qwen3, phi3 or "
        "arcee");
  check(!options.ranks.shares() || !is_sparse_folder(folder), "model: the layers in ", folder,
        " are compressed, which ranks cannot share out; make it dense (tessera convert), or run it on one "
        "rank");
  if (runs_sparse) check_sparse(folder, *sparse);
  const auto load = [&]() -> models::LanguageModel {
    if (!is_sparse_folder(folder)) return load_dense_language(folder, rng, device, options);
    if (is_llama(config)) return load_sparse_llama(folder, rng, device, options, !runs_sparse);
    return load_sparse_gpt(folder, rng, device, options, !runs_sparse);
  };
  models::LanguageModel model = load();
  LoadedLanguageModel loaded{folder, std::move(config), std::move(model), stored_dtype(folder)};
  if (runs_sparse) loaded.sparse = make_sparse(loaded.model, *sparse, folder);
  return loaded;
}

void save(const models::LanguageModel& model, const std::string& folder, const SaveOptions& options) {
  model.visit([&](const auto& held) { save(held, folder, options); });
}

}  // namespace tessera::pretrained
