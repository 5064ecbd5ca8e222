#pragma once

#include <vector>

#include "pretrained/layers.h"

/// The matrices that are pruned: the linear modules of a model's blocks, as transformers has them.

namespace tessera::sparsity {

inline bool is_in_block(const pretrained::LinearModule& module) {
  return module.ours.starts_with("blocks.");
}

/// The linear modules of all blocks, in order; the LM head is not one of them.
inline std::vector<pretrained::LinearModule> block_modules(models::LanguageRef model) {
  std::vector<pretrained::LinearModule> modules;
  for (const pretrained::LinearModule& module : pretrained::linear_modules(model).all)
    if (is_in_block(module)) modules.push_back(module);
  return modules;
}

/// As nn::parameters.
inline std::vector<nn::NamedParameter> parameters_of(models::LanguageRef model) {
  return model.visit([](const auto& held) { return nn::parameters(held); });
}

/// The number of a module's block.
inline int64_t block_of(const pretrained::LinearModule& module) {
  constexpr size_t kPrefix = sizeof("blocks.") - 1;
  return std::stoll(module.ours.substr(kPrefix));
}

/// The modules of one block.
inline std::vector<pretrained::LinearModule> modules_of_block(models::LanguageRef model, int64_t block) {
  std::vector<pretrained::LinearModule> modules;
  for (const pretrained::LinearModule& module : block_modules(model))
    if (block_of(module) == block) modules.push_back(module);
  return modules;
}

/// The module's rows of its layer's weight [rows, in]: a view, off the tape.
inline Tensor weight_of(const pretrained::LinearModule& module) {
  return module.layer->weight.detach().slice(0, module.first, module.first + module.rows);
}

}  // namespace tessera::sparsity
