#pragma once

#include <string>
#include <vector>

#include "models/bert.h"
#include "models/language_model.h"

/// Linear layers by the names of their modules in transformers: "model.layers.3.self_attn.q_proj". The names
/// are those of the table that weights are loaded and saved by (pretrained/names.h).

namespace tessera::pretrained {

/// A linear module of transformers: rows first ... first + rows - 1 of the weight [out, in] of one of our
/// layers, and of its bias. Several modules may be one layer here: q, k and v, or gate and up.
struct LinearModule {
  std::string name;   // in transformers
  std::string ours;   // "blocks.3.attention.qkv"
  nn::Linear* layer;  // of the model; its weight is undefined where it is tied, or compressed
  int64_t first = 0, rows = 0;
  bool transposed = false;  // files hold the weight as [in, out] (GPT-2's Conv1D)
};

/// The linear modules of one model. They refer to it: do not move it.
struct LinearModules {
  std::vector<LinearModule> all;  // in the order of our layers, and of the rows of each
  std::string prefix;             // of the whole model; names may leave it out: "model."

  /// The module of that name, or throws.
  const LinearModule& at(const std::string& name) const;
  /// Those whose name fits the pattern: in each component between dots "*" stands for any characters, and the
  /// component "**" stands for any number of components. "encoder.layer.*.output.dense" fits the second
  /// projection of BERT's feed-forward networks, but not "...attention.output.dense". Throws if none fits.
  std::vector<LinearModule> matching(const std::string& pattern) const;
};

/// One of our layers with the rows of its modules, from the top.
struct LayerParts {
  std::string name;  // "blocks.3.attention.qkv"
  nn::Linear* layer;
  std::vector<int64_t> rows;
};
std::vector<LayerParts> layer_parts(const LinearModules& modules);

/// Sets the form of every layer whose modules fit one of the patterns, which are separated by commas; "all"
/// stands for every linear module. Returns the names of the layers in our model, in order. Throws, before any
/// is set, if a pattern fits no module, or names some of the modules of one layer and not all (q without k
/// and v): a layer has one form.
std::vector<std::string> set_form(const LinearModules& modules, const std::string& patterns,
                                  const nn::Form& form);

LinearModules linear_modules(models::LanguageRef model);
LinearModules linear_modules(models::Bert& model);

}  // namespace tessera::pretrained
