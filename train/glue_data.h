#pragma once

#include <string>
#include <vector>

#include "datasets/glue_batches.h"
#include "io/tokenizer/tokenizer.h"
#include "models/bert.h"

/// The data of a fine-tuning run, prepared once for all of its seeds.

namespace tessera::train {

/// The part of a task that models are judged by.
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
  /// Of the tokens and labels to train and judge by: a run goes on only with the data that it began with.
  std::string fingerprint() const;
};

/// `folder` as GlueData has it. Throws, naming the file, for parts without labels where labels are needed,
/// and for a test part of which rows were left out: predictions for it would be of other rows.
GlueSet read_glue(datasets::GlueTask task, const std::string& folder, const io::Tokenizer& tokenizer,
                  int64_t max_length, bool with_test);

/// A packed batch on the device, as the model takes it. Token types are left out for a model that has one
/// only. Throws for a type that the model does not have. With `fixed_length` shapes do not depend on the
/// texts, so that one captured step serves all batches: each text has so many rows, those that it does not
/// need stand behind the last text and belong to none. 0: as many as there are tokens.
models::BertBatch bert_batch(const datasets::GlueBatch& batch, const models::BertConfig& config,
                             int64_t fixed_length, Device device);
/// Copies into the tensors of a batch of the same fixed length.
void copy_batch(const models::BertBatch& to, const models::BertBatch& from);

/// A tokenizer for a model that begins from nothing: byte-level BPE of the texts to train on, with BERT's
/// special tokens ([PAD] is 0) and its frame [CLS] a [SEP] b [SEP], types 0 and 1. The same texts give the
/// same bytes; the text of a tokenizer.json.
std::string train_glue_tokenizer(datasets::GlueTask task, const std::string& folder, int64_t vocab_size);

}  // namespace tessera::train
