#include "train/language_data.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "datasets/ngram.h"
#include "io/checksum.h"
#include "io/file.h"
#include "io/text_file.h"
#include "io/tokenizer/train.h"
#include "runtime/error.h"
#include "runtime/parallel.h"

namespace tessera::train {

namespace fs = std::filesystem;

std::string train_bert_tokenizer(const std::vector<std::string>& texts, int64_t vocab_size) {
  const std::vector<std::string> special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
  nlohmann::ordered_json file =
      nlohmann::ordered_json::parse(io::train_bpe(texts, {.vocab_size = vocab_size, .special = special}));
  file["post_processor"] = {{"type", "BertProcessing"}, {"sep", {"[SEP]", 3}}, {"cls", {"[CLS]", 2}}};
  return file.dump(1) + "\n";
}

std::string bert_tokenizer_config() {
  return nlohmann::json{
             {"tokenizer_class", "PreTrainedTokenizerFast"},
             {"pad_token", "[PAD]"},
             {"unk_token", "[UNK]"},
             {"cls_token", "[CLS]"},
             {"sep_token", "[SEP]"},
             {"mask_token", "[MASK]"},
             // The second text of a pair has the type 1; transformers 5 leaves types out unless asked.
             {"model_input_names", {"input_ids", "token_type_ids", "attention_mask"}}}
             .dump(2) +
         "\n";
}

namespace {

constexpr uint64_t kLargestConfig = 1 << 20;

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

void copy_tokenizer(const std::string& from, const std::string& folder) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(from);  // complains of what is none
  const fs::path file = tokenizer.path();
  std::vector<std::string> names = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                                    "chat_template.jinja"};
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

std::string tokenizer_folder(const std::string& data, const std::string& model) {
  return io::Tokenizer::is_in(data) || model.empty() ? data : model;
}

void keep_base_configs(const std::string& model, const std::string& folder) {
  if (!io::Tokenizer::is_in(model)) return;
  const io::Tokenizer base = io::Tokenizer::load(model), own = io::Tokenizer::load(folder);
  if (base.fingerprint() != own.fingerprint() || base.special().eos != own.special().eos) return;
  const fs::path to = fs::path(folder) / kBaseFolder;
  io::make_folder(to.string());
  for (const char* const name : {"config.json", "generation_config.json"}) {
    std::error_code ignored;
    const fs::path file = fs::path(model) / name;
    if (fs::is_regular_file(file, ignored))
      io::write_file((to / name).string(), io::read_file(file.string(), kLargestConfig));
  }
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

namespace {

/// The position after the last token of each document, the empty ones too.
std::vector<uint64_t> document_ends(const datasets::TokenWindows& windows) {
  std::vector<uint64_t> ends;
  uint64_t first = 0;
  for (const datasets::TokenShard& shard : windows.shards()) {
    for (const uint64_t end : shard.ends()) ends.push_back(first + end);
    first += shard.info().tokens;
  }
  return ends;
}

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

HeldOut held_out(const LanguageData& data, int64_t most) {
  HeldOut out;
  if (!data.validation()) return out;
  const datasets::TokenWindows &train = data.train(), &validation = *data.validation();
  std::vector<uint64_t> ends = document_ends(validation);
  const std::vector<uint64_t> train_ends = document_ends(train);
  out.continued = ends.size() == train_ends.size();
  if (!out.continued && !data.documents()) ends = {validation.tokens()};
  uint64_t begin = 0;
  for (size_t i = 0; i < ends.size() && out.targets < most; begin = ends[i], ++i) {
    HeldOut::Stretch stretch;
    if (out.continued && ends[i] > begin) {
      // The training part does not end with the text, which goes on in the validation part.
      const uint64_t first = i ? train_ends[i - 1] : 0, last = train_ends[i];
      const uint64_t ended = last > first && train.shards().front().info().end_token >= 0 ? 1 : 0;
      const uint64_t context = std::min(last - first - ended, uint64_t(data.length()));
      stretch.tokens = read_tokens(train, last - ended - context, last - ended);
    }
    // A token with nothing before it is no target.
    stretch.first = std::max<int64_t>(1, int64_t(stretch.tokens.size()));
    const uint64_t missing = stretch.tokens.empty() ? 1 : 0;
    const uint64_t end = std::min(ends[i], begin + uint64_t(most - out.targets) + missing);
    const std::vector<int64_t> tokens = read_tokens(validation, begin, end);
    stretch.tokens.insert(stretch.tokens.end(), tokens.begin(), tokens.end());
    const int64_t targets = int64_t(stretch.tokens.size()) - stretch.first;
    if (targets <= 0) continue;
    out.targets += targets;
    out.stretches.push_back(std::move(stretch));
  }
  return out;
}

NgramBaseline ngram_baseline(const LanguageData& data, int order, const HeldOut& held_out, uint64_t most) {
  datasets::NgramModel model(order, data.tokenizer().vocab_size());
  const uint64_t trained = std::min(most, data.train().tokens());
  {
    const std::vector<int64_t> tokens = read_tokens(data.train(), 0, trained);
    for (const auto part : stretches(
             tokens, data.documents() ? document_begins(data.train(), 0, trained) : std::vector<uint64_t>()))
      model.add(part);
  }
  model.finish();
  double nll = 0;
  for (const HeldOut::Stretch& stretch : held_out.stretches)
    for (size_t at = size_t(stretch.first); at < stretch.tokens.size(); ++at)
      nll -= model.log_probability(stretch.tokens, at);
  return {.order = order,
          .nll = nll / double(std::max<int64_t>(1, held_out.targets)),
          .trained = trained,
          .ngrams = model.ngrams()};
}

std::string target_text(const LanguageData& data, const HeldOut& held_out) {
  std::vector<int32_t> targets;
  for (const HeldOut::Stretch& stretch : held_out.stretches)
    targets.insert(targets.end(), stretch.tokens.begin() + stretch.first, stretch.tokens.end());
  return data.tokenizer().decode(targets);
}

}  // namespace tessera::train
