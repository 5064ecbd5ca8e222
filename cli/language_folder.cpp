#include "cli/language_folder.h"

#include <fmt/format.h>

#include <filesystem>

#include "io/weights.h"
#include "pretrained/load.h"
#include "train/progress.h"

namespace tessera::cli {
namespace {

/// Whether the run trained several seeds, each of which has a folder of its own there.
bool has_seeds(const std::string& run) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(run, ignored))
    if (entry.path().filename().string().starts_with("seed-") && entry.is_directory(ignored)) return true;
  return false;
}

}  // namespace

std::string language_folder(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  check(fs::is_directory(folder, ignored), "model: there is no folder ", folder);
  io::check_no_adapter(folder);
  for (const fs::path& path : {fs::path(folder), fs::path(folder) / "model"})
    if (fs::is_regular_file(path / "config.json", ignored)) return path.string();
  const bool is_run = fs::is_regular_file(fs::path(folder) / "run.json", ignored);
  check(!is_run || !has_seeds(folder), "model: ", folder,
        " is a run of several seeds, each with a model of its own; name the folder of one, ", folder,
        "/seed-*");
  fail_at(Site::here(), "model: ", folder, is_run ? " is a run without an export" : " has no config.json",
          is_run ? "; a run writes its model when it has finished (fine-tuning with --save-model)"
                 : "; expected a Hugging Face model directory, or the folder of a finished run");
}

namespace {

using LanguageModel = std::variant<models::Gpt, models::Llama>;

LanguageModel load_model(const std::string& path, const pretrained::Config& config, Rng& rng, Device device,
                         const pretrained::LoadOptions& options, bool dense) {
  const bool is_llama = std::holds_alternative<models::LlamaConfig>(config.model);
  if (pretrained::is_sparse_folder(path))
    return is_llama ? LanguageModel(pretrained::load_sparse_llama(path, rng, device, options, dense))
                    : LanguageModel(pretrained::load_sparse_gpt(path, rng, device, options, dense));
  return is_llama ? LanguageModel(pretrained::load_llama(path, rng, device, options))
                  : LanguageModel(pretrained::load_gpt(path, rng, device, options));
}

/// Says so where a step would have been one kernel.
void tell_persistent(const std::vector<pretrained::SparseModule>& modules, const LanguageModel& model,
                     Device device) {
  const auto* const llama = std::get_if<models::Llama>(&model);
  if (!device.is_cuda() || !llama || std::ranges::none_of(modules, &pretrained::SparseModule::is_sparse))
    return;
  if (const std::string lacks = llama->persistent_lacks(llama->make_cache(1, 1)); !lacks.empty())
    train::tell(fmt::format(
        "tessera: each step runs operator by operator, not as one persistent kernel: {}\n", lacks));
}

/// transformers believes config.json, so its user gets another model.
void tell_stated(const std::string& path, const pretrained::Config& config, DType stored) {
  if (config.stated_dtype.value_or(stored) != stored)
    train::tell(fmt::format(
        "tessera: the weights in {} are {}, which is taken, though config.json says {}; correct its dtype\n",
        path, name_of(stored), pretrained::dtype_name(*config.stated_dtype)));
}

}  // namespace

LanguageFolder load_language(const std::string& folder, Device device, const std::string& dtype,
                             const std::optional<pretrained::SparseOptions>& sparse,
                             const nn::TensorParallel& ranks) {
  const std::string path = language_folder(folder);
  pretrained::Config config = pretrained::read_config(path, {.cola = true});
  check(!sparse || !config.cola, "model: the weights in ", path,
        " are factors (cola), which have no compressed form; leave the flags of sparse inference out");
  check(!std::holds_alternative<models::BertConfig>(config.model), "model: ", path, " holds a ", config.type,
        ", which does not predict the next token; expected gpt2, opt, llama, mistral, qwen2, qwen3, phi3 or "
        "arcee");
  check(!ranks.shares() || !pretrained::is_sparse_folder(path), "model: the layers in ", path,
        " are compressed, which ranks cannot share out; make it dense (tessera convert), or run it on one "
        "rank");
  pretrained::LoadOptions options{.config = {.cola = true}, .ranks = ranks};
  const DType stored = pretrained::stored_dtype(path);
  if (dtype.empty() && (!ranks.shares() || ranks.rank() == 0)) tell_stated(path, config, stored);
  if (!dtype.empty())
    options.dtype = parse_dtype(dtype);
  else if (device.is_cpu())
    options.dtype = DType::f32;
  if (sparse) pretrained::check_sparse(path, *sparse);
  auto rng = std::make_unique<Rng>(0);
  LanguageModel model = load_model(path, config, *rng, device, options, !sparse);
  LanguageFolder language{path, std::move(config), std::move(rng), std::move(model), stored};
  if (!sparse) return language;
  language.sparse =
      std::visit([&](auto& held) { return pretrained::make_sparse(held, *sparse, path); }, language.model);
  tell_sparse(language.sparse, *sparse);
  tell_persistent(language.sparse, language.model, device);
  return language;
}

void check_vocabulary(const LanguageFolder& language, std::span<const int32_t> tokens,
                      const std::string& tokenizer) {
  const int64_t size = vocabulary_of(language);
  for (const int32_t token : tokens)
    check(0 <= token && token < size, "model: ", tokenizer, " gives token ", token, ", but the model of ",
          language.path, " knows ", size, "; they do not belong together");
}

int64_t vocabulary_of(const LanguageFolder& language) {
  return std::visit([](const auto& model) { return model.config.vocabulary; }, language.model);
}
std::optional<int64_t> first_token_of(const LanguageFolder& language) {
  const std::optional<int64_t> first = language.config.first_token;
  return first && 0 <= *first && *first < vocabulary_of(language) ? first : std::nullopt;
}
int64_t longest_of(const LanguageFolder& language) {
  return std::visit([](const auto& model) { return model.longest(); }, language.model);
}
const char* limit_of(const LanguageFolder& language) {
  const auto* const llama = std::get_if<models::Llama>(&language.model);
  const bool by_window = llama && llama->config.window > 0 && llama->longest() == llama->config.window;
  return by_window ? "tokens of the sliding window" : "positions";
}
DType dtype_of(const LanguageFolder& language) {
  return std::visit([](const auto& model) { return model.config.dtype; }, language.model);
}

}  // namespace tessera::cli
