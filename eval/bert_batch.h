#pragma once

#include "datasets/glue_batches.h"
#include "models/bert.h"

namespace tessera::eval {

/// A packed batch on the device, in the form that the model takes. Token types are left out for a model that
/// has one only. Throws for a type that the model does not have. With `fixed_length` shapes do not depend on
/// the texts, so that one captured step serves all batches: there are `fixed_length` rows per text, and those
/// that the texts do not need are padding rows after the last one. 0: as many rows as tokens.
models::BertBatch bert_batch(const datasets::GlueBatch& batch, const models::BertConfig& config,
                             int64_t fixed_length, Device device);
/// Copies into the tensors of a batch of the same fixed length.
void copy_batch(const models::BertBatch& to, const models::BertBatch& from);

}  // namespace tessera::eval
