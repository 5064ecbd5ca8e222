#include "train/language_export.h"

#include <cerrno>
#include <nlohmann/json.hpp>

#include "pretrained/load.h"
#include "tests/errors.h"
#include "tests/train/small_language.h"
#include "train/tokenizer_files.h"

namespace tessera::train {
namespace {

using nlohmann::json;

TEST(LanguageExport, IsAFolderThatLoadsAsTheSameModel) {
  for (const bool llama : {false, true}) {
    const TemporaryFolder root;
    const LanguageData data = small_language_data(root);
    LanguageJob session(small_language_job(llama), Device::cpu());
    const std::string folder = root / "model", tokenizer = root / "data";
    export_language(session, data, tokenizer, folder);
    export_language(session, data, tokenizer, folder);  // a second end of the run replaces it
    EXPECT_EQ(io::Tokenizer::load(folder).fingerprint(), data.tokenizer().fingerprint());
    const pretrained::Config config = pretrained::read_config(folder);
    EXPECT_EQ(config.end_tokens, std::vector<int64_t>{*data.tokenizer().special().eos});
    LanguageSettings job = small_language_job(llama);
    job.seed = 5;
    LanguageJob again(job, Device::cpu(), folder), drawn(job, Device::cpu());
    LanguageJob first(small_language_job(llama), Device::cpu());
    const std::vector<int64_t> tokens = read_tokens(data.train(), 0, 17);
    EXPECT_EQ(language_loss(again, tokens), language_loss(first, tokens));
    EXPECT_NE(language_loss(drawn, tokens), language_loss(first, tokens));
  }
}

TEST(LanguageExport, KeepsTheEndTokensOfTheModelThatItBeganWith) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  const std::string base = root / "base", own = root / "data";
  copy_tokenizer(own, base);
  put(root / "base/config.json", R"({"eos_token_id": [0, 5, 7], "bos_token_id": 3})");
  put(root / "base/generation_config.json", R"({"eos_token_id": 9, "top_p": 0.9})");
  keep_base_configs(base, own);
  LanguageJob session(small_language_job(), Device::cpu());
  const std::filesystem::path folder = root / "model";
  export_language(session, data, own, folder.string());
  const pretrained::Config config = pretrained::read_config(folder.string());
  EXPECT_EQ(config.end_tokens, (std::vector<int64_t>{0, 9}));
  EXPECT_EQ(config.first_token, std::optional<int64_t>(3));
  EXPECT_EQ(pretrained::read_config(folder / "config.json").end_tokens, (std::vector<int64_t>{0, 5, 7}));
  // Documents ended with token 0, so the model makes it, whatever ended a text before.
  const json generation = json::parse(get(folder / "generation_config.json"));
  EXPECT_EQ(generation, json::parse(R"({"eos_token_id": [0, 9], "bos_token_id": 0, "top_p": 0.9})"));
}

TEST(LanguageExport, DoesNotKeepTheEndTokensOfAnotherTokenizer) {
  const TemporaryFolder root;
  small_language_data(root);
  const std::string base = root / "base", own = root / "data";
  copy_tokenizer(own, base);
  put(root / "base/config.json", R"({"eos_token_id": [0, 5, 7]})");
  put(root / "base/tokenizer_config.json", R"({"eos_token": "a"})");
  keep_base_configs(base, own);
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(root / "data") / kBaseFolder));
}

TEST(LanguageExport, ReplacesTheOldOneOnlyWhenItIsComplete) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  LanguageJob first(small_language_job(), Device::cpu());
  const std::string folder = root / "model", tokenizer = root / "data";
  export_language(first, data, tokenizer, folder);
  const std::string weights = get(folder + "/model.safetensors"), config = get(folder + "/config.json");
  LanguageSettings job = small_language_job();
  job.seed = 5;
  LanguageJob second(job, Device::cpu());
  for (int failing = 0;; ++failing) {
    int writes = 0;
    io::file_calls().pwrite = [&](int file, const void* from, size_t bytes, off_t offset) -> ssize_t {
      if (writes++ != failing) return ::pwrite(file, from, bytes, offset);
      errno = ENOSPC;
      return -1;
    };
    const std::string error = message_of([&] { export_language(second, data, tokenizer, folder); });
    io::file_calls() = io::FileCalls::system();
    if (error.empty()) break;
    EXPECT_EQ(get(folder + "/model.safetensors"), weights) << failing;
    EXPECT_EQ(get(folder + "/config.json"), config) << failing;
    for (const auto& entry : std::filesystem::directory_iterator(root.path()))
      EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();
  }
  EXPECT_NE(get(folder + "/model.safetensors"), weights);
}

}  // namespace
}  // namespace tessera::train
