#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "datasets/tokenize.h"
#include "datasets/tokens.h"

/// The training data of a language model: token shards of two splits, and their tokenizer.

namespace tessera::train {

/// Text files, and where their tokenizer comes from.
struct LanguageText {
  std::vector<std::string> files;
  std::string tokenizer;           // a file or folder as io::Tokenizer::load takes it; "": made of the text
  std::string kind = "character";  // of what is made: bpe, character, byte or bert
  int64_t vocab_size = 1024;       // of bpe and bert
  double validation = 0.1;         // share at the end of each document
  int64_t piece = 0;               // bytes of a document; 0: a whole file
  bool any_bytes = false;          // accept files that are not UTF-8 text (io/text_file.h)
};

/// Turns text into shards and a tokenizer in `folder`. A tokenizer trained on the text has seen the training
/// part only.
datasets::Tokenized write_language_data(const LanguageText& text, const std::string& folder);

/// Both parts, opened.
class LanguageData {
 public:
  /// `shards`: folder of the shards; `tokenizer`: folder of the tokenizer, which must be theirs. `stride`:
  /// that of the training part (datasets::TokenWindowsOptions). There is no validation part if there are no
  /// shards of it. Throws for less than one window of the training part, and for shards whose documents end
  /// with another token than the tokenizer's end token.
  LanguageData(const std::string& shards, const std::string& tokenizer, int64_t length, bool documents,
               int64_t stride = 0);

  const io::Tokenizer& tokenizer() const { return tokenizer_; }
  const datasets::TokenWindows& train() const { return *train_; }
  /// Null if there is none.
  const datasets::TokenWindows* validation() const { return validation_.get(); }
  /// Of the training part: shards with other tokens have another.
  std::string fingerprint() const;
  int64_t length() const { return length_; }
  bool documents() const { return documents_; }

 private:
  io::Tokenizer tokenizer_;
  std::unique_ptr<datasets::TokenWindows> train_, validation_;
  int64_t length_;
  bool documents_;
};

/// Of a resumed run with this run.json: throws if the training part in `folder` is not the one that it began
/// with.
void check_same_data(const nlohmann::json& run, const LanguageData& data, const std::string& folder);

/// Of a run of which nothing is held out: throws if it was evaluated before, or if `flag` ("": none) was
/// given, which needs held-out text. `folder`: of its shards.
void check_not_evaluated(bool before, const std::string& flag, const std::string& folder);

/// The tokens [begin, end) of a part, over its shards.
std::vector<int64_t> read_tokens(const datasets::TokenWindows& windows, uint64_t begin, uint64_t end);
/// Where documents begin among them, counted from `begin`; the first is not one unless it stands there.
std::vector<uint64_t> document_begins(const datasets::TokenWindows& windows, uint64_t begin, uint64_t end);

}  // namespace tessera::train
