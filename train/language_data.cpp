#include "train/language_data.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/checksum.h"
#include "io/file.h"
#include "io/text_file.h"
#include "io/tokenizer/train.h"
#include "runtime/error.h"
#include "runtime/parallel.h"
#include "train/tokenizer_files.h"

namespace tessera::train {

namespace fs = std::filesystem;

namespace {

/// Of a tokenizer for language models: one special token.
std::string language_tokenizer_config() {
  const std::string end = "<|endoftext|>";
  const nlohmann::json roles = {
      {"tokenizer_class", "PreTrainedTokenizerFast"}, {"bos_token", end}, {"eos_token", end}};
  return roles.dump(2) + "\n";
}

}  // namespace

datasets::Tokenized write_language_data(const LanguageText& text, const std::string& folder) {
  io::make_folder(folder);
  if (!text.tokenizer.empty()) {
    copy_tokenizer(text.tokenizer, folder);
  } else {
    std::vector<std::string> texts;
    for (const std::string& file : text.files) {
      const std::string whole = io::read_text(file, datasets::kLargestText, text.any_bytes);
      for (const std::string_view piece : datasets::split_pieces(whole, uint64_t(text.piece)))
        texts.emplace_back(datasets::split_text(piece, text.validation).train);
    }
    const std::string json = text.kind == "byte"        ? io::byte_tokenizer()
                             : text.kind == "character" ? io::character_tokenizer(texts)
                             : text.kind == "bert"      ? train_bert_tokenizer(texts, text.vocab_size)
                                                   : io::train_bpe(texts, {.vocab_size = text.vocab_size});
    io::write_file(folder + "/tokenizer.json", json);
    io::write_file(folder + "/tokenizer_config.json",
                   text.kind == "bert" ? bert_tokenizer_config() : language_tokenizer_config());
  }
  const datasets::Tokenized done = datasets::tokenize_files(text.files, io::Tokenizer::load(folder), folder,
                                                            {.validation = text.validation,
                                                             .piece = text.piece,
                                                             .workers = cpu_threads(),
                                                             .any_bytes = text.any_bytes});
  check(text.validation == 0 || done.validation.tokens > 0,
        "train: nothing is held out: no line, nor in a text of one line a word, begins in the last ",
        text.validation, " of any ",
        text.piece > 0 ? "--piece of " + std::to_string(text.piece) + " bytes; give a larger --piece or"
                       : std::string("text; give a larger"),
        " --validation, or 0, or break the text into lines");
  return done;
}

namespace {

void check_end_token(const datasets::TokenWindows& windows, const io::Tokenizer& tokenizer,
                     const std::string& folder) {
  const int64_t own = tokenizer.special().eos.value_or(-1);
  for (const datasets::TokenShard& shard : windows.shards()) {
    const int64_t end = shard.info().end_token;
    check(end < 0 || end == own, "train: documents in the shards of ", folder, " end with token ", end,
          ", but the end token of the tokenizer ", tokenizer.path(), " is ",
          own < 0 ? "missing" : std::to_string(own),
          "; give the tokenizer that made them, with its tokenizer_config.json, or tokenize the text again");
  }
}

}  // namespace

LanguageData::LanguageData(const std::string& shards, const std::string& tokenizer, int64_t length,
                           bool documents, int64_t stride)
    : tokenizer_(io::Tokenizer::load(tokenizer)), length_(length), documents_(documents) {
  datasets::TokenWindowsOptions options{
      .length = length, .documents = documents, .fingerprint = tokenizer_.fingerprint()};
  options.stride = stride;
  train_ = std::make_unique<datasets::TokenWindows>(datasets::shard_paths(shards, "train"), options);
  check_end_token(*train_, tokenizer_, shards);
  options.length = 1, options.stride = 0;  // of what is held out, windows are cut elsewhere: held_out()
  if (fs::exists(fs::path(shards) / datasets::shard_name("validation", 0)))
    validation_ =
        std::make_unique<datasets::TokenWindows>(datasets::shard_paths(shards, "validation"), options);
  if (validation_) check_end_token(*validation_, tokenizer_, shards);
}

std::string LanguageData::fingerprint() const {
  io::Xxh3 hash;
  for (const datasets::TokenShard& shard : train_->shards()) hash.add(shard.info().digest);
  return hash.digits();
}

void check_same_data(const nlohmann::json& run, const LanguageData& data, const std::string& folder) {
  const auto began = run.find("data");  // runs of before lack it
  check(began == run.end() || began->value("fingerprint", "") == data.fingerprint(),
        "train: the training shards in ", folder,
        " are not those that the run began with; restore them, or start a new run");
}

void check_not_evaluated(bool before, const std::string& flag, const std::string& folder) {
  check(!before,
        "train: the run was evaluated on held-out text, but there are no validation shards any more in ",
        folder, "; restore them, or start a new run");
  check(flag.empty(), "train: nothing is held out, so ", flag,
        " has nothing to evaluate; give a --validation share, or leave it out");
}

namespace {

/// Calls f(shard, its first token among all, begin, end) for the shards that hold tokens of [begin, end).
template <class F>
void for_each_shard(const datasets::TokenWindows& windows, uint64_t begin, uint64_t end, F&& f) {
  uint64_t first = 0;
  for (const datasets::TokenShard& shard : windows.shards()) {
    const uint64_t last = first + shard.info().tokens;
    if (first < end && last > begin) f(shard, first, std::max(begin, first), std::min(end, last));
    first = last;
  }
}

}  // namespace

std::vector<int64_t> read_tokens(const datasets::TokenWindows& windows, uint64_t begin, uint64_t end) {
  std::vector<int64_t> tokens(size_t(end - begin));
  for_each_shard(windows, begin, end,
                 [&](const datasets::TokenShard& shard, uint64_t first, uint64_t from, uint64_t to) {
                   shard.read(from - first,
                              std::span(tokens).subspan(size_t(from - begin), size_t(to - from)));
                 });
  return tokens;
}

std::vector<uint64_t> document_begins(const datasets::TokenWindows& windows, uint64_t begin, uint64_t end) {
  std::vector<uint64_t> begins;
  for_each_shard(windows, begin, end,
                 [&](const datasets::TokenShard& shard, uint64_t first, uint64_t from, uint64_t to) {
                   if (from == first) begins.push_back(from - begin);
                   for (const uint64_t border : shard.borders(from - first, to - first))
                     begins.push_back(border + first - begin);
                 });
  return begins;
}

}  // namespace tessera::train
