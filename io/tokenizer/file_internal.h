#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/tokenizer/vocabulary_internal.h"

/// Content of a tokenizer's file, parsed but not yet interpreted: the large lists in compact form, the rest
/// as JSON.

namespace tessera::io {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false, single_word = false, lstrip = false, rstrip = false, normalized = false;
  /// What it is found as in a text and decoded to: the content, which the tokenizer's normalizer has passed
  /// through if the token is `normalized`. Set by Tokenizer::Core::index_added.
  std::string text = {};
};

/// Size limit of a tokenizer.json; the larger ones in use have 35 MB.
inline constexpr uint64_t kLargestTokenizer = 64 << 20;
/// Length limit of an added token: looking for them costs that length at each byte. Those in use have less
/// than a hundred bytes.
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

/// What the files next to a vocabulary say about it, as transformers reads them: tokenizer_config.json, and
/// unless it lists its added tokens (added_tokens_decoder), also special_tokens_map.json, which takes
/// precedence, and added_tokens.json.
struct TokenizerConfig {
  std::string path;                                  // of tokenizer_config.json, for messages
  nlohmann::json fields = nlohmann::json::object();  // {} if there is no file
  nlohmann::json added = nlohmann::json::object();   // of added_tokens.json: numbers by token
  /// The text of the token with a role ("eos_token"); none if it has no text or the role is not named.
  std::optional<std::string> token(const std::string& role) const;
  /// The added tokens, in the order of their numbers: those listed, and those with a role, which `find` looks
  /// up in the vocabulary (-1: not there, which is no added token then).
  std::vector<AddedToken> added_tokens(const std::function<int32_t(const std::string&)>& find) const;
};
/// Reads the files of `folder`; "": none.
TokenizerConfig read_tokenizer_config(const std::string& folder);
/// The same for a pair vocab.json and merges.txt: where they do not name the tokenizer's class, it is GPT-2's
/// if config.json names a model that has it, as in transformers.
TokenizerConfig read_pair_config(const std::string& folder);

/// A vocab.json, into the vocabulary of `file`, which has its path.
void parse_vocab_json(TokenizerFile& file, std::string_view text);
/// A tokenizer.json.
TokenizerFile parse_tokenizer_json(const std::string& path, std::string_view text);
/// Adds the tokens of `config` that a tokenizer.json lacks, as transformers 5 does: those with a role, too,
/// also where the vocabulary has them. A token that the vocabulary lacks gets the next free number, whatever
/// number `config` has for it; one that is listed with other flags than in the file takes those.
void add_configured_tokens(TokenizerFile& file, const TokenizerConfig& config);
/// The pair vocab.json and merges.txt; RoBERTa's if it has <s>, </s>, <pad>, <unk> and <mask> (unless
/// `config` says GPT2Tokenizer), else GPT-2's, with bos_token in front where `config` says add_bos_token
/// (OPT).
TokenizerFile parse_vocab_and_merges(const std::string& vocab_path, std::string_view vocab,
                                     const std::string& merges_path, std::string_view merges,
                                     const TokenizerConfig& config = {});
/// BERT's vocab.txt: one token per line.
TokenizerFile parse_vocab_txt(const std::string& path, std::string_view text,
                              const TokenizerConfig& config = {});
/// A post-processor that puts `before` in front of each text and `after` after it (-1: nothing).
nlohmann::json frame_processor(int32_t before, int32_t after);

/// A small JSON file: depth at most 64, no key twice, at most 65,536 values.
nlohmann::json parse_small_json(const std::string& path, std::string_view text);

/// Throws, naming what is wrong, unless the bytes are a SentencePiece model that the library can be trusted
/// with: every length within the file, every piece and the whole table of normalisation sound.
void check_sentencepiece(const std::string& path, std::string_view bytes);

}  // namespace tessera::io
