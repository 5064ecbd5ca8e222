#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// The files of a tokenizer next to the data and the model of a run.

namespace tessera::train {

/// Trains a tokenizer for a BERT trained from scratch: byte-level BPE of the texts, with BERT's special
/// tokens ([PAD] is 0) and its frame [CLS] a [SEP] b [SEP], types 0 and 1. The same texts give the same
/// bytes; returns the text of a tokenizer.json. bert_tokenizer_config: of the tokenizer_config.json next to
/// it.
std::string train_bert_tokenizer(const std::vector<std::string>& texts, int64_t vocab_size);
std::string bert_tokenizer_config();

/// Copies the files of a tokenizer (a tokenizer.json, a .model, or the folder of one) with the files next to
/// it that belong to it.
void copy_tokenizer(const std::string& from, const std::string& folder);

/// The folder whose tokenizer made the shards in `data`: `data` itself, or `model` ("": none) if no tokenizer
/// lies next to the shards.
std::string tokenizer_folder(const std::string& data, const std::string& model);

/// Copies config.json and generation_config.json of the model that a run starts from to kBaseFolder of
/// `folder`, for export_language; copies nothing if the tokenizer in `folder` is not the model's (by its
/// tokens and end token).
inline constexpr const char* kBaseFolder = "base";
void keep_base_configs(const std::string& model, const std::string& folder);

}  // namespace tessera::train
