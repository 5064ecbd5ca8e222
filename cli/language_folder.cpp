#include "cli/language_folder.h"

#include <fmt/format.h>

#include <filesystem>

#include "io/weights.h"
#include "report/progress.h"

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

/// Says so where a step would have been one kernel.
void tell_persistent(const pretrained::LoadedLanguageModel& language) {
  const auto* const llama = language.model.get_if<models::Llama>();
  if (!language.model.device().is_cuda() || !llama ||
      std::ranges::none_of(language.sparse, &pretrained::SparseModule::is_sparse))
    return;
  if (const std::string lacks = llama->persistent_lacks(llama->make_cache(1, 1)); !lacks.empty())
    report::tell(fmt::format(
        "tessera: each step runs operator by operator, not as one persistent kernel: {}\n", lacks));
}

/// transformers believes config.json, so its user gets another model.
void tell_stated(const pretrained::LoadedLanguageModel& language) {
  const std::optional<DType> stated = language.config.stated_dtype;
  if (stated.value_or(language.stored) != language.stored)
    report::tell(fmt::format(
        "tessera: the weights in {} are {}, which is taken, though config.json says {}; correct its dtype\n",
        language.folder, name_of(language.stored), pretrained::dtype_name(*stated)));
}

}  // namespace

pretrained::LoadedLanguageModel load_language(const std::string& folder, Device device,
                                              const std::string& dtype,
                                              const std::optional<pretrained::SparseOptions>& sparse,
                                              const nn::TensorParallel& ranks) {
  pretrained::LoadOptions options{.config = {.cola = true}, .ranks = ranks};
  if (!dtype.empty())
    options.dtype = parse_dtype(dtype);
  else if (device.is_cpu())
    options.dtype = DType::f32;
  Rng rng(0);
  pretrained::LoadedLanguageModel language =
      pretrained::load_language(language_folder(folder), rng, device, options, sparse);
  if (dtype.empty() && (!ranks.shares() || ranks.rank() == 0)) tell_stated(language);
  if (!sparse) return language;
  tell_sparse(language.sparse, *sparse);
  tell_persistent(language);
  return language;
}

void check_vocabulary(const pretrained::LoadedLanguageModel& language, std::span<const int32_t> tokens,
                      const std::string& tokenizer) {
  const int64_t size = language.model.vocabulary();
  for (const int32_t token : tokens)
    check(0 <= token && token < size, "model: ", tokenizer, " gives token ", token, ", but the model of ",
          language.folder, " knows ", size, "; they do not belong together");
}

const char* limit_of(const models::LanguageModel& model) {
  const auto* const llama = model.get_if<models::Llama>();
  const bool by_window = llama && llama->config.window > 0 && llama->longest() == llama->config.window;
  return by_window ? "tokens of the sliding window" : "positions";
}

}  // namespace tessera::cli
