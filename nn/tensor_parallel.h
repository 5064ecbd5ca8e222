#pragma once

#include "nn/embedding.h"
#include "nn/norm.h"
#include "ops/all_reduce_rmsnorm/all_reduce_rmsnorm.h"

namespace tessera::nn {

/// Tensor parallelism of a decoder (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3). Each rank
/// has some of the heads, of each feed-forward network's hidden features and of the vocabulary; the residual
/// stream and the norms are replicated. The outputs of a rank's embedding, attention and feed-forward
/// network are partial sums, which are all-reduced where the residual stream is normalised next. Inference
/// only.
class TensorParallel {
 public:
  /// One rank, which has all.
  TensorParallel() = default;
  explicit TensorParallel(ops::RankGroup ranks) : ranks_(std::move(ranks)) {}

  int rank() const { return ranks_.rank(); }
  int size() const { return ranks_.size(); }
  bool shares() const { return size() > 1; }
  const ops::RankGroup& ranks() const { return ranks_; }

  /// Rows of the vocabulary on each rank: a multiple of 8, so that a rank's logits are whole 16-byte words;
  /// the last ranks have padding rows.
  static int64_t vocabulary_rows(int64_t vocabulary, int ranks);

  /// This rank's share of the embedding of tokens [N] of `vocabulary`.
  Tensor embed(const Embedding& token, const Tensor& tokens, int64_t vocabulary,
               Site site = Site::here()) const;
  /// sum = x + the all-reduce of `share`, which is overwritten; y = the norm of sum. x may be undefined.
  ops::AddNorm add(const RmsNorm& norm, const Tensor& x, const Tensor& share, Site site = Site::here()) const;
  /// Logits [N, vocabulary] from each rank's columns.
  Tensor gather(const Tensor& logits, int64_t vocabulary, Site site = Site::here()) const;

 private:
  ops::RankGroup ranks_;
};

}  // namespace tessera::nn
