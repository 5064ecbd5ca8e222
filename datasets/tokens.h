#pragma once

#include <span>
#include <string>
#include <vector>

#include "datasets/token_shard.h"
#include "tensor/tensor.h"

/// Windows of tokens for language models; for Loader, which shuffles, resumes and reads ahead.

namespace tessera::datasets {

struct TokenBatch {
  Tensor inputs;   // i64 [B, T]
  Tensor targets;  // i64 [B, T]: inputs, one place on
  // Of `documents` only; otherwise empty tensors. Segments are the parts of documents, row by row.
  Tensor lengths;    // i32 [segments + 1]: cumulative, from 0 to B T
  Tensor positions;  // i64 [B, T]: within the segment
  void fields(auto&& visit) {
    visit("inputs", inputs), visit("targets", targets);
    visit("lengths", lengths), visit("positions", positions);
  }
};

struct TokenWindowsOptions {
  int64_t length = 1024;  // T
  /// Tokens from the beginning of a window to that of the next; 0: the length, so that each token is a target
  /// once. With less, an epoch of windows passes over the text several times, and cuts it elsewhere each
  /// time.
  int64_t stride = 0;
  /// Keep documents apart: `lengths` and `positions` for attention of variable length, and targets that are
  /// the first token of the next document become -100 (cross_entropy's ignore_index).
  bool documents = false;
  std::string fingerprint = {};  // of the tokenizer that the shards must come from; "": any
};

/// Packing: the tokens of all shards, one after the other, in windows of T + 1, each beginning at the last
/// token of the one before (or earlier: see stride); what is left at the end is not used. Item i is window i,
/// so a batch is a pure function of its indices. Safe from several threads.
class TokenWindows {
 public:
  /// Throws if there are no shards, fewer than T + 1 tokens, or the shards differ in tokenizer or vocabulary.
  TokenWindows(const std::vector<std::string>& paths, const TokenWindowsOptions& options);

  int64_t size() const { return int64_t((tokens_ - 1 - uint64_t(options_.length)) / stride() + 1); }
  TokenBatch batch(std::span<const int64_t> indices) const;
  uint64_t tokens() const { return tokens_; }
  int64_t vocab_size() const { return int64_t(shards_.front().info().vocab_size); }
  const std::string& fingerprint() const { return shards_.front().info().fingerprint; }
  const std::vector<TokenShard>& shards() const { return shards_; }

 private:
  uint64_t stride() const { return uint64_t(options_.stride > 0 ? options_.stride : options_.length); }
  std::vector<TokenShard> shards_;
  std::vector<uint64_t> begins_;  // of the shards among all tokens
  uint64_t tokens_ = 0;
  TokenWindowsOptions options_;
};

/// The shards of a part ("train", "validation") in a folder: "<part>-00000.tokens", ... in order. Throws if
/// there are none or one is missing between them.
std::vector<std::string> shard_paths(const std::string& folder, const std::string& part);
std::string shard_name(const std::string& part, int64_t number);

/// Whether a text has one line, with or without a line break at its end: it is cut after spaces then.
bool is_one_line(std::string_view text);

/// Cuts off the last `share` of a text, after the end of a line, or after a space if the text has one line,
/// as its own validation part. The two parts together are the whole text.
struct TextSplit {
  std::string_view train, validation;
};
TextSplit split_text(std::string_view text, double share);

/// Cuts a text into pieces of `bytes` bytes and the rest of the line (of the word if the text has one line);
/// the last piece may be half as long again. 0: one piece, the whole text. Each piece then has a validation
/// part of its own, so that these sample the whole text and not only its end.
std::vector<std::string_view> split_pieces(std::string_view text, uint64_t bytes);

}  // namespace tessera::datasets
