#include "train/language_sizes.h"

#include <algorithm>
#include <span>

#include "runtime/error.h"

namespace tessera::train {

namespace {

struct ModelSize {
  const char* name;
  int64_t layers, d_model, heads, d_ff;
};
constexpr ModelSize kGptSizes[] = {{"demo", 4, 128, 4, 512},
                                   {"small", 12, 768, 12, 3072},
                                   {"medium", 24, 1024, 16, 4096},
                                   {"large", 36, 1280, 20, 5120},
                                   {"xl", 48, 1600, 25, 6400}};
constexpr ModelSize kLlamaSizes[] = {{"demo", 4, 128, 4, 344},    {"60m", 8, 512, 8, 1376},
                                     {"130m", 12, 768, 12, 2048}, {"350m", 24, 1024, 16, 2736},
                                     {"1b", 24, 2048, 32, 5461},  {"7b", 32, 4096, 32, 11008}};

std::span<const ModelSize> sizes_of(bool llama) {
  return llama ? std::span<const ModelSize>(kLlamaSizes) : std::span<const ModelSize>(kGptSizes);
}

}  // namespace

std::vector<std::string> size_names(bool llama) {
  std::vector<std::string> names;
  for (const ModelSize& size : sizes_of(llama)) names.push_back(size.name);
  return names;
}

void apply_size(plan::LanguageConfig& config, const std::string& name) {
  const auto sizes = sizes_of(std::holds_alternative<models::LlamaConfig>(config));
  const auto found =
      std::find_if(sizes.begin(), sizes.end(), [&](const ModelSize& s) { return s.name == name; });
  check(found != sizes.end(), "there is no size \"", name, "\"");
  std::visit(
      [&](auto& model) {
        model.layers = found->layers, model.d_model = found->d_model;
        model.heads = found->heads, model.d_ff = found->d_ff;
        if constexpr (requires { model.kv_heads; }) model.kv_heads = found->heads;
        // 0.02 is for widths near 1,000: there it is about 1 / sqrt(d_model), which narrow models need too.
        if (name == "demo") model.init_deviation = 0.1;
      },
      config);
}

}  // namespace tessera::train
