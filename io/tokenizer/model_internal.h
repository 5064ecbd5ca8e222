#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "io/tokenizer/file_internal.h"
#include "io/tokenizer/settings_internal.h"

/// The models of a tokenizer.json: a piece of text in, token numbers out.

namespace tessera::io {

/// The rank of a pair and the token that it becomes; a flat table.
class PairTable {
 public:
  struct Entry {
    uint64_t pair;
    int32_t rank, token;
  };
  /// A pair that is there already gets the new rank.
  void set(int32_t left, int32_t right, int32_t rank, int32_t token);
  const Entry* find(int32_t left, int32_t right) const;
  size_t size() const { return count_; }

 private:
  static uint64_t key(int32_t left, int32_t right) {
    return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
  }
  size_t slot(uint64_t pair) const;
  std::vector<Entry> slots_;  // pair kFree: none
  static constexpr uint64_t kFree = ~uint64_t{0};
  size_t count_ = 0;
};

/// Byte-pair encoding (Sennrich, Haddow, Birch, 2016, section 3.2): of all neighbours the pair of the lowest
/// rank is joined, leftmost first, until none has a rank. A word of n symbols costs O(n log n).
class Bpe {
 public:
  Bpe(const Settings& settings, const Vocabulary& vocabulary, const MergeList& merges, bool byte_level);
  void tokenize(std::string_view piece, std::vector<int32_t>& ids) const;

 private:
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // places; -1 is none
    bool gone;
  };
  void start(std::string_view piece, std::vector<int32_t>& symbols) const;
  void start_bytes(std::string_view piece, std::vector<int32_t>& symbols) const;
  void join_few(std::vector<int32_t>& symbols) const;
  void join_many(std::vector<int32_t>& symbols) const;

  const Vocabulary* vocabulary_;
  PairTable pairs_;
  bool byte_level_, byte_fallback_, fuse_unknown_, ignore_merges_, starts_bytes_;
  int32_t unknown_ = -1;
  std::string prefix_, suffix_;
  std::array<int32_t, 256> byte_tokens_{};  // if starts_bytes_, of the one byte; else of "<0x..>"; -1: none
};

/// BERT's longest match first (Wu et al., 2016; its tokenization.py): a word that cannot be covered is the
/// unknown token as a whole.
class WordPiece {
 public:
  WordPiece(const Settings& settings, const Vocabulary& vocabulary, bool byte_level);
  void tokenize(std::string_view piece, std::vector<int32_t>& ids) const;

 private:
  const Vocabulary* vocabulary_;
  bool byte_level_;
  int32_t unknown_;
  std::string prefix_;
  size_t most_characters_;
};

/// Whole words.
class WordLevel {
 public:
  WordLevel(const Settings& settings, const Vocabulary& vocabulary, bool byte_level);
  void tokenize(std::string_view piece, std::vector<int32_t>& ids) const;

 private:
  const Vocabulary* vocabulary_;
  bool byte_level_;
  int32_t unknown_;
};

using TokenModel = std::variant<Bpe, WordPiece, WordLevel>;
/// `byte_level`: pieces are bytes, tokens are written in GPT-2's byte alphabet.
TokenModel make_model(const Settings& settings, const Vocabulary& vocabulary, const MergeList& merges,
                      bool byte_level);

/// "<0x0A>" is 10; -1 if the text is no byte token.
int byte_of_token(std::string_view token);

}  // namespace tessera::io
