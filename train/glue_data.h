#pragma once

#include <string>
#include <vector>

#include "datasets/glue_batches.h"
#include "io/tokenizer/tokenizer.h"
#include "models/bert.h"

/// The data of a fine-tuning run, prepared once for all of its seeds.

namespace tessera::train {

/// An evaluation or test split of a task.
struct GluePart {
  std::string name;    // of the file: "dev", "test", "dev_matched", ...
  std::string suffix;  // of its metrics' names: "", of MNLI "_matched" and "_mismatched"
  datasets::GlueItems items;
};

struct GlueSet {
  datasets::GlueTask task;
  datasets::GlueItems train;
  std::vector<GluePart> dev, test;  // one each, two of MNLI; `test` is empty unless asked for

  const datasets::GlueInfo& info() const { return datasets::glue_info(task); }
  /// Fingerprint of the tokens and labels of training and evaluation: a resumed run must have the same data.
  std::string fingerprint() const;
};

/// `folder` as GlueData has it. Throws, naming the file, for parts without labels where labels are needed,
/// and for a test part of which rows were left out: predictions for it would be of other rows.
GlueSet read_glue(datasets::GlueTask task, const std::string& folder, const io::Tokenizer& tokenizer,
                  int64_t max_length, bool with_test);

/// A packed batch on the device, in the form that the model takes. Token types are left out for a model that
/// has one only. Throws for a type that the model does not have. With `fixed_length` shapes do not depend on
/// the texts, so that one captured step serves all batches: there are `fixed_length` rows per text, and those
/// that the texts do not need are padding rows after the last one. 0: as many rows as tokens.
models::BertBatch bert_batch(const datasets::GlueBatch& batch, const models::BertConfig& config,
                             int64_t fixed_length, Device device);
/// Copies into the tensors of a batch of the same fixed length.
void copy_batch(const models::BertBatch& to, const models::BertBatch& from);

/// Trains a tokenizer for a model trained from scratch: byte-level BPE of the training texts, with BERT's
/// special tokens ([PAD] is 0) and its frame [CLS] a [SEP] b [SEP], types 0 and 1. Returns the text of a
/// tokenizer.json; the same texts give the same bytes.
std::string train_glue_tokenizer(datasets::GlueTask task, const std::string& folder, int64_t vocab_size);

}  // namespace tessera::train
