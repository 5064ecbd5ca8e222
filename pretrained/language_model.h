#pragma once

#include <optional>
#include <string>
#include <vector>

#include "models/language_model.h"
#include "pretrained/load.h"
#include "pretrained/sparse_model.h"

/// The causal language model of a Hugging Face model directory, whichever it holds, dense or compressed.

namespace tessera::pretrained {

struct LoadedLanguageModel {
  std::string folder;
  Config config;
  models::LanguageModel model;
  DType stored = DType::f32;              // stored_dtype(folder)
  std::vector<SparseModule> sparse = {};  // its linear layers, if they may run sparse

  /// What a text without tokens begins with: config.json's bos_token_id, unless the model does not know it.
  std::optional<int64_t> first_token() const;
};

/// Reads the model. With `sparse` its linear layers run compressed or under gates (make_sparse); without it,
/// and in the mode off, they are dense: compressed ones are decompressed as they are read. Throws, before
/// anything is loaded, if the folder holds another kind of model, or one that cannot run as it is asked to.
LoadedLanguageModel load_language(const std::string& folder, const Rng& rng, Device device,
                                  const LoadOptions& options = {},
                                  const std::optional<SparseOptions>& sparse = {});

/// The model of a folder whose weights are dense. Throws if they are compressed.
models::LanguageModel load_dense_language(const std::string& folder, const Rng& rng, Device device,
                                          const LoadOptions& options = {});

void save(const models::LanguageModel& model, const std::string& folder, const SaveOptions& options = {});

}  // namespace tessera::pretrained
