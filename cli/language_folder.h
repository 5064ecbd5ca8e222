#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "cli/sparse_flags.h"
#include "io/tokenizer/tokenizer.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "pretrained/config.h"

/// The causal language model of a folder, as commands that run one need it.

namespace tessera::cli {

struct LanguageFolder {
  std::string path;  // where config.json lies
  pretrained::Config config;
  std::unique_ptr<Rng> rng;  // outlives the model
  std::variant<models::Gpt, models::Llama> model;
  DType stored = DType::f32;                          // that of the file (pretrained::stored_dtype)
  std::vector<pretrained::SparseModule> sparse = {};  // its linear layers, if they may run sparse
};

/// The folder with config.json: `folder` itself (as of Hugging Face), or the export of a finished run,
/// "model" below it. Throws if there is neither.
std::string language_folder(const std::string& folder);

/// Reads the model. `dtype` f32, bf16, f16 or "": that of the weights in the file, on the CPU f32; a
/// warning is printed if config.json states another one. Throws, naming the folder, for a model that is not
/// a causal language model.
/// `sparse`, if given: its linear layers run compressed or under gates (pretrained::make_sparse), which is
/// printed; without it a compressed model is decompressed. `ranks`: those that share out a llama, each of
/// which calls this.
LanguageFolder load_language(const std::string& folder, Device device, const std::string& dtype,
                             const std::optional<pretrained::SparseOptions>& sparse = {},
                             const nn::TensorParallel& ranks = {});

/// Throws unless every token is one of the model's.
void check_vocabulary(const LanguageFolder& language, std::span<const int32_t> tokens,
                      const std::string& tokenizer);
int64_t vocabulary_of(const LanguageFolder& language);
/// What a text without tokens begins with: config.json's bos_token_id, unless the model does not know it.
std::optional<int64_t> first_token_of(const LanguageFolder& language);
int64_t longest_of(const LanguageFolder& language);
/// What ends there: "positions" or "tokens of the sliding window".
const char* limit_of(const LanguageFolder& language);
DType dtype_of(const LanguageFolder& language);

}  // namespace tessera::cli
