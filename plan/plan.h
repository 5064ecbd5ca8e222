#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "models/bert.h"
#include "models/language_model.h"
#include "models/tnp.h"
#include "nn/low_rank.h"

/// What a training step or a generated token takes, computed from a model's configuration before anything is
/// allocated: FLOPs (a multiply-add is two), bytes, parameters.

namespace tessera::plan {

/// FLOPs of one forward pass over a batch.
struct Flops {
  double gemms = 0;      // GEMMs with weights, without those of `heads`
  double attention = 0;  // Q K^T and P V: what the model's masks let pass
  double heads = 0;      // LM head; a TNP's mixture heads
  double forward() const { return gemms + attention + heads; }
  /// Forward and backward. Backward computes two GEMMs for each of forward's, and for attention 2.5 times
  /// forward's FLOPs, since it recomputes the scores. With activation checkpointing it repeats the blocks.
  double step(bool checkpointed = false) const {
    return 3 * (gemms + heads) + 3.5 * attention + (checkpointed ? gemms + attention : 0);
  }
};

/// Bytes of a training step, by kind, with AdamW: f32 gradients, moments and, for 16-bit parameters, masters
/// (a TNP in f64: gradients and moments in f64). Masks of 2:4 weights count as parameters.
struct Memory {
  double parameters = 0, gradients = 0, optimizer = 0;
  double averages = 0;   // of the weights, whole on each rank
  double saved = 0;      // activations kept for backward
  double transient = 0;  // the largest set of temporaries at one time
  double total() const { return parameters + gradients + optimizer + averages + saved + transient; }
};

/// Parameters of hidden layers that are matrices (optim::is_hidden_matrix), of one shape: what muon and
/// galore update.
struct HiddenMatrix {
  std::vector<int64_t> rows;  // of the matrices that each of them holds: those of q, k and v
  int64_t columns = 0;
  int64_t count = 0;
};

/// Bytes per token and hidden feature of a feed-forward network, or of factors with an activation between
/// them, that does not run as the dense ones do: ops::mlp_sparse24.
struct HiddenBytes {
  double saved = 0;      // for backward
  double transient = 0;  // of its backward pass
};

/// Language models, over `batch` sequences of `length` tokens. Of causal attention only the half below the
/// diagonal counts.
using models::LanguageConfig;
/// The form of the linear layers of a model's blocks; of each of transformers' modules on its own.
struct Forms {
  nn::FactorOptions attention = {.kind = nn::FactorKind::dense}, mlp = {.kind = nn::FactorKind::dense};
  bool are_dense() const {
    return attention.kind == nn::FactorKind::dense && mlp.kind == nn::FactorKind::dense;
  }
  std::optional<HiddenBytes> hidden = {};   // of sparse feed-forward networks
  std::optional<HiddenBytes> between = {};  // of cola layers with 2:4 activations between the factors
  bool attention24 = false, mlp24 = false;  // 2:4 weights (nn::Weights24)
  bool mvue24 = false;                      // their gradients of two of every four tokens
};
/// These throw if a rank is too large for a module.
int64_t count_parameters(const LanguageConfig& config, const Forms& forms = {});
Flops count_flops(const LanguageConfig& config, int64_t batch, int64_t length, const Forms& forms = {});
Memory count_memory(const LanguageConfig& config, int64_t batch, int64_t length, const Forms& forms = {});
std::vector<HiddenMatrix> hidden_matrices(const LanguageConfig& config, const Forms& forms = {});

/// The TNP, over `batch` tasks of `context` and `targets` points.
int64_t count_parameters(const models::TnpConfig& config);
Flops count_flops(const models::TnpConfig& config, int64_t batch, int64_t context, int64_t targets);
/// Of the rank with the largest share.
Memory count_memory(const models::TnpConfig& config, int64_t batch, int64_t context, int64_t targets,
                    const models::TaskSplit& split = {});
std::vector<HiddenMatrix> hidden_matrices(const models::TnpConfig& config);
/// Bytes that the rank with the largest share sends per training step for attention: keys and values, or
/// queries and results, and their gradients.
double count_attention_bytes(const models::TnpConfig& config, int64_t batch, int64_t context, int64_t targets,
                             const models::TaskSplit& split);

/// Linear layers of a BERT block that are sliced.
struct SlicedLayers {
  bool qkv = false, out = false, up = false, down = false;
};

/// A training step of BERT over `batch` sequences of `length` tokens.
struct BertStep {
  int64_t batch = 1, length = 128;
  int64_t masked = 0;  // tokens of a sequence that a masked language head predicts; 0: all
  enum class Trained : uint8_t { all, biases, head };  // biases: and the head
  Trained trained = Trained::all;
  Forms forms = {};
  /// The backward pass of `sliced`, which has an entry per block. Modes that do not know their rows before
  /// backward keep all of them; a threshold counts as all rows, and so does a share of 1.
  std::optional<nn::SlicedBackward> slice = {};
  std::vector<SlicedLayers> sliced = {};
  double drop = 0;     // DropBP: share of the branches' FLOPs; bytes and FLOPs are means over many draws
  bool on_gpu = true;  // where dropout has masks, and attention sums dq in f32
};

int64_t count_parameters(const models::BertConfig& config, const Forms& forms = {});
/// Those that get a gradient.
int64_t count_trained(const models::BertConfig& config, const BertStep& step);
/// One forward pass over `tokens` tokens of sequences of the mean length `length`, `read` of which the head
/// reads: the last block computes its feed-forward network, norms and attention's output for these alone.
Flops count_flops(const models::BertConfig& config, double tokens, double length, double read,
                  const Forms& forms = {});
Flops count_flops(const models::BertConfig& config, const BertStep& step);
/// Forward and backward; less than Flops::step where backward is sliced or dropped, or weights are frozen.
double step_flops(const models::BertConfig& config, const BertStep& step);
Memory count_memory(const models::BertConfig& config, const BertStep& step);
/// What sliced layers keep for backward, part of Memory::saved; a feed-forward network counts as a whole.
double sliced_bytes(const models::BertConfig& config, const BertStep& step);
std::vector<HiddenMatrix> hidden_matrices(const models::BertConfig& config, const Forms& forms = {});
/// FLOPs of one training step (Flops::step) as count_flops counts them, without the head, of which the last
/// block reads the first token per sequence if it is a classifier's.
double step_flops(const models::BertConfig& config, double tokens, double length);
/// Parameters of the linear layers of BERT's blocks in these forms. Throws if a rank is too large for one.
double count_block_weights(const models::BertConfig& config, const Forms& forms);

/// Generation with a language model whose weights, as far as a step reads them, take `weight_bytes`.
struct Generation {
  double flops = 0;
  double bytes = 0;  // read: weights, and keys and values from the cache
};
/// The forward pass over prompts of `prompt` tokens.
Generation prefill(const LanguageConfig& config, double weight_bytes, int64_t batch, int64_t prompt);
/// One token for each of `batch` sequences, with `cached` tokens in each one's cache (the mean over several
/// steps).
Generation decode(const LanguageConfig& config, double weight_bytes, int64_t batch, double cached);

}  // namespace tessera::plan
