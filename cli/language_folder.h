#pragma once

#include <optional>
#include <span>
#include <string>

#include "cli/sparse_flags.h"
#include "io/tokenizer/tokenizer.h"
#include "pretrained/language_model.h"

/// The causal language model of a folder, as commands that run one need it.

namespace tessera::cli {

/// The folder with config.json: `folder` itself (as of Hugging Face), or the export of a finished run,
/// "model" below it. Throws if there is neither.
std::string language_folder(const std::string& folder);

/// Reads the model. `dtype` f32, bf16, f16 or "": that of the weights in the file, on the CPU f32; a
/// warning is printed if config.json states another one. Throws, naming the folder, for a model that is not
/// a causal language model.
/// `sparse`, if given: its linear layers run compressed or under gates (pretrained::make_sparse), which is
/// printed; without it a compressed model is decompressed. `ranks`: those that share out a llama, each of
/// which calls this.
pretrained::LoadedLanguageModel load_language(const std::string& folder, Device device,
                                              const std::string& dtype,
                                              const std::optional<pretrained::SparseOptions>& sparse = {},
                                              const nn::TensorParallel& ranks = {});

/// Throws unless every token is one of the model's.
void check_vocabulary(const pretrained::LoadedLanguageModel& language, std::span<const int32_t> tokens,
                      const std::string& tokenizer);
/// What ends at model.longest(): "positions" or "tokens of the sliding window".
const char* limit_of(const models::LanguageModel& model);

}  // namespace tessera::cli
