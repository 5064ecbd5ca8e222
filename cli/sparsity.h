#pragma once

#include "cli/commands.h"

/// The subcommands of `tessera sparsity` that have a file of their own.

namespace tessera::cli {

void add_sparsity_sweep(CLI::App& group, Action& action);
void add_sparsity_gradients(CLI::App& group, Action& action);
void add_sparsity_import(CLI::App& group, Action& action);
void add_sparsity_patterns(CLI::App& group, Action& action);  // analyze, compare
void add_sparsity_quality(CLI::App& group, Action& action);

}  // namespace tessera::cli
