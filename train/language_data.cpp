#include "train/language_data.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "datasets/ngram.h"
#include "io/file.h"
#include "io/tokenizer/train.h"
#include "runtime/error.h"
#include "runtime/parallel.h"

namespace tessera::train {

namespace fs = std::filesystem;

datasets::Tokenized write_language_data(const LanguageText& text, const std::string& folder) {
  io::make_folder(folder);
  if (!text.tokenizer.empty()) {
    copy_tokenizer(text.tokenizer, folder);
  } else {
    std::vector<std::string> texts;
    for (const std::string& file : text.files) {
      const std::string whole = io::read_file(file, datasets::kLargestText);
      for (const std::string_view piece : datasets::split_pieces(whole, uint64_t(text.piece)))
        texts.emplace_back(datasets::split_text(piece, text.validation).train);
    }
    const std::string json = text.kind == "byte" ? io::byte_tokenizer()
                             : text.kind == "character"
                                 ? io::character_tokenizer(texts)
                                 : io::train_bpe(texts, {.vocab_size = text.vocab_size});
    io::write_file(folder + "/tokenizer.json", json);
    const std::string end = "<|endoftext|>";
    const nlohmann::json roles = {
        {"tokenizer_class", "PreTrainedTokenizerFast"}, {"bos_token", end}, {"eos_token", end}};
    io::write_file(folder + "/tokenizer_config.json", roles.dump(2) + "\n");
  }
  const datasets::Tokenized done = datasets::tokenize_files(
      text.files, io::Tokenizer::load(folder), folder,
      {.validation = text.validation, .piece = text.piece, .workers = cpu_threads()});
  check(text.validation == 0 || done.validation.tokens > 0, "train: the last ", text.validation,
        " of each text is not a whole line, so nothing is held out; give a larger share, or 0");
  return done;
}

void copy_tokenizer(const std::string& from, const std::string& folder) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(from);  // complains of what is none
  const fs::path file = tokenizer.path();
  std::vector<std::string> names = {"tokenizer_config.json", "special_tokens_map.json"};
  if (file.filename() == "vocab.json") names.insert(names.end(), {"vocab.json", "merges.txt"});
  io::make_folder(folder);
  const auto copy = [&](const fs::path& source, const std::string& name) {
    std::error_code ignored;
    if (fs::is_regular_file(source, ignored))
      io::write_file(folder + "/" + name, io::read_file(source.string(), datasets::kLargestText));
  };
  for (const std::string& name : names) copy(file.parent_path() / name, name);
  if (file.filename() == "vocab.json") return;
  copy(file, file.extension() == ".model"  ? "tokenizer.model"
             : file.extension() == ".json" ? "tokenizer.json"
                                           : "vocab.txt");
}

LanguageData::LanguageData(const std::string& shards, const std::string& tokenizer, int64_t length,
                           bool documents, int64_t stride)
    : tokenizer_(io::Tokenizer::load(tokenizer)), length_(length), documents_(documents) {
  datasets::TokenWindowsOptions options{
      .length = length, .documents = documents, .fingerprint = tokenizer_.fingerprint()};
  options.stride = stride;
  train_ = std::make_unique<datasets::TokenWindows>(datasets::shard_paths(shards, "train"), options);
  options.stride = 0;
  if (fs::exists(fs::path(shards) / datasets::shard_name("validation", 0)))
    validation_ =
        std::make_unique<datasets::TokenWindows>(datasets::shard_paths(shards, "validation"), options);
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

namespace {

/// Stretches of tokens that are seen together: documents, or the whole.
std::vector<std::span<const int64_t>> stretches(const std::vector<int64_t>& tokens,
                                                std::vector<uint64_t> begins) {
  begins.push_back(tokens.size());
  std::vector<std::span<const int64_t>> parts;
  uint64_t from = 0;
  for (const uint64_t begin : begins) {
    if (begin > from) parts.push_back(std::span(tokens).subspan(size_t(from), size_t(begin - from)));
    from = begin;
  }
  return parts;
}

}  // namespace

NgramBaseline ngram_baseline(const LanguageData& data, int order, int64_t windows, uint64_t most) {
  datasets::NgramModel model(order, data.tokenizer().vocab_size());
  const uint64_t trained = std::min(most, data.train().tokens());
  const auto part_of = [&](const datasets::TokenWindows& part, uint64_t end, const auto& tokens) {
    return stretches(tokens, data.documents() ? document_begins(part, 0, end) : std::vector<uint64_t>());
  };
  {
    const std::vector<int64_t> tokens = read_tokens(data.train(), 0, trained);
    for (const auto part : part_of(data.train(), trained, tokens)) model.add(part);
  }
  model.finish();
  const uint64_t end = uint64_t(windows) * uint64_t(data.length()) + 1;
  const std::vector<int64_t> tokens = read_tokens(*data.validation(), 0, end);
  double nll = 0;
  uint64_t targets = 0;
  for (const auto part : part_of(*data.validation(), end, tokens)) {
    // The first token of all is no target, nor is that of a document that stands apart.
    for (size_t at = 1; at < part.size(); ++at, ++targets) nll -= model.log_probability(part, at);
  }
  return {.order = order,
          .nll = nll / double(std::max<uint64_t>(1, targets)),
          .trained = trained,
          .ngrams = model.ngrams()};
}

uint64_t validation_bytes(const LanguageData& data, int64_t windows) {
  const uint64_t end = uint64_t(windows) * uint64_t(data.length()) + 1;
  const std::vector<int64_t> tokens = read_tokens(*data.validation(), 1, end);
  return data.tokenizer().decode(std::vector<int32_t>(tokens.begin(), tokens.end())).size();
}

}  // namespace tessera::train
