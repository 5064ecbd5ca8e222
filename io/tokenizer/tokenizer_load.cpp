#include <filesystem>

#include "io/checksum.h"
#include "io/safetensors_internal.h"
#include "io/tokenizer/tokenizer_core_internal.h"
#include "runtime/error.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

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

void add_sized(Xxh3& hash, std::string_view text) {
  const uint64_t size = text.size();
  hash.add(&size, sizeof size);
  hash.add(text);
}

void add_token(Xxh3& hash, const AddedToken& token) {
  hash.add(&token.id, sizeof token.id);
  add_sized(hash, token.content);
  add_sized(hash, std::string{char(token.special), char(token.single_word), char(token.lstrip),
                              char(token.rstrip), char(token.normalized)});
}

/// What decides the tokens, independent of a file's layout.
std::string fingerprint_of(const TokenizerFile& file) {
  Xxh3 hash;
  const auto add = [&hash](std::string_view text) { add_sized(hash, text); };
  for (int32_t id = 0; id < file.vocabulary.end(); ++id)
    if (file.vocabulary.has(id)) {
      hash.add(&id, sizeof id);
      add(file.vocabulary.token(id));
    }
  for (size_t rank = 0; rank < file.merges.size(); ++rank) {
    add(file.merges.left(rank));
    add(file.merges.right(rank));
  }
  for (const AddedToken& token : file.added) add_token(hash, token);
  for (const char* part : {"model", "normalizer", "pre_tokenizer", "post_processor", "decoder"})
    add(file.settings.contains(part) ? file.settings[part].dump() : "null");
  return hash.digits();
}

/// Of a SentencePiece model alone, that of its bytes.
std::string fingerprint_of_pieces(std::string_view bytes, const std::vector<AddedToken>& added,
                                  const TokenizerConfig& config) {
  Xxh3 hash;
  hash.add(bytes);
  for (const AddedToken& token : added) add_token(hash, token);
  for (const char* const key : {"add_bos_token", "add_eos_token", "legacy"})
    if (config.fields.contains(key)) hash.add(key + config.fields[key].dump());
  return hash.digits();
}

std::string read(const std::string& path) {
  return read_file(path, kLargestTokenizer);
}

}  // namespace

void Tokenizer::Core::index_added(const std::function<int32_t(const std::string&)>& find,
                                  const std::function<std::optional<std::string>(int32_t)>& text) {
  for (size_t i = 0; i < file.added.size(); ++i) {
    AddedToken& token = file.added[i];
    if (token.content.empty()) continue;
    token.text = token.normalized ? normalizer(token.content) : token.content;
    const std::string where = file.path + ": added_tokens[" + std::to_string(i) + "]";
    const int32_t known = find(token.content);
    check(known < 0 || known == token.id, "tokenizer: ", where, ": \"", shown(token.content),
          "\" has the number ", token.id, ", but ", known, " in model.vocab");
    const std::optional<std::string> other = known < 0 ? text(token.id) : std::nullopt;
    check(!other, "tokenizer: ", where, ": \"", shown(token.content), "\" has the number ", token.id,
          ", which is \"", shown(other.value_or("")), "\" in model.vocab");
    const auto [by_id, is_new] = added_by_id.emplace(token.id, &token);
    check(is_new || by_id->second->content == token.content, "tokenizer: ", where, ": \"",
          shown(token.content), "\" and \"", shown(by_id->second->content), "\" both have the number ",
          token.id);
    check(added_by_text.emplace(token.content, token.id).first->second == token.id, "tokenizer: ", where,
          ": \"", shown(token.content), "\" has two numbers");
    end = std::max(end, int64_t{token.id} + 1);
    count += known < 0 && is_new ? 1 : 0;
  }
}

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
  const auto text_of = [&](int32_t id) {
    return file.vocabulary.has(id) ? std::optional(std::string(file.vocabulary.token(id))) : std::nullopt;
  };
  core->index_added([&](const std::string& text) { return file.vocabulary.find(text); }, text_of);
  core->raw_added = AddedMatcher(file.added, false);
  core->normalized_added = AddedMatcher(file.added, true);
  const auto known = [&](int64_t id) {
    return file.vocabulary.has(int32_t(id)) || core->added_by_id.contains(int32_t(id));
  };
  if (root.has("post_processor")) core->post_processor = PostProcessor(root.at("post_processor"), known);
  if (root.has("decoder")) core->decoder = Decoder(root.at("decoder"));
  return core;
}

void Tokenizer::find_special(Core& core, const TokenizerConfig& config) {
  const auto find = [&core](const std::string& text) -> std::optional<int32_t> {
    if (const auto found = core.added_by_text.find(text); found != core.added_by_text.end())
      return found->second;
    const int32_t id = core.sentencepiece ? core.sentencepiece->id_of(text) : core.file.vocabulary.find(text);
    return id >= 0 ? std::optional(id) : std::nullopt;
  };
  for (const Name& name : roles()) {
    std::optional<int32_t>& id = core.special.*name.role;
    const std::optional<std::string> text = config.token(name.key);
    if (text) {
      const std::optional<int32_t> named = find(*text);
      if (named || !core.sentencepiece) id = named;
    }
    if (text || core.sentencepiece) continue;  // SentencePiece says itself which they are
    for (const char* usual : name.usual)
      if (!id) id = find(usual);
  }
}

Tokenizer Tokenizer::parse(const std::string& name, std::string_view json) {
  const std::shared_ptr<Core> core = build(parse_tokenizer_json(name, json));
  find_special(*core, {});
  return Tokenizer(core);
}

Tokenizer Tokenizer::parse_sentencepiece(const std::string& name, std::string_view bytes) {
  return Tokenizer(build_sentencepiece(name, bytes, {}));
}

std::shared_ptr<Tokenizer::Core> Tokenizer::build_sentencepiece(const std::string& name,
                                                                std::string_view bytes,
                                                                const TokenizerConfig& config) {
  check_sentencepiece(name, bytes);
  auto core = std::make_shared<Core>();
  core->file.path = name;
  core->sentencepiece = std::make_unique<SentencePiece>(name, bytes);
  const SentencePiece& pieces = *core->sentencepiece;
  core->end = core->count = pieces.size();
  core->kind = "SentencePiece";
  core->file.added = config.added_tokens([&](const std::string& text) { return pieces.id_of(text); });
  for (AddedToken& token : core->file.added) token.normalized = false;  // SentencePiece normalizes its part
  const auto text_of = [&](int32_t id) {
    return id < pieces.size() ? std::optional(pieces.piece(id)) : std::nullopt;
  };
  core->index_added([&](const std::string& text) { return pieces.id_of(text); }, text_of);
  core->raw_added = AddedMatcher(core->file.added, false);
  const Settings says(config.fields, config.path + ": ");
  if (!core->raw_added.empty() && !says.flag("legacy", true)) {
    // A second normalizer_spec of the model's message is merged into the first: add_dummy_prefix is false.
    constexpr std::string_view kNoPrefix("\x1A\x02\x18\x00", 4);
    core->sentencepiece_inside = std::make_unique<SentencePiece>(name, std::string(bytes).append(kNoPrefix));
  }
  const auto id = [](int32_t value) { return value >= 0 ? std::optional(value) : std::nullopt; };
  core->special = {
      .bos = id(pieces.bos()), .eos = id(pieces.eos()), .pad = id(pieces.pad()), .unk = id(pieces.unk())};
  find_special(*core, config);
  // As LLaMA's tokenizer: the beginning before each text if the model has it; else, as T5's, the end after.
  const bool has_bos = core->special.bos.has_value();
  const bool before = says.flag("add_bos_token", has_bos), after = says.flag("add_eos_token", !has_bos);
  const nlohmann::json processor = frame_processor(before ? core->special.bos.value_or(-1) : -1,
                                                   after ? core->special.eos.value_or(-1) : -1);
  core->post_processor = PostProcessor(Settings(processor, name), [](int64_t) { return true; });
  core->fingerprint = fingerprint_of_pieces(bytes, core->file.added, config);
  return core;
}

namespace {

/// A file's name in a folder, and what it holds.
bool has_file(const fs::path& folder, const char* name) {
  std::error_code error;
  const bool found = fs::exists(folder / name, error);
  check(error != std::errc::permission_denied, "tokenizer: ", folder.string(), ": ", error.message());
  return found;
}
bool has_pair(const fs::path& folder) {
  return has_file(folder, "vocab.json") && has_file(folder, "merges.txt");
}
bool has_pieces(const fs::path& folder) {
  return has_file(folder, "tokenizer.model") || has_file(folder, "spiece.model");
}

}  // namespace

bool Tokenizer::is_in(const std::string& folder) {
  std::error_code ignored;
  return fs::is_directory(folder, ignored) && (has_file(folder, "tokenizer.json") || has_pair(folder) ||
                                               has_file(folder, "vocab.txt") || has_pieces(folder));
}

Tokenizer Tokenizer::load(const std::string& path) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  const fs::path folder = is_folder ? fs::path(path) : fs::path(path).parent_path();
  const auto beside = [&](const char* name) { return (folder / name).string(); };
  const std::string name = fs::path(path).filename().string();
  const auto config = [&] { return read_tokenizer_config(folder.empty() ? "." : folder.string()); };
  std::shared_ptr<Core> core;
  if (is_folder ? has_file(folder, "tokenizer.json") : name.ends_with(".json") && name != "vocab.json") {
    const std::string file = is_folder ? beside("tokenizer.json") : path;
    TokenizerFile parsed = parse_tokenizer_json(file, read(file));
    add_configured_tokens(parsed, config());
    core = build(std::move(parsed));
  } else if (is_folder ? has_pair(folder) : name == "vocab.json" || name == "merges.txt") {
    const std::string vocab = beside("vocab.json"), merges = beside("merges.txt");
    const TokenizerConfig named = read_pair_config(folder.empty() ? "." : folder.string());
    core = build(parse_vocab_and_merges(vocab, read(vocab), merges, read(merges), named));
  } else if (is_folder ? has_file(folder, "vocab.txt") : name.ends_with(".txt")) {
    const std::string file = is_folder ? beside("vocab.txt") : path;
    core = build(parse_vocab_txt(file, read(file), config()));
  } else if (is_folder ? has_pieces(folder) : name.ends_with(".model")) {
    const bool has_usual = has_file(folder, "tokenizer.model");
    const std::string file = !is_folder ? path : beside(has_usual ? "tokenizer.model" : "spiece.model");
    return Tokenizer(build_sentencepiece(file, read(file), config()));
  } else {
    fail_at(
        Site::here(), "tokenizer: ", path,
        is_folder
            ? " is a folder without tokenizer.json, vocab.json and merges.txt, vocab.txt or tokenizer.model"
        : fs::exists(path, ignored)
            ? " is no tokenizer.json, vocab.json, merges.txt, vocab.txt or .model file by its name"
            : " is neither a file nor a folder; check the name");
  }
  find_special(*core, config());
  return Tokenizer(core);
}

}  // namespace tessera::io
