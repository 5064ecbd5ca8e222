#pragma once

#include <span>
#include <vector>

#include "datasets/glue.h"
#include "io/tokenizer/tokenizer.h"
#include "tensor/tensor.h"

/// Batches of GLUE examples for BERT and its like; for Loader.

namespace tessera::datasets {

struct GlueBatch {
  Tensor ids;      // i64 [B, L], or [tokens] packed
  Tensor types;    // i64, the same shape: 0 in the first text, 1 in the second
  Tensor mask;     // bool [B, L]: true at tokens, false at padding; packed: empty
  Tensor lengths;  // i32 [B + 1]: cumulative numbers of tokens without padding
  Tensor labels;   // i64 [B] of classes, f32 [B] of scores; empty if the file has none
  void fields(auto&& visit) {
    visit("ids", ids), visit("types", types), visit("mask", mask);
    visit("lengths", lengths), visit("labels", labels);
  }
};

struct GlueBatchOptions {
  int64_t max_length =
      128;              // tokens, special ones included; longer texts are cut, the longer of a pair first
  bool packed = false;  // one text after the other, no padding: attention by `lengths`
  int64_t pad_to = 0;   // L; 0: the longest of the batch. Fixed shapes can be captured in a graph
  int64_t pad_multiple = 1;  // of L, if it is the longest of the batch
};

/// The examples of a file, tokenized once.
class GlueItems {
 public:
  /// Throws if `pad_to` is below max_length, max_length leaves no room for text next to the special tokens,
  /// or the tokenizer has no padding token and padding is needed.
  GlueItems(const GlueData& data, const io::Tokenizer& tokenizer, const GlueBatchOptions& options = {});
  int64_t size() const { return int64_t(labels_.size()); }
  GlueBatch batch(std::span<const int64_t> indices) const;
  /// Of all items, without padding.
  int64_t tokens() const { return int64_t(ids_.size()); }
  /// Texts that were cut.
  int64_t cut() const { return cut_; }
  double label(int64_t i) const { return double(labels_.at(size_t(i))); }
  bool has_labels() const { return has_labels_; }
  const GlueInfo& info() const { return *info_; }
  /// XXH3 (32 hexadecimal digits) of tokens, types and labels.
  std::string fingerprint() const;

 private:
  const GlueInfo* info_;
  GlueBatchOptions options_;
  int32_t pad_ = 0;
  bool has_labels_;
  std::vector<int32_t> ids_;
  std::vector<uint8_t> types_;
  std::vector<uint64_t> ends_;
  std::vector<float> labels_;
  int64_t cut_ = 0;
};

}  // namespace tessera::datasets
