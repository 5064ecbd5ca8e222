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

/// Trains a tokenizer for a BERT trained from scratch: byte-level BPE of the texts, with BERT's special
/// tokens ([PAD] is 0) and its frame [CLS] a [SEP] b [SEP], types 0 and 1. The same texts give the same
/// bytes; returns the text of a tokenizer.json. bert_tokenizer_config: of the tokenizer_config.json next to
/// it.
std::string train_bert_tokenizer(const std::vector<std::string>& texts, int64_t vocab_size);
std::string bert_tokenizer_config();

/// Copies the files of a tokenizer (a tokenizer.json, a .model, or the folder of one) with the files next to
/// it that belong to it.
void copy_tokenizer(const std::string& from, const std::string& folder);

/// The folder whose tokenizer made the shards in `data`: `data` itself, or `model` ("": none) if no tokenizer
/// lies next to the shards.
std::string tokenizer_folder(const std::string& data, const std::string& model);

/// Copies config.json and generation_config.json of the model that a run starts from to kBaseFolder of
/// `folder`, for export_language; copies nothing if the tokenizer in `folder` is not the model's (by its
/// tokens and end token).
inline constexpr const char* kBaseFolder = "base";
void keep_base_configs(const std::string& model, const std::string& folder);

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

/// The held-out text, predicted in the same way by every model: the targets are the tokens of each stretch
/// from `first` on, and what stands before them is context.
struct HeldOut {
  struct Stretch {
    std::vector<int64_t> tokens;
    int64_t first = 1;
  };
  std::vector<Stretch> stretches;
  int64_t targets = 0;
  /// A stretch is a held-out document after the end of its training part, which serves as context only. Needs
  /// as many documents in both parts, as tokenize_files writes them. Otherwise a stretch is a document if
  /// they are kept apart, or else the whole part.
  bool continued = false;
};
/// The first targets of the validation part, at most `most`, and up to data.length() tokens in front of those
/// of a document that is continued. Empty if there is no such part.
HeldOut held_out(const LanguageData& data, int64_t most);

/// The held-out loss of an n-gram model (datasets::NgramModel) that is trained on the same tokens as the
/// model and predicts the same targets from the same context. Where documents are kept apart, its n-grams do
/// not cross documents.
struct NgramBaseline {
  int order = 0;         // 0: none was computed
  double nll = 0;        // nats per token
  uint64_t trained = 0;  // tokens; fewer than there are if `most` was less
  uint64_t ngrams = 0;   // different ones
};
NgramBaseline ngram_baseline(const LanguageData& data, int order, const HeldOut& held_out, uint64_t most);

/// The text of the targets. Its bytes are what nats per token are divided by to be nats per byte, times the
/// targets.
std::string target_text(const LanguageData& data, const HeldOut& held_out);

}  // namespace tessera::train
