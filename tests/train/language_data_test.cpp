#include "train/language_data.h"

#include <nlohmann/json.hpp>

#include "io/tokenizer/train.h"
#include "tests/errors.h"
#include "tests/train/small_language.h"
#include "train/tokenizer_files.h"

namespace tessera::train {
namespace {

TEST(LanguageData, PartsOfEachTextAndATokenizerThatHasSeenTheFirstOnly) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  ASSERT_NE(data.validation(), nullptr);
  const uint64_t bytes = language_text(60).size() + language_text(9).size();
  EXPECT_EQ(data.train().tokens() + data.validation()->tokens(), bytes + 4);  // two ends in each part
  const auto begins = document_begins(data.train(), 0, data.train().tokens());
  ASSERT_EQ(begins.size(), 2u);
  EXPECT_EQ(begins[0], 0u);
  const auto tokens = read_tokens(data.train(), begins[1] - 1, begins[1] + 1);
  EXPECT_EQ(tokens[0], *data.tokenizer().special().eos);
  // A character that stands in the held-out part alone is no token of its own.
  const std::string own = root / "own";
  std::ofstream(root / "c.txt") << "abc abc abc abc\nabc abc\nabc xyz\n";
  write_language_data({.files = {root / "c.txt"}, .tokenizer = {}, .validation = 0.3}, own);
  EXPECT_TRUE(io::Tokenizer::load(own).id_of("a").has_value());
  EXPECT_FALSE(io::Tokenizer::load(own).id_of("x").has_value());
  EXPECT_EQ(io::Tokenizer::load(own).decode(io::Tokenizer::load(own).encode("x").ids), "x");
}

TEST(LanguageData, RefusesShardsOfAnotherTokenizer) {
  const TemporaryFolder root;
  small_language_data(root);
  const std::string other = root / "other";
  write_language_data({.files = {root / "a.txt"}, .tokenizer = {}}, other);
  const std::string error = message_of([&] { LanguageData(root / "data", other, 16, false); });
  EXPECT_NE(error.find("fingerprint"), std::string::npos) << error;
}

TEST(LanguageData, RefusesATokenizerWithAnotherEndToken) {
  const TemporaryFolder root;
  put(root / "t.json", io::byte_tokenizer({"<|endoftext|>", "<end>"}));
  std::ofstream(root / "a.txt") << language_text(60);
  write_language_data({.files = {root / "a.txt"}, .tokenizer = root / "t.json"}, root / "data");
  put(root / "data/tokenizer_config.json", R"({"eos_token": "<end>"})");
  const std::string error = message_of([&] { small_language_data(root); });
  EXPECT_NE(error.find("end with token 0"), std::string::npos) << error;
  EXPECT_NE(
      error.find("tokenizer.json is " + std::to_string(*io::Tokenizer::load(root / "data").special().eos)),
      std::string::npos)
      << error;
}

TEST(LanguageData, ComesFromTheModelsTokenizerIfNoneLiesNextToTheShards) {
  const TemporaryFolder root;
  small_language_data(root);
  const std::string data = root / "data", model = root / "model";
  copy_tokenizer(data, model);
  EXPECT_EQ(tokenizer_folder(data, model), data);
  std::filesystem::remove(root / "data/tokenizer.json");
  EXPECT_EQ(tokenizer_folder(data, model), model);
  EXPECT_EQ(tokenizer_folder(data, ""), data);
}

}  // namespace
}  // namespace tessera::train
