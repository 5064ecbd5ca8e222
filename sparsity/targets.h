#pragma once

#include <algorithm>
#include <set>
#include <vector>

#include "sparsity/modules.h"
#include "sparsity/prune_options.h"

namespace tessera::sparsity {

/// A matrix to be pruned, and by how much.
struct Target {
  pretrained::LinearModule module;
  int64_t block = 0;
  double sparsity = 0;
};

/// The modules that fit a pattern of PruneOptions, the LM head among them; throws if none does.
inline std::vector<pretrained::LinearModule> modules_fitting(const pretrained::LinearModules& modules,
                                                             const std::string& pattern) {
  const bool last_part = pattern.find('.') == std::string::npos;
  return modules.matching(last_part ? "**." + pattern : pattern);
}

/// The names of those in blocks. Throws if none is: what a pattern of the LM head alone asks for is not done.
inline std::set<std::string> names_fitting(const pretrained::LinearModules& modules,
                                           const std::string& pattern) {
  std::set<std::string> names;
  for (const pretrained::LinearModule& module : modules_fitting(modules, pattern))
    if (is_in_block(module)) names.insert(module.name);
  check(!names.empty(), "prune: '", pattern,
        "' fits the LM head alone, which stays dense; name matrices of the model's blocks");
  return names;
}

/// The matrices that the options choose, in the model's order, with the sparsities that they assign. Throws
/// for options out of range or patterns of names that fit nothing (but in `except`: nothing in blocks), if
/// nothing is chosen, if the pattern n:m does not divide the columns of a matrix, and if the model is on a
/// GPU that cannot update one.
inline std::vector<Target> targets_of(models::LanguageRef model, const PruneOptions& options) {
  options.validate();
  const pretrained::LinearModules modules = pretrained::linear_modules(model);
  const int64_t blocks = model.blocks();
  check(options.first_block < blocks && options.last_block <= blocks, "prune: blocks ", options.first_block,
        " to ", options.last_block, "; the model has ", blocks);
  const int64_t end = options.last_block == -1 ? blocks : options.last_block;
  std::set<std::string> only, except;
  for (const std::string& pattern : options.only) only.merge(names_fitting(modules, pattern));
  for (const std::string& pattern : options.except)
    for (const pretrained::LinearModule& module : modules_fitting(modules, pattern))
      except.insert(module.name);
  std::vector<Target> targets;
  for (const pretrained::LinearModule& module : block_modules(model)) {
    const int64_t block = block_of(module);
    const bool chosen = options.first_block <= block && block < end &&
                        (only.empty() || only.contains(module.name)) && !except.contains(module.name);
    if (chosen != options.invert) targets.push_back({module, block, options.sparsity});
  }
  check(!targets.empty(),
        "prune: no matrix of the model's blocks is chosen; check --only, --except, --layers and --invert");
  for (const auto& [pattern, share] : options.assigned) {
    const std::set<std::string> names = names_fitting(modules, pattern);
    for (Target& target : targets)
      if (names.contains(target.module.name)) target.sparsity = share;
  }
  const int64_t group = options.pattern.group;
  for (const Target& target : targets)
    check(group == 0 || target.module.layer->in % group == 0, "prune: ", target.module.name, " has ",
          target.module.layer->in, " columns, which groups of ", group,
          " do not divide; choose another pattern, or ", "leave it out (--except)");
  for (const Target& target : targets)
    if (weight_of(target.module).device().is_cuda())
      options.check_gpu(target.module.name, target.module.layer->in);
  return targets;
}

}  // namespace tessera::sparsity
