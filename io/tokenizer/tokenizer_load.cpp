#include <filesystem>

#include "io/checksum.h"
#include "io/safetensors_internal.h"
#include "io/tokenizer/tokenizer_core_internal.h"
#include "runtime/error.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kLargestConfig = 16 << 20;

struct Name {
  std::optional<int32_t> SpecialTokens::*role;
  const char* key;
  std::vector<const char*> usual;
};

const std::vector<Name>& roles() {
  static const std::vector<Name> names = {
      {&SpecialTokens::bos, "bos_token", {"<s>", "<|begin_of_text|>", "<|endoftext|>", "<bos>"}},
      {&SpecialTokens::eos, "eos_token", {"</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>"}},
      {&SpecialTokens::pad, "pad_token", {"<pad>", "[PAD]", "<|pad|>"}},
      {&SpecialTokens::unk, "unk_token", {"<unk>", "[UNK]"}},
      {&SpecialTokens::cls, "cls_token", {"[CLS]", "<s>"}},
      {&SpecialTokens::sep, "sep_token", {"[SEP]", "</s>"}},
      {&SpecialTokens::mask, "mask_token", {"[MASK]", "<mask>"}}};
  return names;
}

/// What decides the tokens, independent of a file's layout.
std::string fingerprint_of(const TokenizerFile& file) {
  Xxh3 hash;
  const auto add = [&hash](std::string_view text) {
    const uint64_t size = text.size();
    hash.add(&size, sizeof size);
    hash.add(text);
  };
  for (int32_t id = 0; id < file.vocabulary.end(); ++id)
    if (file.vocabulary.has(id)) {
      hash.add(&id, sizeof id);
      add(file.vocabulary.token(id));
    }
  for (size_t rank = 0; rank < file.merges.size(); ++rank) {
    add(file.merges.left(rank));
    add(file.merges.right(rank));
  }
  for (const AddedToken& token : file.added) {
    hash.add(&token.id, sizeof token.id);
    add(token.content);
    add(std::string{char(token.special), char(token.single_word), char(token.lstrip), char(token.rstrip),
                    char(token.normalized)});
  }
  for (const char* part : {"model", "normalizer", "pre_tokenizer", "post_processor", "decoder"})
    add(file.settings.contains(part) ? file.settings[part].dump() : "null");
  return hash.digits();
}

std::string read(const std::string& path) {
  return read_file(path, kLargestTokenizer);
}

}  // namespace

std::shared_ptr<Tokenizer::Core> Tokenizer::build(TokenizerFile parsed) {
  auto core = std::make_shared<Core>();
  core->file = std::move(parsed);
  TokenizerFile& file = core->file;
  core->fingerprint = fingerprint_of(file);
  const Settings root(file.settings, file.path + ": ");
  if (root.has("normalizer")) core->normalizer = Normalizer(root.at("normalizer"));
  if (root.has("pre_tokenizer")) core->pre_tokenizer = PreTokenizer(root.at("pre_tokenizer"));
  const bool byte_level = core->pre_tokenizer.byte_level();
  core->model = make_model(root.at("model"), file.vocabulary, file.merges, byte_level);
  // Without pairs to join, a BPE leaves the characters or bytes that it begins with.
  const bool joins = file.merges.size() > 0 || root.at("model").flag("ignore_merges", false);
  core->kind = core->model->index() == 1   ? "WordPiece"
               : core->model->index() == 2 ? "WordLevel"
               : !joins                    ? byte_level ? "bytes" : "characters"
               : byte_level                ? "BPE, byte level"
                                           : "BPE";
  file.merges = MergeList();  // they are in the model now

  core->end = file.vocabulary.end();
  core->count = file.vocabulary.count();
  for (size_t i = 0; i < file.added.size(); ++i) {
    const AddedToken& token = file.added[i];
    if (token.content.empty()) continue;
    const std::string where = file.path + ": added_tokens[" + std::to_string(i) + "]";
    const int32_t known = file.vocabulary.find(token.content);
    check(known < 0 || known == token.id, "tokenizer: ", where, ": \"", shown(token.content),
          "\" has the number ", token.id, ", but ", known, " in model.vocab");
    check(known >= 0 || !file.vocabulary.has(token.id), "tokenizer: ", where, ": \"", shown(token.content),
          "\" has the number ", token.id, ", which is \"",
          shown(std::string(file.vocabulary.token(token.id))), "\" in model.vocab");
    const auto [by_id, is_new] = core->added_by_id.emplace(token.id, &token);
    check(is_new || by_id->second->content == token.content, "tokenizer: ", where, ": \"",
          shown(token.content), "\" and \"", shown(by_id->second->content), "\" both have the number ",
          token.id);
    check(core->added_by_text.emplace(token.content, token.id).first->second == token.id,
          "tokenizer: ", where, ": \"", shown(token.content), "\" has two numbers");
    core->end = std::max(core->end, int64_t{token.id} + 1);
    core->count += known < 0 && is_new ? 1 : 0;
  }
  core->raw_added = AddedMatcher(file.added, false, core->normalizer);
  core->normalized_added = AddedMatcher(file.added, true, core->normalizer);
  const auto known = [&](int64_t id) {
    return file.vocabulary.has(int32_t(id)) || core->added_by_id.contains(int32_t(id));
  };
  if (root.has("post_processor")) core->post_processor = PostProcessor(root.at("post_processor"), known);
  if (root.has("decoder")) core->decoder = Decoder(root.at("decoder"));
  return core;
}

void Tokenizer::find_special(Core& core, const std::string& folder) {
  const auto find = [&core](const std::string& text) -> std::optional<int32_t> {
    if (const auto found = core.added_by_text.find(text); found != core.added_by_text.end())
      return found->second;
    const int32_t id = core.sentencepiece ? core.sentencepiece->id_of(text) : core.file.vocabulary.find(text);
    return id >= 0 ? std::optional(id) : std::nullopt;
  };
  nlohmann::json config = nlohmann::json::object();
  const std::string path = folder.empty() ? "" : (fs::path(folder) / "tokenizer_config.json").string();
  std::error_code ignored;
  if (!path.empty() && fs::exists(path, ignored))
    config = parse_small_json(path, read_file(path, kLargestConfig));
  const Settings settings(config, path + ": ");
  for (const Name& name : roles()) {
    std::optional<int32_t>& id = core.special.*name.role;
    if (settings.has(name.key)) {
      const Settings value = settings.at(name.key);
      id = find(value.json().is_object() ? value.text("content") : value.text());
    }
    for (const char* usual : name.usual)
      if (!id) id = find(usual);
  }
}

Tokenizer Tokenizer::parse(const std::string& name, std::string_view json) {
  const std::shared_ptr<Core> core = build(parse_tokenizer_json(name, json));
  find_special(*core, "");
  return Tokenizer(core);
}

Tokenizer Tokenizer::parse_sentencepiece(const std::string& name, std::string_view bytes) {
  check_sentencepiece(name, bytes);
  auto core = std::make_shared<Core>();
  core->file.path = name;
  core->sentencepiece = std::make_unique<SentencePiece>(name, bytes);
  const SentencePiece& pieces = *core->sentencepiece;
  core->end = core->count = pieces.size();
  core->kind = "SentencePiece";
  Xxh3 hash;
  hash.add(bytes);
  core->fingerprint = hash.digits();
  const auto id = [](int32_t value) { return value >= 0 ? std::optional(value) : std::nullopt; };
  core->special = {
      .bos = id(pieces.bos()), .eos = id(pieces.eos()), .pad = id(pieces.pad()), .unk = id(pieces.unk())};
  // As LLaMA's tokenizer: the beginning before each text if the model has it; else, as T5's, the end after.
  nlohmann::json single = nlohmann::json::array(), pair, special = nlohmann::json::object();
  const auto text = [](const char* id, int type) {
    return nlohmann::json{{"Sequence", {{"id", id}, {"type_id", type}}}};
  };
  const bool has_bos = core->special.bos.has_value();
  const std::optional<int32_t> around = has_bos ? core->special.bos : core->special.eos;
  const auto mark = [](int type) {
    return nlohmann::json{{"SpecialToken", {{"id", "mark"}, {"type_id", type}}}};
  };
  special["mark"] = {{"ids", around ? nlohmann::json{*around} : nlohmann::json::array()}};
  if (has_bos) {
    single = {mark(0), text("A", 0)};
    pair = {mark(0), text("A", 0), mark(1), text("B", 1)};
  } else {
    single = {text("A", 0), mark(0)};
    pair = {text("A", 0), mark(0), text("B", 1), mark(1)};
  }
  const nlohmann::json processor = {
      {"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
  core->post_processor = PostProcessor(Settings(processor, name), [](int64_t) { return true; });
  return Tokenizer(core);
}

Tokenizer Tokenizer::load(const std::string& path) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  const fs::path folder = is_folder ? fs::path(path) : fs::path(path).parent_path();
  const auto beside = [&](const char* name) { return (folder / name).string(); };
  const auto there = [&](const char* name) { return fs::exists(folder / name, ignored); };
  const std::string name = fs::path(path).filename().string();
  std::shared_ptr<Core> core;
  if (is_folder ? there("tokenizer.json") : name.ends_with(".json") && name != "vocab.json") {
    const std::string file = is_folder ? beside("tokenizer.json") : path;
    core = build(parse_tokenizer_json(file, read(file)));
  } else if (is_folder ? there("vocab.json") && there("merges.txt")
                       : name == "vocab.json" || name == "merges.txt") {
    const std::string vocab = beside("vocab.json"), merges = beside("merges.txt");
    core = build(parse_vocab_and_merges(vocab, read(vocab), merges, read(merges)));
  } else if (is_folder ? there("vocab.txt") : name.ends_with(".txt")) {
    const std::string file = is_folder ? beside("vocab.txt") : path;
    bool lower_case = true;  // as BertTokenizer without a word
    if (const std::string config = beside("tokenizer_config.json"); fs::exists(config, ignored)) {
      const nlohmann::json json = parse_small_json(config, read_file(config, kLargestConfig));
      lower_case = Settings(json, config + ": ").flag("do_lower_case", true);
    }
    core = build(parse_vocab_txt(file, read(file), lower_case));
  } else if (is_folder ? there("tokenizer.model") || there("spiece.model") : name.ends_with(".model")) {
    const std::string file =
        !is_folder ? path : beside(there("tokenizer.model") ? "tokenizer.model" : "spiece.model");
    return parse_sentencepiece(file, read(file));
  } else {
    fail_at(
        Site::here(), "tokenizer: ", path,
        is_folder
            ? " is a folder without tokenizer.json, vocab.json and merges.txt, vocab.txt or tokenizer.model"
        : fs::exists(path, ignored)
            ? " is no tokenizer.json, vocab.json, merges.txt, vocab.txt or .model file by its name"
            : " is neither a file nor a folder; check the name");
  }
  find_special(*core, folder.empty() ? "." : folder.string());
  return Tokenizer(core);
}

}  // namespace tessera::io
