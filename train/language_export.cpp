#include "train/language_export.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "train/tokenizer_files.h"

namespace tessera::train {

using nlohmann::json;

namespace {

/// Puts token ids of the end and the beginning into a config.json or generation_config.json. End tokens that
/// it has stay, and `eos` comes first if it is not among them; a beginning stays.
void add_token_ids(json& config, const io::SpecialTokens& special) {
  const auto missing = [&](const char* key) { return !config.contains(key) || config[key].is_null(); };
  if (special.eos) {
    json ends = missing("eos_token_id")             ? json::array()
                : config["eos_token_id"].is_array() ? config["eos_token_id"]
                                                    : json::array({config["eos_token_id"]});
    if (std::ranges::find(ends, json(*special.eos)) == ends.end()) {
      ends.insert(ends.begin(), *special.eos);
      config["eos_token_id"] = ends.size() == 1 ? ends[0] : ends;
    }
  }
  if (missing("bos_token_id") && (special.bos || special.eos))
    config["bos_token_id"] = special.bos ? *special.bos : *special.eos;
}

/// The JSON of a file; null if it is not there.
json read_json(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return nullptr;
  return json::parse(io::read_file(path, 1 << 20));
}

}  // namespace

void export_language(LanguageJob& job, const LanguageData& data, const std::string& tokenizer,
                     const std::string& folder) {
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::replace);
  job.save(files.path());
  copy_tokenizer(tokenizer, files.path());
  const io::SpecialTokens& special = data.tokenizer().special();
  const std::string base = tokenizer + "/" + kBaseFolder;  // keep_base_configs
  json config = read_json(files.path() + "/config.json"),
       generation = read_json(base + "/generation_config.json");
  if (const json of_base = read_json(base + "/config.json"); of_base.is_object())
    for (const char* const key : {"bos_token_id", "eos_token_id"})
      if (of_base.contains(key)) config[key] = of_base[key];
  add_token_ids(config, special);
  io::write_file(files.path() + "/config.json", config.dump(2) + "\n");
  if (generation.is_object()) {
    add_token_ids(generation, special);
    io::write_file(files.path() + "/generation_config.json", generation.dump(2) + "\n");
  }
  files.publish();
}

}  // namespace tessera::train
