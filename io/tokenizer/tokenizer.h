#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// Tokenizers, read from the files that models come with:
///
///   tokenizer.json          of Hugging Face: byte-level BPE (GPT-2, RoBERTa, LLaMA-3), BPE with
///                           byte fallback (LLaMA-2), WordPiece (BERT), WordLevel
///   vocab.json, merges.txt  the older pair of GPT-2 and RoBERTa
///   vocab.txt               BERT's
///   *.model                 of SentencePiece (LLaMA-2, T5), by its library
///
/// Next to a vocabulary that is no tokenizer.json, tokenizer_config.json, special_tokens_map.json and
/// added_tokens.json say which tokens are special, which are added, and what stands around a text
/// (add_bos_token, add_eos_token); next to any, which token ends a text (eos_token).
///
/// The tokens are those of the library `tokenizers` (0.23) and of SentencePiece, one for one; the fields
/// `truncation` and `padding` of a tokenizer.json are left to the caller. Bytes that are not UTF-8 are read
/// as U+FFFD, one for each maximal part of an ill-formed sequence, as Python's errors="replace" does.
///
/// A file is bounded in every respect before anything is allocated; errors are reported with their
/// place, such as "x.json: model.merges[17] joins "ab", which is not in the vocabulary".

namespace tessera::io {

struct Encoding {
  std::vector<int32_t> ids;
  std::vector<int32_t> types;  // of each token: 0 in the first text, 1 in the second, as the file says
};

struct EncodeOptions {
  bool special = true;     // put the special tokens of the file around the text
  int64_t max_length = 0;  // truncate to this many tokens, special ones included, longer text first; 0: off
};

/// Ids of the tokens with a role, from tokenizer_config.json or special_tokens_map.json if present, else by
/// their usual names (of a .model: as it says).
struct SpecialTokens {
  std::optional<int32_t> bos, eos, pad, unk, cls, sep, mask;
};

/// A handle with a cache of words: copies share all but the cache. One handle serves one thread.
class Tokenizer {
 public:
  /// A file named above, or a folder with one (the first in the order above).
  static Tokenizer load(const std::string& path);
  /// Whether `folder` has the files of one.
  static bool is_in(const std::string& folder);
  /// From the text of a tokenizer.json; `name` is for messages.
  static Tokenizer parse(const std::string& name, std::string_view json);
  /// From the bytes of a SentencePiece model.
  static Tokenizer parse_sentencepiece(const std::string& name, std::string_view bytes);

  Tokenizer(const Tokenizer& other);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer other) noexcept;
  ~Tokenizer();

  Encoding encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// Two texts, as BERT takes them.
  Encoding encode_pair(std::string_view first, std::string_view second,
                       const EncodeOptions& options = {}) const;
  /// The text of tokens, valid UTF-8. Throws if one has no token (see `has`).
  std::string decode(std::span<const int32_t> ids, bool skip_special = true) const;

  /// The number of rows that an embedding needs: the largest id plus 1.
  int64_t vocab_size() const;
  /// Number of tokens; fewer than vocab_size() if some ids are unused.
  int64_t token_count() const;
  bool has(int32_t id) const;
  /// As the file writes it: "Ġthe", "##ing", "▁a"; an added token that is normalized, as its normalizer
  /// leaves it.
  std::string token(int32_t id) const;
  std::optional<int32_t> id_of(std::string_view token) const;
  bool is_special(int32_t id) const;
  const SpecialTokens& special() const;

  /// "BPE, byte level", "BPE", "characters", "bytes" (of BPE without a pair to join), "WordPiece",
  /// "WordLevel", "SentencePiece".
  std::string kind() const;
  const std::string& path() const;
  /// XXH3 (32 hexadecimal digits) of everything that determines the tokens: equal for equal tokenizers,
  /// however their files are laid out.
  const std::string& fingerprint() const;

 private:
  struct Core;
  class Cache;
  explicit Tokenizer(std::shared_ptr<const Core> core);
  static std::shared_ptr<Core> build(struct TokenizerFile file);
  static std::shared_ptr<Core> build_sentencepiece(const std::string& name, std::string_view bytes,
                                                   const struct TokenizerConfig& config);
  static void find_special(Core& core, const struct TokenizerConfig& config);
  friend class TokenStream;
  /// As decode, without a character at the end whose last bytes are missing (then `open`); other bytes that
  /// are no UTF-8 may stay.
  std::string decode_open(std::span<const int32_t> ids, bool& open) const;
  void append(std::string_view text, std::vector<int32_t>& ids) const;
  void append_pieces(std::string_view text, std::vector<int32_t>& ids) const;
  std::string decode_pieces(std::span<const int32_t> ids, bool skip_special) const;
  void append_plain(std::string_view text, bool at_start, std::vector<int32_t>& ids) const;
  std::shared_ptr<const Core> core_;
  std::unique_ptr<Cache> cache_;
};

/// Which libraries of tokenizers this build has.
struct TokenizerLibraries {
  bool pcre2 = false, utf8proc = false, sentencepiece = false;
};
TokenizerLibraries tokenizer_libraries();

/// Text from tokens as they come, in whole characters: the texts that next() and finish() return, joined, are
/// what decode() gives for all tokens. (One exception: where byte tokens of a tokenizer with byte fallback do
/// not form UTF-8, decode() replaces the whole run of them, the stream only the invalid ones.)
class TokenStream {
 public:
  explicit TokenStream(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}
  /// Text that is certain now; "" while a character is incomplete.
  std::string next(int32_t id);
  /// The text that is held back.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  bool skip_special_;
  std::vector<int32_t> ids_;  // the last token whose text is out, and those after it
  size_t given_ = 0;          // bytes of their text that are out
};

}  // namespace tessera::io
