#pragma once

#include <cstdint>
#include <vector>

#include "datasets/shuffle.h"
#include "io/tokenizer/tokenizer.h"
#include "models/bert.h"

/// Masked language modelling: which tokens of a text a model has to predict.

namespace tessera::train {

/// Sequences [CLS] text [SEP] of which some tokens are to be predicted (Devlin et al., arXiv:1810.04805,
/// section 3.1).
struct MaskedBatch {
  std::vector<int64_t> tokens;   // of all sequences, one after the other
  std::vector<int64_t> lengths;  // of each
  std::vector<int64_t> rows;     // where a token is to be predicted, ascending
  std::vector<int64_t> targets;  // the tokens that stood there
};

/// The batch as the model's input, and the targets at `masked`.
models::BertBatch masked_bert_batch(const MaskedBatch& batch, const models::BertConfig& config, Device device,
                                    Tensor& targets);

/// How many of a text's `length` tokens are chosen: round(share * length), but at least one.
int64_t masked_tokens(int64_t length, double share);

/// Masks tokens for a model with this tokenizer.
class Masking {
 public:
  /// Throws, naming the tokenizer, unless it has [CLS], [SEP] and [MASK]. `order`: MlmSettings::data_order.
  Masking(const io::Tokenizer& tokenizer, double share, int64_t order = datasets::kDataOrder);
  /// Of each text masked_tokens() tokens are chosen at random; 80 % of them become
  /// [MASK], 10 % another ordinary token at random, 10 % stay. So batches of equal lengths have equal shapes.
  /// What becomes of a text is a pure function of it, the seed, the index, and its row, counted from `first`
  /// on.
  MaskedBatch batch(const std::vector<std::vector<int64_t>>& texts, uint64_t seed, uint64_t index,
                    uint64_t first = 0) const;

 private:
  int64_t cls_, sep_, mask_;
  std::vector<int64_t> ordinary_;  // tokens that are not special
  double share_;
  int64_t order_;
};

}  // namespace tessera::train
