#include <algorithm>

#include "io/safetensors_internal.h"
#include "io/tokenizer/file_internal.h"
#include "io/tokenizer/settings_internal.h"
#include "io/tokenizer/unicode_internal.h"
#include "runtime/error.h"

// The formats before tokenizer.json, brought into its form.

namespace tessera::io {
namespace {

using nlohmann::json;

/// Calls line(number from 1, text) for each line; its end may be \n or \r\n.
template <class F>
void for_each_line(std::string_view text, F&& line) {
  size_t number = 0;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view part = text.substr(0, end);
    if (part.ends_with('\r')) part.remove_suffix(1);
    line(++number, part);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
}

void check_text(const std::string& path, size_t line, std::string_view text) {
  check(unicode::valid_prefix(text) == text.size() && text.find('\0') == std::string_view::npos,
        "tokenizer: ", path, ": line ", line, " is no UTF-8 text");
}

/// Adds the tokens of `config` that are not among the added ones yet.
void add_tokens(TokenizerFile& file, const TokenizerConfig& config) {
  const auto find = [&](const std::string& text) { return file.vocabulary.find(text); };
  for (const AddedToken& token : config.added_tokens(find)) {
    const auto is_same = [&](const AddedToken& other) { return other.content == token.content; };
    if (std::ranges::none_of(file.added, is_same)) file.added.push_back(token);
  }
}

bool have_same_flags(const AddedToken& a, const AddedToken& b) {
  return a.special == b.special && a.single_word == b.single_word && a.lstrip == b.lstrip &&
         a.rstrip == b.rstrip && a.normalized == b.normalized;
}

/// The number of the token with a role; throws if `config` has no such token or the vocabulary lacks it.
int32_t token_of_role(const TokenizerFile& file, const TokenizerConfig& config, const char* flag,
                      const char* role) {
  const std::optional<std::string> token = config.token(role);
  check(token.has_value(), "tokenizer: ", config.path, ": ", flag, " is true, but there is no ", role);
  for (const AddedToken& added : file.added)
    if (added.content == *token) return added.id;
  const int32_t id = file.vocabulary.find(*token);
  check(id >= 0, "tokenizer: ", config.path, ": ", role, " is \"", shown(*token), "\", which is not in ",
        file.path);
  return id;
}

AddedToken special_token(const Vocabulary& vocabulary, const std::string& content) {
  return {.content = content, .id = vocabulary.find(content), .special = true};
}

}  // namespace

void add_configured_tokens(TokenizerFile& file, const TokenizerConfig& config) {
  const auto added = [&](const std::string& text) {
    return std::ranges::find_if(file.added, [&](const AddedToken& token) { return token.content == text; });
  };
  // Numbers beyond all others keep the roles' order after what is listed.
  int32_t later = kMostTokens;
  const auto find = [&](const std::string& text) {
    if (added(text) != file.added.end()) return -1;
    const int32_t known = file.vocabulary.find(text);
    return known >= 0 ? known : later++;
  };
  int64_t next = file.vocabulary.end();
  for (const AddedToken& token : file.added) next = std::max(next, int64_t{token.id} + 1);
  for (AddedToken& token : config.added_tokens(find)) {
    if (token.content.empty()) continue;
    if (const auto there = added(token.content); there != file.added.end()) {
      token.id = there->id;
      if (!have_same_flags(token, *there)) *there = token;
      continue;
    }
    const int32_t known = file.vocabulary.find(token.content);
    if (known < 0)
      check(next < kMostTokens, "tokenizer: ", config.path, ": more than ", kMostTokens, " tokens");
    token.id = known >= 0 ? known : int32_t(next++);
    file.added.push_back(token);
  }
}

nlohmann::json frame_processor(int32_t before, int32_t after) {
  json single = json::array(), pair = json::array(), special = json::object();
  int type = 0;
  for (const char* const text : {"A", "B"}) {
    for (const auto& [name, id] : {std::pair{"before", before}, {text, -1}, {"after", after}}) {
      json part;
      if (name == text) {
        part = {{"Sequence", {{"id", text}, {"type_id", type}}}};
      } else if (id >= 0) {
        part = {{"SpecialToken", {{"id", name}, {"type_id", type}}}};
        special[name] = {{"ids", json::array({id})}};
      } else {
        continue;
      }
      pair.push_back(part);
      if (type == 0) single.push_back(part);
    }
    type = 1;
  }
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
}

TokenizerFile parse_vocab_and_merges(const std::string& vocab_path, std::string_view vocab,
                                     const std::string& merges_path, std::string_view merges,
                                     const TokenizerConfig& config) {
  TokenizerFile file;
  file.path = vocab_path;
  parse_vocab_json(file, vocab);
  for_each_line(merges, [&](size_t number, std::string_view line) {
    if ((number == 1 && line.starts_with("#version")) || line.empty()) return;
    check_text(merges_path, number, line);
    const size_t blank = line.find(' ');
    check(blank != std::string_view::npos && blank > 0 && blank + 1 < line.size() &&
              line.find(' ', blank + 1) == std::string_view::npos,
          "tokenizer: ", merges_path, ": line ", number, " is \"", shown(std::string(line)),
          "\", expected two tokens with a blank between them");
    file.merges.add(line.substr(0, blank), line.substr(blank + 1));
  });
  const auto has = [&](const char* token) { return file.vocabulary.find(token) >= 0; };
  const Settings says(config.fields, config.path + ": ");
  file.settings = {
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", says.flag("add_prefix_space", false)}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"post_processor", nullptr},
      {"model", {{"type", "BPE"}}}};
  const bool is_gpt2 = says.text("tokenizer_class", "").starts_with("GPT2Tokenizer");
  if (!is_gpt2 && has("<s>") && has("</s>") && has("<pad>") && has("<unk>") && has("<mask>")) {
    for (const char* token : {"<s>", "<pad>", "</s>", "<unk>", "<mask>"})
      file.added.push_back(special_token(file.vocabulary, token));
    file.added.back().lstrip = true;  // "<mask>" takes the blank before it
    file.settings["post_processor"] = {{"type", "RobertaProcessing"},
                                       {"sep", {"</s>", file.vocabulary.find("</s>")}},
                                       {"cls", {"<s>", file.vocabulary.find("<s>")}}};
    add_tokens(file, config);
    return file;
  }
  if (has("<|endoftext|>")) file.added.push_back(special_token(file.vocabulary, "<|endoftext|>"));
  add_tokens(file, config);
  const int32_t bos =
      says.flag("add_bos_token", false) ? token_of_role(file, config, "add_bos_token", "bos_token") : -1;
  const int32_t eos =
      says.flag("add_eos_token", false) ? token_of_role(file, config, "add_eos_token", "eos_token") : -1;
  if (bos >= 0 || eos >= 0) file.settings["post_processor"] = frame_processor(bos, eos);
  return file;
}

TokenizerFile parse_vocab_txt(const std::string& path, std::string_view text, const TokenizerConfig& config) {
  TokenizerFile file;
  file.path = path;
  for_each_line(text, [&](size_t number, std::string_view line) {
    check_text(path, number, line);
    check(!line.empty(), "tokenizer: ", path, ": line ", number, " is empty, expected a token");
    file.vocabulary.add(path + ": line " + std::to_string(number), line, int64_t(number) - 1);
  });
  file.vocabulary.finish(path);
  for (const char* token : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) {
    check(file.vocabulary.find(token) >= 0 || std::string_view(token) == "[MASK]" ||
              std::string_view(token) == "[PAD]",
          "tokenizer: ", path, " has no ", token, "; it is no vocabulary of BERT's");
    if (file.vocabulary.find(token) >= 0) file.added.push_back(special_token(file.vocabulary, token));
  }
  add_tokens(file, config);
  // What the file leaves out is as BertTokenizer has it: lower case, without accents then.
  const Settings says(config.fields, config.path + ": ");
  json normalizer = {{"type", "BertNormalizer"}, {"lowercase", says.flag("do_lower_case", true)}};
  if (says.has("strip_accents")) normalizer["strip_accents"] = says.flag("strip_accents", true);
  if (says.has("tokenize_chinese_chars"))
    normalizer["handle_chinese_chars"] = says.flag("tokenize_chinese_chars", true);
  file.settings = {{"normalizer", normalizer},
                   {"pre_tokenizer", {{"type", "BertPreTokenizer"}}},
                   {"decoder", {{"type", "WordPiece"}}},
                   {"post_processor",
                    {{"type", "BertProcessing"},
                     {"sep", {"[SEP]", file.vocabulary.find("[SEP]")}},
                     {"cls", {"[CLS]", file.vocabulary.find("[CLS]")}}}},
                   {"model", {{"type", "WordPiece"}, {"unk_token", "[UNK]"}}}};
  return file;
}

}  // namespace tessera::io
