#include "io/safetensors_internal.h"
#include "io/tokenizer/file_internal.h"
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

AddedToken special_token(const Vocabulary& vocabulary, const std::string& content) {
  return {.content = content, .id = vocabulary.find(content), .special = true};
}

}  // namespace

TokenizerFile parse_vocab_and_merges(const std::string& vocab_path, std::string_view vocab,
                                     const std::string& merges_path, std::string_view merges) {
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
  file.settings = {{"normalizer", nullptr},
                   {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                   {"decoder", {{"type", "ByteLevel"}}},
                   {"post_processor", nullptr},
                   {"model", {{"type", "BPE"}}}};
  if (has("<s>") && has("</s>") && has("<pad>") && has("<unk>") && has("<mask>")) {
    for (const char* token : {"<s>", "<pad>", "</s>", "<unk>", "<mask>"})
      file.added.push_back(special_token(file.vocabulary, token));
    file.added.back().lstrip = true;  // "<mask>" takes the blank before it
    file.settings["post_processor"] = {{"type", "RobertaProcessing"},
                                       {"sep", {"</s>", file.vocabulary.find("</s>")}},
                                       {"cls", {"<s>", file.vocabulary.find("<s>")}}};
  } else if (has("<|endoftext|>")) {
    file.added.push_back(special_token(file.vocabulary, "<|endoftext|>"));
  }
  return file;
}

TokenizerFile parse_vocab_txt(const std::string& path, std::string_view text, bool lower_case) {
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
  file.settings = {{"normalizer", {{"type", "BertNormalizer"}, {"lowercase", lower_case}}},
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
