#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "nn/prefix_block.h"

namespace tessera::models {

/// The Transformer Neural Process: from M context points (x, y) and N target positions x of B tasks, a
/// mixture of K Gaussians for y at every target (Nguyen, Grover: "Transformer Neural Processes",
/// arXiv:2207.04179; the sizes are those of the throughput study of its rectangular attention).
///
///   tokens     context (x, y), target (x, 0): L = M + N tokens of F + 1 numbers
///   embedder   F+1 -> embed_hidden -> SiLU -> d
///   blocks     x = LN(x + Attention(x)), x = LN(x + MLP(x)); queries from all L tokens, keys and values
///              from the first M: a target sees the context, not itself and no other target; no mask is ever
///              built. The last block computes only the targets' rows
///   heads      K networks d -> d_ff -> SiLU -> 3 on the targets only: (logit_weight, mu, log_sigma)
///
/// Without biases; no positional code: the model is invariant to the order of the context. Tokens are kept
/// token-major, [L, B, d]: the context is then the plain prefix of the rows, the targets the plain suffix,
/// and no layer copies.
struct TnpConfig {
  int64_t features = 10;  // F
  int64_t d_model = 512;  // d
  int64_t d_ff = 1365;
  int64_t heads = 8;  // head_dim: d_model / heads = 64
  int64_t layers = 12;
  int64_t components = 10;  // K
  int64_t embed_hidden = 512;
  bool pre_norm = false;         // x + f(LN(x)) and a last LN, instead of post-norm
  int64_t checkpoint_every = 0;  // activation checkpointing of groups of that many blocks; 0: none
  DType dtype = DType::f32;      // of parameters and activations

  void fields(auto&& visit) {
    visit("features", features), visit("d_model", d_model), visit("d_ff", d_ff), visit("heads", heads);
    visit("layers", layers), visit("components", components), visit("embed_hidden", embed_hidden);
    visit("pre_norm", pre_norm), visit("checkpoint_every", checkpoint_every), visit("dtype", dtype);
  }
  /// Throws, naming the size, unless a model of these sizes can be built.
  void validate() const;
};

/// How many ranks share each task, and how they divide attention.
struct TaskSplit {
  int64_t ranks = 1;
  nn::AttentionSplit::By by = nn::AttentionSplit::By::rows;
};

/// Tasks of M context points and N targets on the ranks of a group: each rank holds its share of the rows of
/// both (comm::RowSplit). The model's parameters are whole on every rank.
struct TnpSplit {
  /// Throws if the group has more ranks than there are context points or targets.
  TnpSplit(comm::Communicator group, nn::AttentionSplit::By by, int64_t context, int64_t targets);
  int rank() const { return tokens.group.rank(); }
  int64_t all_targets() const { return targets.queries.total(); }
  int64_t own_targets() const { return targets.queries.count(rank()); }

  nn::AttentionSplit tokens;   // of the blocks: queries from the context and the targets
  nn::AttentionSplit targets;  // of the last block, whose queries are the targets
};

/// One batch of tasks. f32 or the model's dtype for inputs; targets f32. With `split` this rank's rows of it.
struct TnpBatch {
  Tensor xc, yc;  // [B, M, F], [B, M, 1]
  Tensor xt, yt;  // [B, N, F], [B, N, 1]
  std::shared_ptr<const TnpSplit> split = nullptr;
};
/// This rank's rows, views, of a whole batch.
TnpBatch part_of(const TnpBatch& whole, std::shared_ptr<const TnpSplit> split);

struct Tnp {
  Tnp(const TnpConfig& config, const Rng& rng, Device device);
  /// Mixture parameters [N, B, K, 3], token-major.
  Tensor operator()(const Tensor& xc, const Tensor& yc, const Tensor& xt, Site site = Site::here()) const;
  /// Mean negative log-likelihood of the targets in nats per point. For a batch with a split, this rank's
  /// share: the sum over its own targets divided by the number of all targets, so that losses and gradients
  /// of the ranks add up to those of the whole task.
  Tensor loss(const TnpBatch& batch, Site site = Site::here()) const;
  /// Of each target (with a split, of each one of this rank's): [B, N]. For evaluation, without a tape.
  Tensor point_losses(const TnpBatch& batch, Site site = Site::here()) const;

  /// The stages of a pass, of which operator() and loss are composed: embed, each block in turn, finish.
  /// embed: [L, B, d], of which the first M tokens are the context.
  Tensor embed(const Tensor& xc, const Tensor& yc, const Tensor& xt, Site site = Site::here()) const;
  /// Block i over x [L, B, d] -> [L, B, d]; the last one -> [N, B, d], the targets.
  Tensor block(int64_t i, const Tensor& x, int64_t context, const TnpSplit* split = nullptr,
               Site site = Site::here()) const;
  /// The last block's output -> mixture parameters [N, B, K, 3].
  Tensor finish(const Tensor& x, Site site = Site::here()) const;
  /// The same -> the mean loss of the targets yt [B, N, 1].
  Tensor finish(const Tensor& x, const Tensor& yt, Site site = Site::here()) const;

  void fields(auto&& visit) {
    visit("embed_in", embedder.up), visit("embed_out", embedder.down);
    visit("blocks", blocks), visit("norm", norm);
    visit("head_in", mixture.up), visit("head_out", mixture.down);
  }
  nn::LayerName layer_name;  // for messages

  TnpConfig config;
  nn::Mlp embedder;
  std::vector<nn::PrefixBlock> blocks;
  std::optional<nn::LayerNorm> norm;  // pre-norm only
  nn::GroupedMlp mixture;             // the K heads

 private:
  /// The last block's output.
  Tensor hidden(const TnpBatch& batch) const;
};

}  // namespace tessera::models
