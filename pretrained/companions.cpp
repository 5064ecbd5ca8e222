#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "pretrained/companions_internal.h"
#include "pretrained/config.h"

namespace tessera::pretrained {
namespace {

/// What a folder holds besides weights that its user needs.
constexpr const char* kCompanions[] = {"config.json",
                                       "generation_config.json",
                                       "tokenizer.json",
                                       "vocab.json",
                                       "tokenizer_config.json",
                                       "merges.txt",
                                       "vocab.txt",
                                       "special_tokens_map.json",
                                       "tokenizer.model",
                                       "LICENSE",
                                       "added_tokens.json",
                                       "spiece.model",
                                       "chat_template.jinja"};

/// A config.json that says what the weights are now, since loaders believe it, and has no field
/// that was to be ignored, since other programs would not.
std::string adapted(const std::string& config, std::optional<DType> dtype,
                    const std::set<std::string>& ignored) {
  auto fields = nlohmann::ordered_json::parse(config);
  const bool is_new = fields.contains("dtype");
  if (dtype && is_new) fields["dtype"] = dtype_name(*dtype);
  if (dtype && (!is_new || fields.contains("torch_dtype"))) fields["torch_dtype"] = dtype_name(*dtype);
  for (const std::string& field : ignored) {
    fields.erase(field);
    for (const char* const part : {"rope_scaling", "rope_parameters"})
      if (fields.contains(part) && fields[part].is_object()) fields[part].erase(field);
  }
  return fields.dump(2) + "\n";
}

}  // namespace

bool is_file(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

void copy_companions(const std::string& from, const std::string& to, std::optional<DType> dtype,
                     const std::set<std::string>& ignored) {
  constexpr uint64_t kMost = uint64_t{256} << 20;  // of a tokenizer
  for (const char* const name : kCompanions) {
    if (!io::is_folder(from) || !is_file(from + "/" + name)) continue;
    const std::string text = io::read_file(from + "/" + name, kMost);
    const bool other = std::string_view(name) == "config.json" && (dtype || !ignored.empty());
    io::write_file(to + "/" + name, other ? adapted(text, dtype, ignored) : text);
  }
}

}  // namespace tessera::pretrained
