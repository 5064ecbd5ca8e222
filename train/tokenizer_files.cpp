#include "train/tokenizer_files.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "datasets/tokenize.h"
#include "io/file.h"
#include "io/tokenizer/train.h"

namespace tessera::train {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kLargestConfig = 1 << 20;

}  // namespace

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

}  // namespace tessera::train
