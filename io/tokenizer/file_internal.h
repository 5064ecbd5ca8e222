#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/tokenizer/vocabulary_internal.h"

/// What a tokenizer's file says, read but not yet understood: the large lists in compact form, the rest as
/// JSON.

namespace tessera::io {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false, single_word = false, lstrip = false, rstrip = false, normalized = false;
};

/// The larger ones in use have 35 MB.
inline constexpr uint64_t kLargestTokenizer = 64 << 20;
/// Looking for added tokens costs their length at each byte; those in use have less than a hundred.
inline constexpr size_t kLongestAdded = 1024;

/// Pairs of tokens by their rank, as texts.
class MergeList {
 public:
  void add(std::string_view left, std::string_view right) {
    bytes_ += left, ends_.push_back(uint32_t(bytes_.size()));
    bytes_ += right, ends_.push_back(uint32_t(bytes_.size()));
  }
  size_t size() const { return ends_.size() / 2; }
  std::string_view left(size_t rank) const { return part(2 * rank); }
  std::string_view right(size_t rank) const { return part(2 * rank + 1); }

 private:
  std::string_view part(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return std::string_view(bytes_).substr(begin, ends_[i] - begin);
  }
  std::string bytes_;
  std::vector<uint32_t> ends_;
};

struct TokenizerFile {
  std::string path;
  nlohmann::json settings;  // without added_tokens, model.vocab and model.merges
  Vocabulary vocabulary;
  MergeList merges;
  std::vector<AddedToken> added;
  bool has_vocabulary = false;
};

/// A vocab.json, into the vocabulary of `file`, which has its path.
void parse_vocab_json(TokenizerFile& file, std::string_view text);
/// A tokenizer.json.
TokenizerFile parse_tokenizer_json(const std::string& path, std::string_view text);
/// The pair vocab.json and merges.txt; RoBERTa's if it has <s>, </s>, <pad>, <unk> and <mask>, else GPT-2's.
TokenizerFile parse_vocab_and_merges(const std::string& vocab_path, std::string_view vocab,
                                     const std::string& merges_path, std::string_view merges);
/// BERT's vocab.txt: a token a line.
TokenizerFile parse_vocab_txt(const std::string& path, std::string_view text, bool lower_case);

/// A small JSON file: depth at most 64, no key twice, at most 65,536 values.
nlohmann::json parse_small_json(const std::string& path, std::string_view text);

/// Throws, naming what is wrong, unless the bytes are a SentencePiece model that the library can be trusted
/// with: every length within the file, every piece and the whole table of normalisation sound.
void check_sentencepiece(const std::string& path, std::string_view bytes);

}  // namespace tessera::io
