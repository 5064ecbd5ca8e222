#include "io/tokenizer/pre_tokenizer_internal.h"

#include <algorithm>
#include <array>

#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::io {
namespace {

constexpr const char* kMetaspaceMark = "\xE2\x96\x81";  // U+2581

struct Match {
  Pieces::Span span;
  bool is_match;
};

SplitBehavior behavior_of(const Settings& settings, const std::string& otherwise) {
  const std::string name = settings.text("behavior", otherwise);
  if (name == "Removed") return SplitBehavior::removed;
  if (name == "Isolated") return SplitBehavior::isolated;
  if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
  check(name == "Contiguous", "tokenizer: ", settings.where(), ".behavior is not one of Removed, Isolated, ",
        "MergedWithPrevious, MergedWithNext and Contiguous");
  return SplitBehavior::contiguous;
}

/// Matches and what lies between them, in order. Empty matches too: they end a run of Contiguous.
void find_matches(const Pattern& pattern, std::string_view text, Pieces::Span span,
                  std::vector<Match>& matches) {
  const std::string_view piece = text.substr(span.begin, span.end - span.begin);
  size_t previous = 0, from = 0;
  bool any = false;  // matches
  Regex::Match match;
  Regex::Budget budget(piece.size());
  while (from <= piece.size() && pattern.find(piece, from, match, budget)) {
    if (matches.size() % 1024 == 0) check_interrupt();
    const bool is_empty = match.begin == match.end;
    // As in the library `tokenizers`, an empty match that ends the one before does not count.
    if (!is_empty || match.end != previous || !any) {
      if (previous != match.begin)
        matches.push_back({{span.begin + previous, span.begin + match.begin}, false});
      matches.push_back({{span.begin + match.begin, span.begin + match.end}, true});
      previous = match.end, any = true;
    }
    // After an empty match, advance by at least one character.
    from = match.end;
    if (is_empty) from += from < piece.size() ? unicode::length(piece[from]) : 1;
  }
  if (previous != piece.size()) matches.push_back({{span.begin + previous, span.end}, false});
}

/// The same for a class of characters: each is a match of its own.
template <class IsOf>
void find_characters(IsOf&& is_of, std::string_view text, Pieces::Span span, std::vector<Match>& matches) {
  size_t previous = span.begin;
  for (size_t at = span.begin; at < span.end;) {
    const size_t begin = at;
    if (!is_of(unicode::next(text, at))) continue;
    if (previous != begin) matches.push_back({{previous, begin}, false});
    matches.push_back({{begin, at}, true});
    previous = at;
  }
  if (previous != span.end) matches.push_back({{previous, span.end}, false});
}

void cut(SplitBehavior behavior, bool invert, std::vector<Match>& matches, std::vector<Pieces::Span>& to) {
  if (invert)
    for (Match& match : matches) match.is_match = !match.is_match;
  const size_t first = to.size();
  bool last_was_match = false;
  switch (behavior) {
    case SplitBehavior::isolated:
      for (const Match& match : matches) to.push_back(match.span);
      break;
    case SplitBehavior::removed:
      for (const Match& match : matches)
        if (!match.is_match) to.push_back(match.span);
      break;
    case SplitBehavior::contiguous:
      for (const Match& match : matches) {
        if (to.size() > first && match.is_match == last_was_match)
          to.back().end = match.span.end;
        else
          to.push_back(match.span);
        last_was_match = match.is_match;
      }
      break;
    case SplitBehavior::merged_with_previous:
      for (const Match& match : matches) {
        if (match.is_match && !last_was_match && to.size() > first)
          to.back().end = match.span.end;
        else
          to.push_back(match.span);
        last_was_match = match.is_match;
      }
      break;
    case SplitBehavior::merged_with_next:
      for (size_t i = matches.size(); i-- > 0;) {
        if (matches[i].is_match && !last_was_match && to.size() > first)
          to.back().begin = matches[i].span.begin;
        else
          to.push_back(matches[i].span);
        last_was_match = matches[i].is_match;
      }
      std::reverse(to.begin() + ptrdiff_t(first), to.end());
      break;
  }
}

struct ByteAlphabet {
  std::array<uint32_t, 256> character{};
  std::array<int16_t, 324> byte{};
  ByteAlphabet() {
    byte.fill(-1);
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool shown = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      character[b] = shown ? b : next++;
      byte[character[b]] = int16_t(b);
    }
  }
};

const ByteAlphabet& alphabet() {
  static const ByteAlphabet table;
  return table;
}

}  // namespace

uint32_t byte_character(uint8_t byte) {
  return alphabet().character[byte];
}

int byte_of_character(uint32_t c) {
  return c < alphabet().byte.size() ? alphabet().byte[c] : -1;
}

std::string to_byte_alphabet(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) unicode::append(text, byte_character(uint8_t(byte)));
  return text;
}

std::optional<std::string> from_byte_alphabet(std::string_view text) {
  std::string bytes;
  for (size_t at = 0; at < text.size();) {
    const int byte = byte_of_character(unicode::next(text, at));
    if (byte < 0) return std::nullopt;
    bytes += char(byte);
  }
  return bytes;
}

PreTokenizer::PreTokenizer(const Settings& settings) {
  add(settings);
  for (size_t i = 0; i + 1 < steps_.size(); ++i)
    check(steps_[i].kind != Kind::byte_level, "tokenizer: ", settings.where(),
          ": ByteLevel stands before another step; expected it as the last");
  byte_level_ = !steps_.empty() && steps_.back().kind == Kind::byte_level;
}

void PreTokenizer::add(const Settings& settings) {
  const std::string type = settings.type();
  if (type == "Sequence") {
    for (const Settings& step : settings.list("pretokenizers")) add(step);
    return;
  }
  Step step{};
  if (type == "ByteLevel") {
    step.kind = Kind::byte_level;
    step.prefix = settings.flag("add_prefix_space", true);
    if (settings.flag("use_regex", true))
      step.pattern.emplace(Settings(nlohmann::json{{"Regex", kGpt2Pattern}}, settings.where()));
  } else if (type == "Split") {
    step.kind = Kind::split;
    step.pattern.emplace(settings.at("pattern"));
    step.behavior = behavior_of(settings, "");
    step.invert = settings.flag("invert", false);
  } else if (type == "BertPreTokenizer") {
    step.kind = Kind::bert;
  } else if (type == "WhitespaceSplit") {
    step.kind = Kind::whitespace_split;
  } else if (type == "Whitespace") {
    step.kind = Kind::words;
  } else if (type == "Punctuation") {
    step.kind = Kind::punctuation;
    step.behavior = behavior_of(settings, "Isolated");
  } else if (type == "Digits") {
    step.kind = Kind::digits;
    step.behavior =
        settings.flag("individual_digits", false) ? SplitBehavior::isolated : SplitBehavior::contiguous;
  } else if (type == "CharDelimiterSplit") {
    step.kind = Kind::character;
    const std::string delimiter = settings.text("delimiter");
    size_t at = 0;
    check(!delimiter.empty() && delimiter.size() == unicode::length(delimiter[0]),
          "tokenizer: ", settings.where(), ".delimiter is not one character");
    step.character = unicode::next(delimiter, at);
    step.behavior = SplitBehavior::removed;
  } else if (type == "Metaspace") {
    step.kind = Kind::metaspace;
    step.replacement = settings.text("replacement", kMetaspaceMark);
    check(!step.replacement.empty() && step.replacement.size() == unicode::length(step.replacement[0]),
          "tokenizer: ", settings.where(), ".replacement is not one character");
    using Prepend = Step::Prepend;
    if (settings.has("prepend_scheme")) {
      const std::string scheme = settings.text("prepend_scheme");
      check(scheme == "always" || scheme == "never" || scheme == "first", "tokenizer: ", settings.where(),
            ".prepend_scheme is not one of always, never and first");
      step.prepend = scheme == "always"  ? Prepend::always
                     : scheme == "never" ? Prepend::never
                                         : Prepend::first;
    } else {  // as older files have it
      step.prepend = settings.flag("add_prefix_space", true) ? Prepend::always : Prepend::never;
    }
    if (settings.flag("split", true))
      step.pattern.emplace(Settings(nlohmann::json{{"String", step.replacement}}, settings.where()));
    step.behavior = SplitBehavior::merged_with_next;
  } else {
    settings.refuse_type(
        "ByteLevel, Split, BertPreTokenizer, Whitespace, WhitespaceSplit, Punctuation, Digits, Metaspace, "
        "CharDelimiterSplit or Sequence");
  }
  steps_.push_back(std::move(step));
}

void PreTokenizer::metaspace(const Step& step, Pieces& pieces, bool at_start) {
  Pieces changed;
  for (size_t i = 0; i < pieces.spans.size(); ++i) {
    const size_t begin = changed.text.size();
    const std::string_view piece = pieces[i];
    const bool marked = piece.starts_with(' ') || piece.starts_with(step.replacement);
    const bool first = at_start && i == 0 && pieces.spans[i].begin == 0;
    using Prepend = Step::Prepend;
    if (!marked && (step.prepend == Prepend::always || (step.prepend == Prepend::first && first)))
      changed.text += step.replacement;
    for (const char c : piece)
      if (c == ' ')
        changed.text += step.replacement;
      else
        changed.text += c;
    changed.spans.push_back({begin, changed.text.size()});
  }
  pieces = std::move(changed);
}

void PreTokenizer::operator()(Pieces& pieces, bool at_start) const {
  std::vector<Match> matches;
  std::vector<Pieces::Span> spans;
  for (const Step& step : steps_) {
    if (step.kind == Kind::metaspace) metaspace(step, pieces, at_start);
    if (step.kind == Kind::byte_level && step.prefix) {
      Pieces changed;
      for (size_t i = 0; i < pieces.spans.size(); ++i) {
        const size_t begin = changed.text.size();
        if (!pieces[i].starts_with(' ')) changed.text += ' ';
        changed.text += pieces[i];
        changed.spans.push_back({begin, changed.text.size()});
      }
      pieces = std::move(changed);
    }
    const bool cuts = step.pattern || (step.kind != Kind::byte_level && step.kind != Kind::metaspace);
    if (!cuts) continue;
    spans.clear();
    for (const Pieces::Span span : pieces.spans) {
      matches.clear();
      const auto characters = [&](auto&& is_of) { find_characters(is_of, pieces.text, span, matches); };
      const auto within_words = [&](auto&& is_of, SplitBehavior behavior) {
        std::vector<Pieces::Span> words;
        characters(unicode::is_space);
        cut(SplitBehavior::removed, false, matches, words);
        for (const Pieces::Span word : words) {
          matches.clear();
          find_characters(is_of, pieces.text, word, matches);
          cut(behavior, false, matches, spans);
        }
      };
      if (step.pattern) {
        find_matches(*step.pattern, pieces.text, span, matches);
      } else if (step.kind == Kind::digits) {
        characters(unicode::is_numeric);
      } else if (step.kind == Kind::punctuation) {
        characters(unicode::is_bert_punctuation);
      } else if (step.kind == Kind::character) {
        characters([&](uint32_t c) { return c == step.character; });
      } else if (step.kind == Kind::whitespace_split) {
        characters(unicode::is_space);
        cut(SplitBehavior::removed, false, matches, spans);
        continue;
      } else if (step.kind == Kind::words) {  // runs of word characters and of what is neither that nor blank
        within_words(unicode::is_word, SplitBehavior::contiguous);
        continue;
      } else {  // BERT: blanks go, punctuation stands alone
        within_words(unicode::is_bert_punctuation, SplitBehavior::isolated);
        continue;
      }
      cut(step.behavior, step.invert, matches, spans);
    }
    std::erase_if(spans, [](const Pieces::Span& span) { return span.begin == span.end; });
    pieces.spans.swap(spans);
  }
}

}  // namespace tessera::io
