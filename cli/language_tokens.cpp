#include "cli/language_tokens.h"

#include "cli/commands.h"
#include "datasets/tokenize.h"
#include "datasets/tokens.h"
#include "io/text_file.h"
#include "train/tokenizer_files.h"

namespace tessera::cli {

LanguageTokens tokens_of_text(const pretrained::LoadedLanguageModel& language,
                              const std::vector<std::string>& files, bool any_bytes) {
  std::string text;
  for (const std::string& path : files) {
    if (!text.empty()) text += "\n\n";
    text += io::read_text(path, datasets::kLargestText, any_bytes);
  }
  const io::Tokenizer tokenizer = io::Tokenizer::load(language.folder);
  const std::vector<int32_t> ids = tokenizer.encode(text).ids;
  check_vocabulary(language, ids, tokenizer.path());
  tell_invalid(io::invalid_bytes(text), text.size());
  return {{ids.begin(), ids.end()}, text.size()};
}

LanguageTokens tokens_of_shards(const char* command, const pretrained::LoadedLanguageModel& language,
                                const std::string& data, const std::string& part) {
  LanguageTokens tokens;
  std::vector<int32_t> ids;
  std::string fingerprint;
  for (const std::string& path : datasets::shard_paths(data, part)) {
    const datasets::TokenShard shard(path);
    check(fingerprint.empty() || fingerprint == shard.info().fingerprint, command, ": ", path,
          " was made by another tokenizer than the shards before it");
    fingerprint = shard.info().fingerprint;
    const size_t before = tokens.ids.size();
    tokens.ids.resize(before + shard.info().tokens);
    shard.read(0, std::span(tokens.ids).subspan(before));
  }
  const io::Tokenizer tokenizer = io::Tokenizer::load(train::tokenizer_folder(data, language.folder));
  check(tokenizer.fingerprint() == fingerprint, command, ": the shards of ", data,
        " were not made by the tokenizer ", tokenizer.path());
  const std::string own = io::Tokenizer::load(language.folder).fingerprint();
  check(own == fingerprint, command, ": the shards of ", data, " come from the tokenizer ", fingerprint,
        ", the model in ", language.folder, " has ", own, ": tokenize the text again, with the model's");
  ids.assign(tokens.ids.begin(), tokens.ids.end());
  check_vocabulary(language, ids, tokenizer.path());
  tokens.bytes = tokenizer.decode(ids).size();
  return tokens;
}

}  // namespace tessera::cli
