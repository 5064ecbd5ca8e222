#include "io/tokenizer/normalizer_internal.h"

#include "runtime/error.h"

namespace tessera::io {
namespace {

/// The characters for which `keep` is true.
template <class Keep>
std::string filtered(std::string_view text, Keep&& keep) {
  std::string kept;
  kept.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (keep(unicode::next(text, at))) kept += text.substr(begin, at - begin);
  }
  return kept;
}

std::string_view stripped(std::string_view text, bool left, bool right) {
  while (left && !text.empty()) {
    size_t at = 0;
    if (!unicode::is_space(unicode::next(text, at))) break;
    text.remove_prefix(at);
  }
  while (right && !text.empty()) {
    size_t at = text.size();
    if (!unicode::is_space(unicode::previous(text, at))) break;
    text = text.substr(0, at);
  }
  return text;
}

}  // namespace

Pattern::Pattern(const Settings& settings) {
  if (settings.has("Regex")) {
    const Settings regex = settings.at("Regex");
    regex_.emplace(regex.where(), regex.text());
  } else {
    text_ = settings.text("String");
    check(!text_.empty(), "tokenizer: ", settings.where(), ".String is empty");
  }
}

bool Pattern::find(std::string_view text, size_t from, Regex::Match& match, Regex::Budget& budget) const {
  if (regex_) return regex_->find(text, from, match, budget);
  const size_t found = text.find(text_, from);
  if (found == std::string_view::npos) return false;
  match = {found, found + text_.size()};
  return true;
}

std::string replaced(std::string_view text, const Pattern& pattern, std::string_view by) {
  std::string whole;
  size_t copied = 0, from = 0;
  bool any = false;  // matches
  Regex::Match match;
  Regex::Budget budget(text.size());
  while (from <= text.size() && pattern.find(text, from, match, budget)) {
    const bool is_empty = match.begin == match.end;
    // As in the library `tokenizers`, an empty match that ends the one before does not count.
    if (!is_empty || match.end != copied || !any) {
      whole += text.substr(copied, match.begin - copied);
      whole += by;
      copied = match.end, any = true;
    }
    // After an empty match, advance by at least one character.
    from = match.end;
    if (is_empty) from += from < text.size() ? unicode::length(text[from]) : 1;
  }
  whole += text.substr(copied);
  return whole;
}

void Normalizer::add(const Settings& settings) {
  const std::string type = settings.type();
  if (type == "Sequence") {
    for (const Settings& step : settings.list("normalizers")) add(step);
  } else if (type == "BertNormalizer") {
    const bool lower = settings.flag("lowercase", true);
    const Bert bert{.clean = settings.flag("clean_text", true),
                    .chinese = settings.flag("handle_chinese_chars", true),
                    .strip = settings.flag("strip_accents", lower),
                    .lower = lower};
    if (bert.strip || bert.lower) unicode::require_library(settings.where());
    steps_.push_back(bert);
  } else if (type == "Lowercase") {
    unicode::require_library(settings.where());
    steps_.push_back(Lowercase{});
  } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    unicode::require_library(settings.where());
    steps_.push_back(type == "NFC"    ? unicode::Form::nfc
                     : type == "NFD"  ? unicode::Form::nfd
                     : type == "NFKC" ? unicode::Form::nfkc
                                      : unicode::Form::nfkd);
  } else if (type == "StripAccents") {
    steps_.push_back(StripAccents{});
  } else if (type == "Strip") {
    steps_.push_back(Strip{settings.flag("strip_left", true), settings.flag("strip_right", true)});
  } else if (type == "Prepend") {
    steps_.push_back(Prepend{settings.text("prepend")});
  } else if (type == "Replace") {
    steps_.push_back(Replace{Pattern(settings.at("pattern")), settings.text("content")});
  } else {
    settings.refuse_type(
        "BertNormalizer, Lowercase, NFC, NFD, NFKC, NFKD, StripAccents, Strip, Prepend, Replace or Sequence");
  }
}

std::string Normalizer::apply(const Bert& bert, std::string_view from) {
  std::string text(from);
  if (bert.clean || bert.chinese) {
    std::string clean;
    clean.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      const uint32_t c = unicode::next(text, at);
      const bool is_control = c < 0x20 || c >= 0x7F;  // only these can be
      if (bert.clean && is_control && unicode::is_bert_removed(c)) continue;
      if (bert.clean && unicode::is_space(c))
        clean += ' ';
      else if (bert.chinese && c >= 0x3400 && unicode::is_chinese(c))
        (clean += ' ').append(text, begin, at - begin) += ' ';
      else
        clean.append(text, begin, at - begin);
    }
    text = std::move(clean);
  }
  if (bert.strip)
    text = filtered(unicode::normal_form(text, unicode::Form::nfd),
                    [](uint32_t c) { return !unicode::is_bert_mark(c); });
  return bert.lower ? unicode::lower_case(text) : text;
}

std::string Normalizer::apply(const Replace& replace, std::string_view text) {
  return replaced(text, replace.pattern, replace.text);
}

std::string Normalizer::operator()(std::string text) const {
  for (const Step& step : steps_) {
    if (const auto* const bert = std::get_if<Bert>(&step)) {
      text = apply(*bert, text);
    } else if (std::holds_alternative<Lowercase>(step)) {
      text = unicode::lower_case(text);
    } else if (const auto* const form = std::get_if<unicode::Form>(&step)) {
      text = unicode::normal_form(text, *form);
    } else if (std::holds_alternative<StripAccents>(step)) {
      text = filtered(text, [](uint32_t c) { return !unicode::is_mark(c); });
    } else if (const auto* const strip = std::get_if<Strip>(&step)) {
      text = std::string(stripped(text, strip->left, strip->right));
    } else if (const auto* const prepend = std::get_if<Prepend>(&step)) {
      if (!text.empty()) text.insert(0, prepend->text);
    } else {
      text = apply(std::get<Replace>(step), text);
    }
  }
  return text;
}

}  // namespace tessera::io
