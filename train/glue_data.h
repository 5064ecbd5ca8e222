#pragma once

#include <string>
#include <vector>

#include "datasets/glue_batches.h"
#include "eval/glue.h"
#include "io/tokenizer/tokenizer.h"

/// The data of a fine-tuning run, prepared once for all of its seeds.

namespace tessera::train {

struct GlueSet {
  datasets::GlueTask task;
  datasets::GlueItems train;
  std::vector<eval::GluePart> dev, test;  // one each, two of MNLI; `test` is empty unless asked for

  const datasets::GlueInfo& info() const { return datasets::glue_info(task); }
  /// Fingerprint of the tokens and labels of training and evaluation: a resumed run must have the same data.
  std::string fingerprint() const;
};

/// `folder` as GlueData has it. Throws, naming the file, for parts without labels where labels are needed,
/// and for a test part of which rows were left out: predictions for it would be of other rows.
GlueSet read_glue(datasets::GlueTask task, const std::string& folder, const io::Tokenizer& tokenizer,
                  int64_t max_length, bool with_test);

/// Trains a tokenizer for a model trained from scratch: byte-level BPE of the training texts, with BERT's
/// special tokens ([PAD] is 0) and its frame [CLS] a [SEP] b [SEP], types 0 and 1. Returns the text of a
/// tokenizer.json; the same texts give the same bytes.
std::string train_glue_tokenizer(datasets::GlueTask task, const std::string& folder, int64_t vocab_size);

}  // namespace tessera::train
