#pragma once

#include "cli/commands.h"

/// The subcommands of `tessera eval`.

namespace tessera::cli {

void add_eval_tnp(CLI::App& eval, Action& action);
void add_eval_ppl(CLI::App& eval, Action& action);
void add_eval_choice(CLI::App& eval, Action& action);

}  // namespace tessera::cli
