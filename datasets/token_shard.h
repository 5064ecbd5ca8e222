#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// Files of tokens.
///
/// A shard, all numbers little-endian: 128 bytes of head, the tokens (16 bits each if the vocabulary has at
/// most 65,536, else 32), zeros to a multiple of 8 bytes, and for each document the 64-bit place after its
/// last token. The head:
///
///     0  "TESSTOK1"             48  fingerprint of the tokenizer, 32 digits
///     8  u32 version, 1         80  XXH3-128 of all that follows the head, 32 digits
///    12  u32 bytes per token   112  the first 16 digits of the XXH3-128 of bytes 0 to 111
///    16  u64 tokens
///    24  u64 documents
///    32  u64 size of the vocabulary
///    40  i64 token that ends a document, -1: none

namespace tessera::datasets {

struct ShardInfo {
  uint64_t tokens = 0, documents = 0, vocab_size = 0;
  int64_t end_token = -1;
  std::string fingerprint;
  std::string digest;  // of the head, and so of all that the shard holds
};

/// Writes documents to a shard, which appears whole or not at all.
class TokenShardWriter {
 public:
  /// `fingerprint`: Tokenizer::fingerprint(). Throws if it has not 32 digits, or vocab_size is not 1 to 2^31.
  TokenShardWriter(int64_t vocab_size, std::string fingerprint, int64_t end_token = -1);
  /// A document; throws for a token outside the vocabulary. The end token is not added.
  void add(std::span<const int32_t> document);
  uint64_t tokens() const { return tokens_; }
  uint64_t documents() const { return ends_.size(); }
  /// Writes the file as AtomicFile does, and begins again.
  void write(const std::string& path);

 private:
  int64_t vocab_size_, end_token_;
  std::string fingerprint_, bytes_;
  uint64_t tokens_ = 0;
  std::vector<uint64_t> ends_;
};

/// A shard mapped into memory.
class TokenShard {
 public:
  /// Throws, naming the file, if it is no shard, of another version, cut, longer than it says or damaged.
  /// `verify`: read it whole and compare its checksum; without that a flipped bit shows up only as another
  /// token, or as one outside the vocabulary.
  explicit TokenShard(const std::string& path, bool verify = true);

  const std::string& path() const;
  const ShardInfo& info() const;
  /// Tokens [begin, begin + to.size()). Throws if they are not all there, if one is outside the vocabulary
  /// (with its place), or if the file has been cut since it was opened (where a mapping alone would end the
  /// process).
  void read(uint64_t begin, std::span<int64_t> to) const;
  /// Places within (begin, end) where a document ends and the next begins.
  std::vector<uint64_t> borders(uint64_t begin, uint64_t end) const;
  /// The place after the last token of each document, also of those without tokens.
  std::span<const uint64_t> ends() const;
  uint64_t empty_documents() const;

 private:
  struct Mapping;
  std::shared_ptr<const Mapping> mapping_;
};

}  // namespace tessera::datasets
