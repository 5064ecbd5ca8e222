#include "io/tokenizer/decoder_internal.h"

#include <array>
#include <utility>

#include "io/tokenizer/model_internal.h"
#include "io/tokenizer/pre_tokenizer_internal.h"
#include "runtime/error.h"

namespace tessera::io {
namespace {

constexpr const char* kUnknownCharacter = "\xEF\xBF\xBD";  // U+FFFD

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  if (from.empty()) return;
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

/// English as BERT's tokens are joined: no blank before a full stop.
void clean_up(std::string& text) {
  constexpr std::array<std::pair<const char*, const char*>, 11> kRules = {{{" .", "."},
                                                                           {" ?", "?"},
                                                                           {" !", "!"},
                                                                           {" ,", ","},
                                                                           {" ' ", "'"},
                                                                           {" n't", "n't"},
                                                                           {" 'm", "'m"},
                                                                           {" do not", " don't"},
                                                                           {" 's", "'s"},
                                                                           {" 've", "'ve"},
                                                                           {" 're", "'re"}}};
  for (const auto& [from, to] : kRules) replace_all(text, from, to);
}

}  // namespace

void Decoder::add(const Settings& settings) {
  const std::string type = settings.type();
  if (type == "Sequence") {
    for (const Settings& step : settings.list("decoders")) add(step);
  } else if (type == "ByteLevel") {
    steps_.push_back(ByteLevel{});
  } else if (type == "WordPiece") {
    steps_.push_back(WordPiece{settings.text("prefix", "##"), settings.flag("cleanup", true)});
  } else if (type == "Metaspace") {
    const std::string scheme = settings.text("prepend_scheme", "always");
    steps_.push_back(Metaspace{
        settings.text("replacement", "\xE2\x96\x81"),
        settings.has("prepend_scheme") ? scheme != "never" : settings.flag("add_prefix_space", true)});
  } else if (type == "BPEDecoder") {
    steps_.push_back(Suffix{settings.text("suffix", "</w>")});
  } else if (type == "ByteFallback") {
    steps_.push_back(ByteFallback{});
  } else if (type == "Fuse") {
    steps_.push_back(Fuse{});
  } else if (type == "Strip") {
    const std::string content = settings.text("content");
    check(!content.empty() && content.size() == unicode::length(content[0]), "tokenizer: ", settings.where(),
          ".content is not one character");
    steps_.push_back(Strip{content, size_t(settings.number("start", 0, INT32_MAX)),
                           size_t(settings.number("stop", 0, INT32_MAX))});
  } else if (type == "Replace") {
    steps_.push_back(Replace{Pattern(settings.at("pattern")), settings.text("content")});
  } else {
    settings.refuse_type(
        "ByteLevel, WordPiece, Metaspace, BPEDecoder, ByteFallback, Fuse, Strip, Replace or Sequence");
  }
}

void Decoder::apply(const ByteLevel&, std::vector<std::string>& tokens, End end) {
  std::string bytes;
  for (const std::string& token : tokens) {
    const std::optional<std::string> part = from_byte_alphabet(token);
    bytes += part ? *part : token;  // an added token has its own characters
  }
  tokens = {end == End::open ? bytes : unicode::repaired(bytes)};
}

void Decoder::apply(const WordPiece& step, std::vector<std::string>& tokens, End) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) {
      if (tokens[i].starts_with(step.prefix))
        tokens[i].erase(0, step.prefix.size());
      else
        tokens[i].insert(0, " ");
    }
    if (step.cleanup) clean_up(tokens[i]);
  }
}

void Decoder::apply(const Metaspace& step, std::vector<std::string>& tokens, End) {
  for (size_t i = 0; i < tokens.size(); ++i)
    replace_all(tokens[i], step.replacement, i == 0 && step.strip ? "" : " ");
}

void Decoder::apply(const Suffix& step, std::vector<std::string>& tokens, End) {
  for (size_t i = 0; i < tokens.size(); ++i)
    replace_all(tokens[i], step.suffix, i + 1 == tokens.size() ? "" : " ");
}

void Decoder::apply(const ByteFallback&, std::vector<std::string>& tokens, End end) {
  std::vector<std::string> joined;
  std::string bytes;
  const auto flush = [&] {
    if (end == End::open || unicode::valid_prefix(bytes) == bytes.size()) {
      if (!bytes.empty()) joined.push_back(bytes);
    } else {
      joined.insert(joined.end(), bytes.size(), kUnknownCharacter);
    }
    bytes.clear();
  };
  for (std::string& token : tokens) {
    const int byte = byte_of_token(token);
    if (byte >= 0) {
      bytes += char(byte);
    } else {
      flush();
      joined.push_back(std::move(token));
    }
  }
  flush();
  tokens = std::move(joined);
}

void Decoder::apply(const Fuse&, std::vector<std::string>& tokens, End) {
  std::string whole;
  for (const std::string& token : tokens) whole += token;
  tokens = {whole};
}

void Decoder::apply(const Strip& step, std::vector<std::string>& tokens, End) {
  for (std::string& token : tokens) {
    for (size_t i = 0; i < step.start && token.starts_with(step.content); ++i)
      token.erase(0, step.content.size());
    for (size_t i = 0; i < step.stop && token.ends_with(step.content); ++i)
      token.resize(token.size() - step.content.size());
  }
}

void Decoder::apply(const Replace& step, std::vector<std::string>& tokens, End) {
  for (std::string& token : tokens) token = replaced(token, step.pattern, step.text);
}

std::string Decoder::operator()(std::vector<std::string> tokens, End end) const {
  for (const Step& step : steps_) std::visit([&](const auto& of) { apply(of, tokens, end); }, step);
  std::string whole;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) whole += between_;
    whole += tokens[i];
  }
  return whole;
}

}  // namespace tessera::io
