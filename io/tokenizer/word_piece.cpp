#include <algorithm>

#include "io/safetensors_internal.h"
#include "io/tokenizer/model_internal.h"
#include "io/tokenizer/pre_tokenizer_internal.h"
#include "io/tokenizer/unicode_internal.h"
#include "runtime/error.h"

namespace tessera::io {
namespace {

/// A word costs its length times the longest token's; BERT's own limit is 100.
constexpr int64_t kMostCharacters = 10'000;

int32_t unknown_token(const Settings& settings, const Vocabulary& vocabulary) {
  const std::string unknown = settings.text("unk_token");
  const int32_t id = vocabulary.find(unknown);
  check(id >= 0, "tokenizer: ", settings.where(), ".unk_token \"", shown(unknown),
        "\" is not in the vocabulary");
  return id;
}

/// The piece as the vocabulary writes it, in `memory` if that is not the piece itself.
std::string_view word_of(std::string_view piece, bool byte_level, std::string& memory) {
  return byte_level ? std::string_view(memory = to_byte_alphabet(piece)) : piece;
}

}  // namespace

WordPiece::WordPiece(const Settings& settings, const Vocabulary& vocabulary, bool byte_level)
    : vocabulary_(&vocabulary),
      byte_level_(byte_level),
      unknown_(unknown_token(settings, vocabulary)),
      prefix_(settings.text("continuing_subword_prefix", "##")),
      most_characters_(size_t(settings.number("max_input_chars_per_word", 100, 0, kMostCharacters))) {}

void WordPiece::tokenize(std::string_view piece, std::vector<int32_t>& ids) const {
  std::string memory;
  const std::string_view word = word_of(piece, byte_level_, memory);
  if (unicode::count(word) > most_characters_) {
    ids.push_back(unknown_);
    return;
  }
  const size_t first = ids.size();
  std::string token;
  for (size_t begin = 0; begin < word.size();) {
    const std::string_view prefix = begin > 0 ? std::string_view(prefix_) : std::string_view();
    token.assign(prefix).append(word.substr(begin, vocabulary_->longest()));
    // The cut may have fallen inside a character; such a token is in no vocabulary.
    int32_t id = -1;
    while (token.size() > prefix.size() && (id = vocabulary_->find(token)) < 0) token.pop_back();
    if (id < 0) {
      ids.resize(first);
      ids.push_back(unknown_);
      return;
    }
    ids.push_back(id);
    begin += token.size() - prefix.size();
  }
}

WordLevel::WordLevel(const Settings& settings, const Vocabulary& vocabulary, bool byte_level)
    : vocabulary_(&vocabulary), byte_level_(byte_level), unknown_(unknown_token(settings, vocabulary)) {}

void WordLevel::tokenize(std::string_view piece, std::vector<int32_t>& ids) const {
  std::string memory;
  const int32_t id = vocabulary_->find(word_of(piece, byte_level_, memory));
  ids.push_back(id >= 0 ? id : unknown_);
}

TokenModel make_model(const Settings& settings, const Vocabulary& vocabulary, const MergeList& merges,
                      bool byte_level) {
  // Files older than the part "type" have it in the model's other parts; a list of merges is BPE's.
  const std::string type = settings.has("type")                       ? settings.type()
                           : settings.has("max_input_chars_per_word") ? "WordPiece"
                                                                      : "BPE";
  if (type == "BPE") return Bpe(settings, vocabulary, merges, byte_level);
  if (type == "WordPiece") return WordPiece(settings, vocabulary, byte_level);
  if (type == "WordLevel") return WordLevel(settings, vocabulary, byte_level);
  settings.refuse_type("BPE, WordPiece or WordLevel");
}

}  // namespace tessera::io
