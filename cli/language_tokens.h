#pragma once

#include <string>
#include <vector>

#include "cli/language_folder.h"

/// The tokens that commands run a language model on.

namespace tessera::cli {

struct LanguageTokens {
  std::vector<int64_t> ids;
  uint64_t bytes = 0;  // of their text
};

/// The files' text, with an empty line between two files, in one piece, by the model's tokenizer.
LanguageTokens tokens_of_text(const pretrained::LoadedLanguageModel& language,
                              const std::vector<std::string>& files, bool any_bytes);

/// What lies in the shards of a part; their tokenizer, which must be the model's, says how many bytes of text
/// that is. `command` for the messages.
LanguageTokens tokens_of_shards(const char* command, const pretrained::LoadedLanguageModel& language,
                                const std::string& data, const std::string& part);

}  // namespace tessera::cli
