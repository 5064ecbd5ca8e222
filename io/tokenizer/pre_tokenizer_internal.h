#pragma once

#include <optional>
#include <string>
#include <vector>

#include "io/tokenizer/normalizer_internal.h"

namespace tessera::io {

/// A text in pieces: they lie one after the other, perhaps with gaps.
struct Pieces {
  struct Span {
    size_t begin, end;
  };
  std::string text;
  std::vector<Span> spans;
  std::string_view operator[](size_t i) const {
    return std::string_view(text).substr(spans[i].begin, spans[i].end - spans[i].begin);
  }
};

/// How a piece is cut at the matches of a pattern.
enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

/// The pre-tokenizer of a tokenizer.json: cuts a text into pieces that the model never joins.
///
/// ByteLevel (as the last), Split, BertPreTokenizer, Whitespace, WhitespaceSplit, Punctuation, Digits,
/// Metaspace, CharDelimiterSplit, Sequence.
class PreTokenizer {
 public:
  PreTokenizer() = default;
  explicit PreTokenizer(const Settings& settings);
  /// Whether the model's tokens stand for bytes, written as the characters of GPT-2's byte alphabet.
  bool byte_level() const { return byte_level_; }
  /// `pieces` holds a text and one piece, the whole; `at_start`: it begins where the user's text does.
  void operator()(Pieces& pieces, bool at_start) const;

 private:
  enum class Kind {
    byte_level,
    split,
    bert,
    words,
    whitespace_split,
    punctuation,
    digits,
    metaspace,
    character
  };
  struct Step {
    Kind kind;
    std::optional<Pattern> pattern;
    SplitBehavior behavior = SplitBehavior::isolated;
    bool invert = false;
    bool prefix = false;  // ByteLevel: a blank is put before each piece
    std::string replacement;
    enum class Prepend { always, never, first } prepend = Prepend::always;
    uint32_t character = 0;
  };
  void add(const Settings& settings);
  static void metaspace(const Step& step, Pieces& pieces, bool at_start);
  std::vector<Step> steps_;
  bool byte_level_ = false;
};

/// GPT-2's expression, which ByteLevel has built in (Radford et al., 2019; its encoder.py).
inline constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// GPT-2's byte alphabet: the character of a byte, and the byte of a character (-1: none).
uint32_t byte_character(uint8_t byte);
int byte_of_character(uint32_t c);
/// Bytes as text of that alphabet, and back; nothing if a character is not of it.
std::string to_byte_alphabet(std::string_view bytes);
std::optional<std::string> from_byte_alphabet(std::string_view text);

}  // namespace tessera::io
