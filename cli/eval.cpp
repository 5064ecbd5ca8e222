#include "cli/eval.h"

namespace tessera::cli {

void add_eval(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("eval", "Evaluate a trained model");
  command->require_subcommand(1);
  add_eval_tnp(*command, action);
  add_eval_ppl(*command, action);
  add_eval_choice(*command, action);
}

}  // namespace tessera::cli
