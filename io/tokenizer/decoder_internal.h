#pragma once

#include <string>
#include <variant>
#include <vector>

#include "io/tokenizer/normalizer_internal.h"

namespace tessera::io {

/// The decoder of a tokenizer.json: steps from the texts of tokens to a text.
///
/// ByteLevel, WordPiece, Metaspace, BPEDecoder, ByteFallback, Fuse, Strip, Replace, Sequence; without any,
/// tokens are joined with blanks.
class Decoder {
 public:
  Decoder() = default;
  explicit Decoder(const Settings& settings) : between_("") { add(settings); }
  /// `open`: bytes that are no UTF-8 stay, since more may come.
  enum class End { closed, open };
  std::string operator()(std::vector<std::string> tokens, End end = End::closed) const;

 private:
  struct ByteLevel {};
  struct WordPiece {
    std::string prefix;
    bool cleanup;
  };
  struct Metaspace {
    std::string replacement;
    bool strip;
  };
  struct Suffix {
    std::string suffix;
  };
  struct ByteFallback {};
  struct Fuse {};
  struct Strip {
    std::string content;
    size_t start, stop;
  };
  struct Replace {
    Pattern pattern;
    std::string text;
  };
  using Step = std::variant<ByteLevel, WordPiece, Metaspace, Suffix, ByteFallback, Fuse, Strip, Replace>;
  void add(const Settings& settings);
  static void apply(const ByteLevel&, std::vector<std::string>& tokens, End end);
  static void apply(const WordPiece& step, std::vector<std::string>& tokens, End);
  static void apply(const Metaspace& step, std::vector<std::string>& tokens, End);
  static void apply(const Suffix& step, std::vector<std::string>& tokens, End);
  static void apply(const ByteFallback&, std::vector<std::string>& tokens, End end);
  static void apply(const Fuse&, std::vector<std::string>& tokens, End);
  static void apply(const Strip& step, std::vector<std::string>& tokens, End);
  static void apply(const Replace& step, std::vector<std::string>& tokens, End);
  std::vector<Step> steps_;
  const char* between_ = " ";  // tokens, without a decoder
};

}  // namespace tessera::io
