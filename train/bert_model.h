#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "models/bert.h"
#include "pretrained/load.h"
#include "train/form_settings.h"

/// The parts that the jobs of `train bert` share.

namespace tessera::train {

/// The model of `config`, its dropout and head included, with the weights of a Hugging Face model directory;
/// parameters that its file lacks (a head), or has for another number of classes, are drawn. Throws if the
/// folder holds another model.
models::Bert load_bert_as(const models::BertConfig& config, const std::string& folder, const Rng& rng,
                          Device device, pretrained::LoadReport* report = nullptr);

/// Throws, naming the flag, unless the blocks of such a model can have that form.
void check_bert_forms(const FormSettings& factors, const models::BertConfig& config, bool has_weights);

/// The tokens of a text where no --max-length is given: 128, or the positions of the model if those are
/// fewer.
inline int64_t default_max_length(const models::BertConfig& config) {
  return std::min<int64_t>(128, config.longest());
}

}  // namespace tessera::train
